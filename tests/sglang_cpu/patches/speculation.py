"""Speculative decoding in SGLang on a CPU: plain PyTorch instead of compiled kernels.

SGLang 0.5.23 supports speculation on CPUs with AMX, with kernels in its CPU build of ``sgl_kernel``. :func:`install`
replaces functions from the stub of ``sgl_kernel``, by functions of the same names, adds two kinds of attention to the
backend ``torch_native``, and enables overlap in the scheduler. The rest is the engine's code, which verifies by argmax
at any temperature on a CPU.
"""

import ctypes
import sys
from itertools import product
from types import ModuleType

import sgl_kernel
import torch
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers import overlap_utils, scheduler
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from torch.nn.functional import scaled_dot_product_attention


def slots_between(rows, table, starts, ends):
    """The slots in a slot table between two positions, request after request."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return torch.cat([table[row, start:end] for row, start, end in spans])


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, _width):
    """Write new slots to the table, request after request."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(rows, table, starts, ends, out, _width):
    """The target slots of verified or moved tokens."""
    slots = slots_between(rows, table, starts, ends)
    out[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, out, _width, topk, steps):
    """Slots of the drafts, branch after branch."""
    out.copy_(slots_between(rows, table, seq_lens, seq_lens + topk * steps))


def fill_bonus_tokens_cpu(accepted, lens, out, _stride):
    """The last accepted token of each request, from which it continues."""
    out.copy_(accepted.gather(1, lens[:, None].long() - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(index, slots, out):
    """The slots of accepted tokens, without gaps."""
    kept = slots[index[index >= 0].long()]
    out[: len(kept)] = kept


def copy_all_layer_kv_cache_cpu(addresses, strides, targets, sources):
    """Move keys and values of accepted tokens, given by address."""
    slots = 1 + int(max(targets.max(), sources.max()))
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        memory = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        memory[targets] = memory[sources]


def sgl_build_tree_kernel_efficient_cpu(
    parent_list, chosen, seq_lens, mask, positions, index, next_token, next_sibling, topk, depth, nodes, mode
):
    """The attention mask and the links of each tree of drafts.

    Node 0 is the last committed token. Node ``i`` is the draft with the number ``chosen[i - 1]``: ``topk`` drafts at a
    time, first below the root, then below each draft in ``parent_list``.
    """
    assert mode == spec_tree.TreeMaskMode.QLEN_ONLY
    sees = torch.eye(nodes, dtype=torch.bool).repeat(len(seq_lens), 1, 1)
    for row, numbers in enumerate(chosen.tolist()):
        parents = parent_list[row].tolist()
        node_of = {number: node for node, number in enumerate(numbers, start=1)}
        for node, number in enumerate(numbers, start=1):  # parents come before their children, and numbers ascend
            sees[row, node] |= sees[row, 0 if number < topk else node_of[parents[number // topk]]]
    mask.copy_(sees.flatten())
    reconstruct_indices_from_tree_mask(mask, seq_lens, positions, index, next_token, next_sibling, len(sees), nodes)


def reconstruct_indices_from_tree_mask(mask, seq_lens, positions, index, next_token, next_sibling, batch_size, nodes):
    """Replaces the CUDA kernel of this name, which has no CPU build: the links of trees, also of NGRAM's.

    Each node is linked to its first child and its next sibling, -1 without one. Its parent is its last ancestor.
    """
    ancestors = mask.view(batch_size, nodes, nodes).bool() & torch.ones(nodes, nodes).tril(-1).bool()
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row, node in product(range(batch_size), reversed(range(1, nodes))):
        parent = ancestors[row, node].nonzero().max()
        next_sibling[row, node] = next_token[row, parent]
        next_token[row, parent] = node
    positions.copy_((seq_lens[:, None] + ancestors.sum(-1)).flatten())


def sgl_verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,  # codespell:ignore: the engine's spelling
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow the child chosen by the base model from the root on."""
    tokens, best = candidates.tolist(), target_predict.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row in range(len(tokens)):
        path, child = [0], children[row][0]
        while child >= 0 and len(path) < accept_index.shape[1]:
            if tokens[row][child] == best[row][path[-1]]:
                path.append(child)
                child = children[row][child]
            else:
                child = siblings[row][child]
        kept = retrive_index[row, path]
        accept_index[row, : len(path)] = kept.to(accept_index.dtype)
        predicts[kept] = target_predict[row, path].to(predicts.dtype)
        accept_token_num[row] = len(path) - 1


def gather_spec_extras(rows, *tables):
    """Replaces the Triton kernel of this name: rows of tensors that a step passes to the next step."""
    return [None if table is None else table[rows] for table in tables]


def attend_to_tree(self, q, k, v, layer, forward_batch, save_kv_cache=True):
    """Replaces ``torch_native``'s attention over prompts, which does not support verification: a draft attends to the
    committed tokens and to the drafts in the tree's mask. Sliding windows are not supported."""
    if not forward_batch.forward_mode.is_target_verify():
        return attend_to_prompt(self, q, k, v, layer, forward_batch, save_kv_cache)
    assert layer.sliding_window_size is None or layer.sliding_window_size < 0
    if save_kv_cache:
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
    nodes, rows = forward_batch.spec_info.draft_token_num, forward_batch.req_pool_indices
    tree = forward_batch.spec_info.custom_mask[: len(rows) * nodes * nodes].view(-1, nodes, nodes)
    keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
    outputs = []
    queries = q.view(len(rows), nodes, layer.tp_q_head_num, layer.qk_head_dim)
    for query, row, length, sees in zip(queries, rows, forward_batch.seq_lens.tolist(), tree, strict=True):
        slots = self.req_to_token_pool.req_to_token[row, : length + nodes]
        mask = torch.cat([sees.new_ones(nodes, length), sees], dim=1)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, keys[slots].to(q), values[slots].to(q)))
        output = scaled_dot_product_attention(query, key, value, mask, scale=layer.scaling, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1).reshape(nodes, -1))
    return torch.cat(outputs)


attend_to_prompt = TorchNativeAttnBackend.forward_extend


class DraftBackend(TorchNativeAttnBackend):
    """Attention of a step of the draft model: each branch attends to the committed tokens and to its drafts."""

    table = seq_lens = None

    def _run_sdpa_forward_decode(self, query, output, keys, values, _table, _rows, _seq_lens, *args, **kwargs):
        rows = torch.arange(len(self.table))
        super()._run_sdpa_forward_decode(query, output, keys, values, self.table, rows, self.seq_lens, *args, **kwargs)


class DraftBackends:
    """One backend per draft step, because ``torch_native`` does not draft in several steps.

    The drafts of a branch have ``steps`` separate slots after the committed tokens, in the layout of
    :func:`assign_draft_cache_locs_contiguous_cpu`.
    """

    def __init__(self, runner, topk, steps):
        self.topk, self.steps = topk, steps
        self.attn_backends = [DraftBackend(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch):
        seq_lens = forward_batch.seq_lens.repeat_interleave(self.topk)
        rows = forward_batch.req_pool_indices.repeat_interleave(self.topk)
        branch = torch.arange(self.topk).repeat(len(forward_batch.seq_lens))
        table = self.attn_backends[0].req_to_token_pool.req_to_token[rows]
        own = seq_lens[:, None] + torch.arange(self.steps)
        table.scatter_(1, own, table.gather(1, own + branch[:, None] * self.steps))
        for step, backend in enumerate(self.attn_backends, start=1):
            backend.init_forward_metadata(forward_batch)
            backend.table, backend.seq_lens = table, seq_lens + step


def create_decode_backend(factory):
    """Replaces the factory's method, because its list of draft backends lacks ``torch_native``."""
    steps = factory.speculative_num_steps
    return DraftBackends(factory.draft_model_runner, factory.topk, steps) if steps > 1 else None


def overlap(self):
    """Enable overlap again, which the engine disables for speculation on a CPU, before the draft model is loaded."""
    if not self.server_args.disable_overlap_schedule:  # the requested value, not the resolved one
        get_context().override("tests", disable_overlap_schedule=False)
        self.enable_overlap = self.tp_worker.enable_overlap = True
    init_draft_worker(self)


init_draft_worker = scheduler.Scheduler.maybe_init_draft_worker


def install():
    """Replace the engine's functions before a model is loaded."""
    kernels = {
        allocation: [assign_req_to_token_pool_cpu],
        cache_move: [copy_all_layer_kv_cache_cpu],
        cache_locs: [assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu],
        eagle: [fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu],
        spec_tree: [sgl_build_tree_kernel_efficient_cpu, sgl_verify_tree_greedy_cpu],
        overlap_utils: [gather_spec_extras],
    }
    replacements = [(module, function.__name__, function) for module, of in kernels.items() for function in of]
    replacements += [
        (TorchNativeAttnBackend, "forward_extend", attend_to_tree),
        (DraftBackendFactory, "create_decode_backend", create_decode_backend),
        (DraftBackendFactory, "create_draft_extend_backend", lambda _: None),  # the draft model's backend is enough
        (scheduler.Scheduler, "maybe_init_draft_worker", overlap),
    ]
    for owner, name, function in replacements:
        assert hasattr(owner, name), f"{owner} has no {name}"
        setattr(owner, name, function)
    sgl_kernel.speculative = ModuleType("sgl_kernel.speculative")
    sgl_kernel.speculative.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
    sys.modules["sgl_kernel.speculative"] = sgl_kernel.speculative
