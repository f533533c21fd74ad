"""Lengths and answers of a real model, thousands of problems a minute on one GPU: what guidance and its rivals reach.

    python -m bench.real_model MODEL.gguf --gsm8k DIR --out DIR [--tokenizer DIR] [--parts alone said probe loops chat]

DIR of ``--gsm8k`` holds ``train.jsonl`` and ``test.jsonl``. A small engine of this file (continuous batching, one CUDA
graph a decode step) runs a Qwen2 model of a GGUF file. The rules of guidance are written in PyTorch. Every constant is
a setting of the request, so that rules can be tried before a kernel has them. The step uses the package's
``topk_candidates``.

- ``alone``: the model's own answers to all test problems; the same cut, and cut with a forced answer, at a quarter, a
  half and three quarters of their mean length.
- ``said``: prompts that say the length (:data:`PHRASES`), without guidance.
- ``probe``: answers to training problems, natural and with openings that are rare (a high temperature, the first
  tokens of an answer to a prompt that says a length), and the fit of a probe to them.
- ``loops``: guidance without values and by the probe, with landings and prompts that say the length.
- ``chat``: 60 of the demo's test prompts at targets of 40 to 320.

A line of ``results.jsonl`` a setting, ``tokens-PART.npz`` with all answers of a part, and ``probe/``.
"""

import argparse
import json
import math
import random
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels import topk_candidates
from lenvm_kernels.demo import PROMPTS
from lenvm_kernels.evaluate.accuracy import NUMBER, extract
from lenvm_kernels.evaluate.prompts import say
from lenvm_kernels.guidance import text_breaks_of
from lenvm_kernels.training.trunk import Rows, TrunkHead, TrunkSchedule, edges_of, fit_trunk
from lenvm_kernels.types import TextBreak
from lenvm_kernels.value_model.trunk import TrunkConfig, embedding_hash, write_trunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K = 64  # candidates of a step, ends beside them
EVERY = 16  # decode steps between two looks at which requests have ended
SCHEDULE = TrunkSchedule(epochs=4, learning_rate=2e-3, rows=8192)
LIMIT = 512  # tokens of an answer that nothing else limits
CLOSING = "\n\nTherefore, the final answer is $"
# Texts that are forced: landings, and what lengthens an answer that would end too early.
MESSAGES = [
    "\n\nThe final answer is",
    "\n\nLet's check the answer:",
    "\n\nWait, let me double-check this.",
    "\n\nTo verify, here is the calculation again, step by step:\n",
    "\n\nIn short:",
]
SAID = 40, 67, 100, 151, 226, 300  # tokens that a prompt says
# What a prompt says, of {words} and {tokens}.
PHRASES = {
    "about": "Answer in about {words} words ({tokens} tokens).",
    "step": "Think step by step. Answer in about {words} words.",
    "brief": "Think step by step, but keep each step short. Use about {words} words in total.",
    "calc": "Write one short line for each calculation, then the final answer. Use about {words} words in total.",
    "final": 'Think step by step. Use about {words} words, and end with "The final answer is ...".',
    "brief, final": "Think step by step, but keep each step short. Use about {words} words in total, and end with "
    '"The final answer is ...".',
    "calc, final": 'Write one short line for each calculation, and end with "The final answer is ...". Use about '
    "{words} words in total.",
}
# A request's settings: default values, which say the dtype.
SETTINGS: dict[str, Any] = dict(
    mode=0,  # 0: none of the rules; 1: ends only, as without a value model; 2: by the probe
    target=1e9,  # tokens
    tolerance=0.0,  # share of the target within which all lengths are equally near
    strength=10.0,
    least_share=0.05,  # of candidates, beside the best
    least_share_open=-1.0,  # least_share for the first tokens of an answer and of its lines; if -1, least_share holds
    min_end_prob=1e-4,
    landing=-1.0,  # tokens that are left for a landing that waits for the end of a line or sentence; -1: no landing
    landing_last=-1.0,  # tokens that are left where it waits no longer
    bridge=-1,  # index of the message that is forced where an answer would end below the range; -1: none
    bridges=1,  # how often
    wrap=-1.0,  # tokens that are left for the last message ("In short:"), which waits for the end of a line; -1: none
    early=6.0,  # tokens before the target at which ends are best
    late_strength=4.0,  # what is added to the factor of strength at twice the target
    late_ends=1.0,  # whether ends need less probability past the target
    sentence_bonus=1.0,  # whether the end of a sentence counts as an end one token later
    end_threshold=-1.0,  # of the end's probability at temperature 1, in place of min_end_prob and its factors; -1: none
    temperature=0.6,
    hot=-1.0,  # temperature of the first tokens, for openings that are rare
    stop_at=1 << 30,  # the token from which nothing is guided
    limit=LIMIT,
)


@triton.jit
def _attention_kernel(q_ptr, k_ptr, v_ptr, last_ptr, out_ptr, stride_row, stride_head, scale,
                      GROUP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One token of each row attends to the tokens 0 to ``last`` of its row; a program a row and a head of keys."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(last_ptr + row) + 1
    g, d = tl.arange(0, 16), tl.arange(0, D)
    q = tl.load(
        q_ptr + ((row * HEADS + head) * GROUP + g[:, None]) * D + d[None, :], mask=g[:, None] < GROUP, other=0.0
    )
    most, total = tl.full([16], -1e30, tl.float32), tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    cached = row * stride_row + head * stride_head
    for start in range(0, count, BLOCK):
        t = start + tl.arange(0, BLOCK)
        places = cached + t[:, None] * D + d[None, :]
        k = tl.load(k_ptr + places, mask=t[:, None] < count, other=0.0)
        x = tl.where(t[None, :] < count, tl.dot(q, tl.trans(k)) * scale, -1e30)
        larger = tl.maximum(most, tl.max(x, 1))
        p, decay = tl.exp(x - larger[:, None]), tl.exp(most - larger)
        v = tl.load(v_ptr + places, mask=t[:, None] < count, other=0.0)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v)
        total, most = total * decay + tl.sum(p, 1), larger
    out = out_ptr + ((row * HEADS + head) * GROUP + g[:, None]) * D + d[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=g[:, None] < GROUP)


@triton.jit
def _log_sum_kernel(x_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * V + column, mask=column < V, other=-1e30).to(tl.float32)
        larger = tl.maximum(most, x)
        total, most = total * tl.exp(most - larger) + tl.exp(x - larger), larger
    top = tl.max(most, 0)
    tl.store(out_ptr + row, top + tl.log(tl.sum(total * tl.exp(most - top), 0)))


def log_sum(x: Tensor) -> Tensor:
    """``ln sum exp`` of rows, fp32."""
    if DEVICE == "cpu":
        return x.float().logsumexp(1)
    out = torch.empty(len(x), device=x.device)
    _log_sum_kernel[(len(x),)](x, out, x.shape[1], BLOCK=2048, num_warps=8)
    return out


class Model:
    """A Qwen2 model of a GGUF file, in bf16.

    Args:
        file: the file.
        most_layers: layers that are kept; all of them but in a rehearsal.
    """

    def __init__(self, file: Path, most_layers: int = 1 << 30) -> None:
        from gguf import GGUFReader
        from gguf.quants import dequantize

        reader = GGUFReader(file)

        def number(name: str) -> Any:
            field = reader.fields[f"qwen2.{name}"]
            return field.parts[field.data[0]][0].item()

        self.layers = min(number("block_count"), most_layers)
        self.hidden, self.eps = number("embedding_length"), number("attention.layer_norm_rms_epsilon")
        self.heads, self.kv_heads = number("attention.head_count"), number("attention.head_count_kv")
        self.head_dim = self.hidden // self.heads

        def weight(tensor: Any) -> tuple[str, Tensor]:
            parts = (
                np.array_split(tensor.data, max(1, len(tensor.data) // 8192)) if tensor.data.ndim > 1 else [tensor.data]
            )
            x = torch.cat([torch.from_numpy(np.array(dequantize(p, tensor.tensor_type))).bfloat16() for p in parts])
            return tensor.name, x.reshape([int(n) for n in tensor.shape][::-1])

        with ThreadPoolExecutor(8) as pool:
            w = {name: x.to(DEVICE) for name, x in pool.map(weight, reader.tensors)}
        self.embedding, self.output, self.norm = w["token_embd.weight"], w["output.weight"], w["output_norm.weight"]
        self.blocks = [
            dict(
                norm=w[f"blk.{i}.attn_norm.weight"],
                qkv=torch.cat([w[f"blk.{i}.attn_{x}.weight"] for x in "qkv"]),
                bias=torch.cat([w[f"blk.{i}.attn_{x}.bias"] for x in "qkv"]),
                o=w[f"blk.{i}.attn_output.weight"],
                mlp_norm=w[f"blk.{i}.ffn_norm.weight"],
                gate_up=torch.cat([w[f"blk.{i}.ffn_{x}.weight"] for x in ("gate", "up")]),
                down=w[f"blk.{i}.ffn_down.weight"],
            )
            for i in range(self.layers)
        ]
        # The states that a probe reads.
        self.read = (round(self.layers * 2 / 3), round(self.layers * 5 / 6), self.layers)
        steps = torch.arange(0, self.head_dim, 2, device=DEVICE) / self.head_dim
        angle = torch.arange(4096, device=DEVICE)[:, None] / number("rope.freq_base") ** steps
        self.cos, self.sin = (f(angle).repeat(1, 2).bfloat16() for f in (torch.cos, torch.sin))

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        turned = torch.cat([-x[..., self.head_dim // 2 :], x[..., : self.head_dim // 2]], -1)
        return x * self.cos[places][..., None, :] + turned * self.sin[places][..., None, :]

    def forward(
        self, tokens: Tensor, places: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """The residual stream before every layer, and what the output layer reads."""
        x, streams, sizes = self.embedding[tokens], [], [n * self.head_dim for n in (self.heads, *[self.kv_heads] * 2)]
        for i, block in enumerate(self.blocks):
            streams.append(x)
            qkv = F.linear(F.rms_norm(x, (self.hidden,), block["norm"], self.eps), block["qkv"], block["bias"])
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(sizes, -1))
            x = x + F.linear(attend(i, self._rotated(q, places), self._rotated(k, places), v), block["o"])
            gate, up = F.linear(F.rms_norm(x, (self.hidden,), block["mlp_norm"], self.eps), block["gate_up"]).chunk(
                2, -1
            )
            x = x + F.linear(F.silu(gate) * up, block["down"])
        return [*streams, F.rms_norm(x, (self.hidden,), self.norm, self.eps)]


class Probe:
    """A fitted head: how the tokens after a candidate are distributed over bins."""

    def __init__(self, tensors: dict[str, Tensor], edges: Sequence[int], embedding: Tensor) -> None:
        self.of = {name: x.to(DEVICE).bfloat16() for name, x in tensors.items()}
        at = torch.tensor(edges, device=DEVICE).float()
        self.middles = (at[:-1] + at[1:] - 1) / 2
        self.low, self.high = (at[:-1] + 1.5).log(), (at[1:] + 1.5).log()  # of ln(L + 2)
        self.embedding = F.linear(embedding, self.of["embedding.weight"], self.of["embedding.bias"])

    def log_probs(self, states: Tensor, tokens: Tensor) -> Tensor:
        """``[B, K, bins]`` of states ``[B, L H]`` and candidates ``[B, K]``."""
        scale, shift = F.linear(states, self.of["projection.weight"], self.of["projection.bias"]).chunk(2, -1)
        x = F.silu(shift[:, None] + scale[:, None] * self.embedding[tokens])
        x = F.silu(F.linear(x, self.of["fc.weight"], self.of["fc.bias"]))
        return F.linear(x, self.of["bins.weight"], self.of["bins.bias"]).float().log_softmax(-1)

    def log_closeness(self, log_probs: Tensor, strength: Tensor, least: Tensor, most: Tensor) -> Tensor:
        """``ln E[exp(-S d)]`` with the distance ``d`` of ``ln(L + 2)`` from ``least`` to ``most``, ``[B]`` each."""
        s, least, most = (x[:, None, None] for x in (strength.clamp(min=1e-3), least, most))

        def log_integral(near: Tensor, far: Tensor) -> Tensor:  # of exp(-S d), d from near to far
            far = torch.maximum(far, near + 1e-6)
            return -s * near - s.log() + torch.log1p(-torch.exp(-s * (far - near)))

        nothing = torch.full_like(self.low * s, -1e9)
        above = torch.where(self.high > most, log_integral((self.low - most).clamp(min=0), self.high - most), nothing)
        below = torch.where(self.low < least, log_integral((least - self.high).clamp(min=0), least - self.low), nothing)
        inside = (torch.minimum(self.high, most) - torch.maximum(self.low, least)).clamp(min=1e-30).log()
        whole = torch.stack([above, below, inside.expand_as(above)]).logsumexp(0) - (self.high - self.low).log()
        return (log_probs + whole).logsumexp(-1)


class Request:
    """One answer to make: prompt tokens, settings (:data:`SETTINGS`), and the problem's index."""

    def __init__(self, tokens: Sequence[int], problem: int = -1, **settings: Any) -> None:
        self.tokens, self.problem, self.settings = list(tokens), problem, settings
        self.output: list[int] = []
        self.log_prob = 0.0
        self.landed = False
        self.bridged = 0


class Engine:
    """Answers requests, as many as it has rows at a time; a row is filled again soon after its request has ended."""

    def __init__(self, model: Model, tokenizer: Any, rows: int, room: int, most: int) -> None:
        self.model, self.tokenizer, self.rows, self.most = model, tokenizer, rows, most
        shape = rows, model.kv_heads, room, model.head_dim
        self.keys, self.values = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in model.blocks] for _ in "kv"
        )
        self.states = torch.zeros(rows, most + 1, 3 * model.hidden, dtype=torch.bfloat16, device=DEVICE)
        self.row = torch.arange(rows, device=DEVICE)
        counts = (torch.zeros_like(self.row) for _ in range(7))
        self.token, self.place, self.count, self.line, self.forced, self.message, self.bridged = counts
        self.ended, self.landed, self.wrapped = (torch.ones(rows, dtype=torch.bool, device=DEVICE) for _ in range(3))
        self.setting = {name: torch.full((rows,), value, device=DEVICE) for name, value in SETTINGS.items()}
        self.output = torch.zeros(rows, most + 1, dtype=torch.int64, device=DEVICE)
        self.log_probs = torch.zeros(rows, most + 1, device=DEVICE)
        self.eos = torch.tensor(
            [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")], device=DEVICE
        )
        self.breaks = text_breaks_of(tokenizer, len(model.output)).long().to(DEVICE)
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        starts = torch.tensor([text[:1] in (" ", "\n") for text in texts])
        self.starts_word = F.pad(starts, (0, len(model.output) - len(starts))).to(DEVICE)
        messages = [self.encode(message) for message in MESSAGES]
        width = max(map(len, messages)) + 1
        self.messages = torch.tensor([m + [-1] * (width - len(m)) for m in messages], device=DEVICE)
        self.probe: Probe | None = None
        self._graph: Any = None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def use(self, probe: Probe | None) -> None:
        self.probe, self._graph = probe, None

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        model, keys, values = self.model, self.keys[layer], self.values[layer]
        keys[self.row, :, self.place], values[self.row, :, self.place] = k, v
        group = model.heads // model.kv_heads
        if DEVICE == "cpu":
            count = int(self.place.max()) + 1
            mask = (torch.arange(count) <= self.place[:, None])[:, None, None, :].expand(-1, model.kv_heads, group, -1)
            q = q.unflatten(1, (model.kv_heads, group))
            return F.scaled_dot_product_attention(q, keys[:, :, :count], values[:, :, :count], mask).flatten(1)
        q, out = q.contiguous(), torch.empty_like(q)
        sizes = dict(GROUP=group, D=model.head_dim, HEADS=model.kv_heads, BLOCK=64)
        strides = keys.stride(0), keys.stride(1), model.head_dim**-0.5
        _attention_kernel[(len(q), model.kv_heads)](q, keys, values, self.place, out, *strides, **sizes, num_stages=3)
        return out.flatten(1)

    def _step(self) -> None:
        streams = self.model.forward(self.token, self.place, self._attend)
        states = torch.cat([streams[i] for i in self.model.read], -1)
        logits, of = F.linear(streams[-1], self.model.output), self.setting
        no_filter = dict(top_k=0, top_p=1.0, min_p=0.0, max_candidates=K, is_logits=True)
        found = topk_candidates(logits, temperature=of["temperature"], **no_filter)
        tokens = found.token_ids.clamp(min=0).long()
        q = found.probs.clamp(min=1e-30).log()
        total = logits.gather(1, tokens[:, :1]).float()[:, 0] / of["temperature"] - q[:, 0]
        end_q = logits[:, self.eos].float() / of["temperature"][:, None] - total[:, None]
        is_end = (tokens[..., None] == self.eos).any(-1)

        count, target = self.count.float(), of["target"]
        guided = (of["mode"] > 0) & (self.count < of["stop_at"])
        opens = (self.count < 3) | (self.line < 1)
        share = torch.where(opens & (of["least_share_open"] >= 0), of["least_share_open"], of["least_share"])
        share = torch.where(of["mode"] == 2, share, 0.0)
        is_kept = found.probs >= share[:, None] * found.probs[:, :1]
        is_kept |= ~is_end & ((~is_end).cumsum(1) == 1)

        # The rule of reference/reweight_scatter.py.
        late = (count / (target * (1 + of["tolerance"])).clamp(min=1) - 1).clamp(min=0)
        strength = of["strength"] * (1 + of["late_strength"] * late.clamp(max=1))
        early = torch.minimum(0.1 * target, of["early"])
        least, most = ((target * (1 + sign * of["tolerance"]) - early - count).clamp(min=0) for sign in (-1, 1))
        least, most = (least + 2).log(), (most + 2).log()

        def distance(length: Tensor) -> Tensor:
            at = (length + 2).log()
            return (least - at).clamp(min=0) + (at - most).clamp(min=0)

        closeness = -(strength * distance(target.clamp(min=1)))[:, None].expand_as(q)
        if self.probe is not None:
            of_probe = self.probe.log_closeness(self.probe.log_probs(states, tokens), strength, least, most)
            closeness = torch.where((of["mode"] == 2)[:, None], of_probe, closeness)
        ends_sentence = ((self.breaks[tokens] & TextBreak.SENTENCE) != 0) & ~is_end & (q >= q[:, :1] + math.log(0.02))
        one_more = -(strength * distance(torch.ones_like(target)))[:, None]
        ends_sentence &= of["sentence_bonus"][:, None] > 0
        closeness = torch.where(ends_sentence, torch.maximum(closeness, one_more), closeness)
        last = self.breaks[self.token]
        least_end = of["min_end_prob"] * torch.where(last >= 2, 1e-4, torch.where(last == 1, 0.1, 100.0))
        less = torch.exp2(-(10 * late.clamp(max=0.5) + 100 * (late - 0.5).clamp(min=0)).clamp(max=120))
        less = torch.where(of["late_ends"] > 0, less, 1.0)
        all_logits = log_sum(logits)
        end_natural = logits[:, self.eos].float() - all_logits[:, None]  # at temperature 1
        is_single = (of["end_threshold"] >= 0)[:, None]
        least_end = torch.where(is_single[:, 0], of["end_threshold"], least_end) * less
        may_end = torch.where(is_single, end_natural, end_q) >= least_end.clamp(min=1e-38).log()[:, None]
        may_end = guided[:, None] & may_end
        ends = torch.where(may_end, end_q - (strength * distance(torch.zeros_like(target)))[:, None], -1e30)

        hot = torch.where(
            ~is_end & (q >= q[:, :1] + math.log(2e-4)), q * (of["temperature"] / of["hot"])[:, None], -1e30
        )
        weights = torch.where(guided[:, None], torch.where(is_kept & ~is_end, q + closeness, -1e30), q)
        weights = torch.where(((of["hot"] > 0) & (self.count < 3))[:, None], hot, weights)
        weights = torch.cat([weights, ends], 1)
        noise = -torch.log(-torch.log(torch.rand_like(weights).clamp(1e-20, 1 - 1e-7)))
        drawn = torch.cat([tokens, self.eos.expand(len(q), -1)], 1).gather(
            1, (weights + noise).argmax(1, keepdim=True)
        )[:, 0]

        left = target * (1 + of["tolerance"]) - count
        is_free = self.forced < 0
        at_break = (last > 0) & self.starts_word[tokens[:, 0]] & (end_q.amax(1) < math.log(0.05)) & is_free
        lands = ((left <= of["landing"]) & at_break) | ((left <= of["landing_last"]) & is_free)
        lands &= ~self.landed & (of["landing"] >= 0)
        wraps = (left <= of["wrap"]) & (of["wrap"] >= 0) & at_break & ~self.wrapped & ~lands
        would_end = (drawn[:, None] == self.eos).any(1) | (guided & (end_natural.exp().sum(1) > 0.5))
        bridges = (of["bridge"] >= 0) & (self.bridged < of["bridges"]) & is_free & ~lands & ~wraps & would_end
        bridges &= count + 1 < target * (1 - of["tolerance"])
        self.landed |= lands
        self.wrapped |= wraps | lands
        self.bridged.add_(bridges.long())
        self.forced.copy_(torch.where(lands | wraps | bridges, 0, self.forced))
        new_message = torch.where(bridges, of["bridge"], torch.where(wraps, len(MESSAGES) - 1, 0))
        self.message.copy_(torch.where(lands | wraps | bridges, new_message, self.message))
        forced = self.messages[self.message, self.forced.clamp(min=0)]
        is_forced = (self.forced >= 0) & (forced >= 0)
        new = torch.where(is_forced, forced, drawn)
        self.forced.copy_(torch.where(is_forced, self.forced + 1, -1))

        live = ~self.ended
        self.output[self.row, self.count], self.states[self.row, self.count] = torch.where(live, new, 0), states
        log_prob = logits.gather(1, new[:, None])[:, 0].float() - all_logits
        self.log_probs[self.row, self.count] = torch.where(live, log_prob, 0.0)
        self.line.copy_(torch.where((self.breaks[new] & TextBreak.LINE) != 0, 0, self.line + 1))
        self.ended |= (new[:, None] == self.eos).any(1) | (self.count + 1 >= of["limit"])
        self.token.copy_(torch.where(live, new, self.token))
        self.place.add_(live.long())
        self.count.add_(live.long())

    def _steps(self) -> None:
        if DEVICE == "cpu":
            for _ in range(EVERY):
                self._step()
            return
        if self._graph is None:
            changed = [self.token, self.place, self.count, self.line, self.forced, self.ended, self.landed]
            changed += [self.message, self.bridged, self.wrapped]
            kept, stream = [x.clone() for x in changed], torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
            for x, before in zip(changed, kept, strict=True):
                x.copy_(before)
        for _ in range(EVERY):
            self._graph.replay()

    def _admit(self, batch: list[tuple[int, Request]]) -> None:
        rows = torch.tensor([row for row, _ in batch], device=DEVICE)
        lens = torch.tensor([len(request.tokens) for _, request in batch], device=DEVICE)
        width = int(lens.max())
        tokens = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for _, r in batch], device=DEVICE)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            self.keys[layer][rows, :, :width], self.values[layer][rows, :, :width] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

        self.model.forward(tokens, torch.arange(width, device=DEVICE).expand_as(tokens), attend)
        self.token[rows], self.place[rows] = tokens[torch.arange(len(rows)), lens - 1], lens - 1
        self.count[rows], self.line[rows], self.forced[rows] = 0, 1 << 20, -1
        self.ended[rows], self.landed[rows], self.wrapped[rows], self.bridged[rows] = False, False, False, 0
        for name, default in SETTINGS.items():
            of_rows = [type(default)(request.settings.get(name, default)) for _, request in batch]
            self.setting[name][rows] = torch.tensor(of_rows, device=DEVICE)

    @torch.no_grad()
    def run(
        self, requests: Sequence[Request], name: str, ended: Callable[[Tensor, list[Request]], None] | None = None
    ) -> None:
        """Answer all of them. ``ended`` is called with rows and requests that have ended, before a row is reused."""
        begin, steps, queue = time.time(), 0, sorted(requests, key=lambda r: r.settings.get("limit", LIMIT))
        of_row: list[Request | None] = [None] * self.rows
        self.ended.fill_(True)
        while queue or any(of_row):
            free = [row for row, request in enumerate(of_row) if request is None]
            if queue and len(free) >= min(64, len(queue), self.rows):
                batch = sorted(((row, queue.pop()) for row in free[: len(queue)]), key=lambda each: len(each[1].tokens))
                for start in range(0, len(batch), 128):
                    self._admit(batch[start : start + 128])
                for row, request in batch:
                    of_row[row] = request
            self._steps()
            steps += EVERY
            is_ended, counts = self.ended.tolist(), self.count.tolist()
            rows = [row for row, request in enumerate(of_row) if request is not None and is_ended[row]]
            if not rows:
                continue
            at = torch.tensor(rows, device=DEVICE)
            changed = self.output, self.log_probs.cumsum(1), self.landed, self.bridged
            outputs, sums, landed, bridged = (x[at].tolist() for x in changed)
            done = [request for request in (of_row[row] for row in rows) if request is not None]
            for i, (row, request) in enumerate(zip(rows, done, strict=True)):
                request.output, request.landed, request.bridged = outputs[i][: counts[row]], landed[i], bridged[i]
                request.log_prob, of_row[row] = sums[i][counts[row] - 1], None
            if ended is not None:
                ended(at, done)
        seconds, tokens = time.time() - begin, sum(len(request.output) for request in requests)
        print(f"{name}: {len(requests)} answers, {tokens} tokens, {steps} steps in {seconds:.1f} s", flush=True)


class Run:
    """A model's run: its problems, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        source = dict(gguf_file=args.model.name) if args.tokenizer is None else {}
        self.tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model.parent, **source)
        self.model = Model(args.model, args.layers)
        self.engine = Engine(self.model, self.tokenizer, args.rows, room=1024, most=640)
        self.problems = {
            split: [json.loads(line) for line in (args.gsm8k / f"{split}.jsonl").open()][: args.problems]
            for split in ("train", "test")
        }
        self.chat = json.loads(PROMPTS.read_text())["test"][: min(60, args.problems)]
        self.targets: list[int] = []
        self.said: list[tuple[str, int, dict[str, Any]]] = []  # phrase, tokens that it says, what came
        self.probes: dict[str, Probe] = {}
        self.answers: dict[str, Sequence[Request]] = {}

    def prompt(self, text: str, phrase: str | None = None, target: float = 0) -> list[int]:
        if phrase is not None:
            text = say(text, PHRASES[phrase], target)
        message = [{"role": "user", "content": text}]
        return self.engine.encode(
            self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )

    def ask(
        self, phrase: str | None = None, said: float = 0, split: str = "test", step: int = 1, **settings: Any
    ) -> list[Request]:
        """A request for every ``step``-th problem, whose prompt may say a length."""
        of_split = self.problems[split]
        return [
            Request(self.prompt(of_split[i]["question"], phrase, said), i, **settings)
            for i in range(0, len(of_split), step)
        ]

    def report(
        self, name: str, requests: Sequence[Request], target: float | None = None, *, judged: bool = True
    ) -> dict[str, Any]:
        """Print and keep a line of results."""
        lengths = np.array([len(request.output) for request in requests], float)
        found: dict[str, Any] = dict(name=name, answers=len(requests), mean=lengths.mean(), target=target)
        if judged:
            texts = self.tokenizer.batch_decode([request.output for request in requests], skip_special_tokens=True)
            rights = [self.problems["test"][request.problem]["answer"] for request in requests]
            found["right"] = np.mean([is_right(text, right) for text, right in zip(texts, rights, strict=True)])
        if target is not None:
            found |= {f"within {n} %": np.mean(abs(lengths - target) <= n / 100 * target) for n in (10, 25)}
            found |= dict(longer=np.mean(lengths > 1.25 * target), landed=np.mean([r.landed for r in requests]))
            found["bridged"] = np.mean([r.bridged > 0 for r in requests])
        found["perplexity"] = math.exp(-sum(r.log_prob for r in requests) / lengths.sum())
        found["repeated"] = np.mean([repeated(request.output) for request in requests])
        found = {key: round(float(x), 4) if isinstance(x, (float, np.floating)) else x for key, x in found.items()}
        print(json.dumps(found), flush=True)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        self.answers[name] = requests
        return found

    def best_phrases(self, target: int) -> list[tuple[str, int]]:
        """Phrases whose answers have about the target's mean length, and the tokens said; the best answers first."""
        near = [x for x in self.said if abs(x[2]["mean"] / target - 1) <= 0.3]
        of_phrase = {}
        for phrase, tokens, found in sorted(near, key=lambda x: abs(math.log(x[2]["mean"] / target)), reverse=True):
            of_phrase[phrase] = tokens, found["right"]
        best = sorted(of_phrase, key=lambda phrase: of_phrase[phrase][1], reverse=True)
        return [(phrase, of_phrase[phrase][0]) for phrase in best] or [("brief", target)]

    def save(self, part: str) -> None:
        """Write the tokens of a part's answers."""
        kept = {
            name: (np.array([r.problem for r in rs]), [len(r.output) for r in rs], [t for r in rs for t in r.output])
            for name, rs in self.answers.items()
        }
        arrays = {
            f"{name}/{key}": np.array(x, np.uint32)
            for name, row in kept.items()
            for key, x in zip(("problem", "length", "token"), row, strict=True)
        }
        np.savez_compressed(self.out / f"tokens-{part}.npz", **arrays)
        self.answers.clear()


def is_right(text: str, reference: str) -> bool:
    """Whether the last number of a text, or the one in its last box, is GSM8K's."""
    found = NUMBER.findall(extract(text))
    numbers = [
        x.strip("$").replace(",", "").replace("\\", "").rstrip("%")
        for x in (*found[-1:], reference.rpartition("####")[2].strip())
    ]
    try:
        given, right = map(float, numbers)
    except ValueError:
        return False
    return abs(given - right) <= 1e-4 * max(1, abs(right))


def repeated(tokens: Sequence[int]) -> float:
    """Share of 4-grams that have occurred before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def alone(run: Run) -> None:
    requests = run.ask()
    run.engine.run(requests, "alone")
    mean = run.report("alone", requests)["mean"]
    run.targets, closing = [round(mean * share) for share in (0.25, 0.5, 0.75)], run.engine.encode(CLOSING)
    for target in run.targets:
        cut, forced = [], []
        for request in requests:
            cut.append(Request(request.tokens, request.problem))
            cut[-1].output, cut[-1].log_prob = request.output[:target], 0.0
            begun = request.output[: max(1, target - 16)] + closing
            forced.append(Request(request.tokens + begun, request.problem, limit=max(4, 16 - len(closing))))
        run.report(f"cut at {target}", cut, target)
        longer = [new for old, new in zip(requests, forced, strict=True) if len(old.output) > target]
        run.engine.run(longer, "forced")
        for old, new in zip(requests, forced, strict=True):
            new.output = old.output if len(old.output) <= target else new.tokens[len(old.tokens) :] + new.output
        run.report(f"cut and forced at {target}", forced, target)


def said(run: Run) -> None:
    asked = {(phrase, tokens): run.ask(phrase, tokens, step=4) for phrase in PHRASES for tokens in SAID}
    run.engine.run([request for each in asked.values() for request in each], "said")
    for (phrase, tokens), requests in asked.items():
        run.said.append((phrase, tokens, run.report(f"{phrase} said, {tokens}", requests)))
    for target in run.targets:
        print(target, run.best_phrases(target), flush=True)


def probe(run: Run) -> None:
    draw, engine = random.Random(1), run.engine
    found, shares = list[Rows](), list[Tensor]()

    def target() -> float:
        return math.exp(draw.uniform(math.log(30), math.log(400)))

    def keep(rows: Tensor, requests: list[Request]) -> None:
        """All unguided tokens that open an answer or a line, and a quarter of the others, but the last of an answer."""
        counts = torch.tensor([len(request.output) for request in requests], device=DEVICE)
        width = int(counts.max())
        output, place = engine.output[rows, :width], torch.arange(width, device=DEVICE)
        opens = F.pad((engine.breaks[output] & TextBreak.LINE)[:, :-1] != 0, (1, 0), value=True) | (place < 4)
        chosen = (opens | (torch.rand(output.shape, device=DEVICE) < 0.25)) & (place < counts[:, None] - 1)
        from_ = torch.tensor([r.settings.get("stop_at", 0) for r in requests], device=DEVICE)
        chosen &= place >= from_[:, None]
        row, place = chosen.nonzero(as_tuple=True)
        is_cut = ~torch.isin(output[torch.arange(len(rows)), counts - 1], engine.eos)
        problem = torch.tensor([request.problem for request in requests], device=DEVICE)
        states, remaining = engine.states[rows[row], place], counts[row] - 1 - place
        found.append(Rows(states, output[row, place], remaining, is_cut[row], problem[row]))
        shares.append(place / counts[row])

    natural, hot = run.ask(split="train"), [draw.choice((1.2, 1.6, 2.0)) for _ in run.problems["train"]]
    opened = [Request(r.tokens, r.problem, hot=heat) for r, heat in zip(natural, hot, strict=True)]
    questions = [problem["question"] for problem in run.problems["train"]]
    told = [Request(run.prompt(q, draw.choice(list(PHRASES)), target()), i) for i, q in enumerate(questions)]
    engine.run([*natural, *opened, *told], "answers", keep)
    begun = []
    for request in told:
        first = request.output[: min(draw.choice((2, 4, 8, 16, 32, 64)), max(0, len(request.output) - 2))]
        begun.append(Request(run.prompt(questions[request.problem]) + first, request.problem))
    engine.run(begun, "answers begun otherwise", keep)

    def fit_all(name: str) -> None:
        rows = Rows(*(torch.cat([getattr(part, field.name) for part in found]) for field in fields(Rows)))
        run.probes[name] = fit(run, rows, torch.cat(shares))

    fit_all("first")
    # Openings that guidance chooses, gone on with without it.
    guided = dict(mode=2, tolerance=0.2)
    chosen = [
        Request(
            run.prompt(q, draw.choice([None, "brief", "calc", "final"]), target()),
            i,
            target=target(),
            stop_at=int(math.exp(draw.uniform(0, math.log(100)))),
            **guided,
        )
        for i, q in enumerate(questions)
    ]
    engine.run(chosen, "answers begun under guidance", keep)
    fit_all("second")


def fit(run: Run, rows: Rows, share: Tensor) -> Probe:
    """Fit a probe, every tenth problem held out; print its correlations; write it.

    Args:
        run: the model.
        rows: tokens of answers to problems.
        share: fp32 ``[N]``; the place of each token in its answer, from 0 to 1.
    """
    torch.manual_seed(0)
    embedding, edges = run.model.embedding, edges_of(LIMIT)
    is_held = rows.answers % 10 == 0
    held, trained, share = rows.of(is_held), rows.of(~is_held), share[is_held]
    some = torch.randperm(len(trained), device=DEVICE)[:50_000]
    head = TrunkHead(trained.states[some], embedding, len(edges) - 1).to(DEVICE)
    print(fit_trunk(head, trained, held, embedding, edges, SCHEDULE), flush=True)
    tensors = head.tensors()
    fitted = Probe(tensors, edges, embedding)
    for name, least, most in ("first tokens", 0, 0.02), ("a tenth", 0.08, 0.14), ("half", 0.45, 0.55), ("all", 0, 1):
        chosen = held.of((~held.is_cut & (share >= least) & (share <= most)).nonzero()[:20_000, 0])
        if len(chosen) < 10:
            continue
        lengths = fitted.log_probs(chosen.states, chosen.token_ids[:, None])[:, 0].exp() @ fitted.middles
        correlation = float(torch.corrcoef(torch.stack([lengths, chosen.remaining.float()]))[0, 1])
        print(f"{name}: {len(chosen)} tokens, correlation of predicted and true length {correlation:.3f}", flush=True)
    sizes = dict(num_layers=run.model.layers, hidden_size=run.model.hidden, vocab_size=len(embedding))
    config = TrunkConfig(
        base=run.args.model.name,
        layers=run.model.read,
        embedding_hash=embedding_hash(embedding),
        bin_edges=edges,
        **sizes,
    )
    write_trunk(config, tensors, 0.997, run.out / "probe")
    run.engine.use(fitted)
    return fitted


def rivals(run: Run) -> None:
    """Whether values tell a step's candidates apart: predicted and true mean lengths of four continuations of each."""
    engine, steps, draw = run.engine, list[tuple[str, Request, int, Tensor, Tensor]](), random.Random(3)

    def look(rows: Tensor, requests: list[Request]) -> None:
        for row, request in zip(rows.tolist(), requests, strict=True):
            output = torch.tensor(request.output, device=DEVICE)
            lines = ((engine.breaks[output[:-1]] & TextBreak.LINE) != 0).nonzero()[:, 0].add(1).tolist()
            places = [("first words", draw.randrange(4)), ("elsewhere", draw.randrange(4, max(5, len(output) - 8)))]
            places += [("lines", place) for place in draw.sample(lines, min(2, len(lines)))]
            for kind, place in places:
                if place >= len(output) - 1:
                    continue
                state = engine.states[row, place]
                probs = F.linear(state[-run.model.hidden :], run.model.output).float().softmax(-1)
                probs[engine.eos] = 0
                top = probs.topk(4)
                tokens = top.indices[top.values >= 0.02]
                if len(tokens) > 1:
                    steps.append((kind, request, place, state.clone(), tokens))

    asked = [*run.ask(step=9), *run.ask("brief", 151, step=9)]
    engine.run(asked, "steps", look)
    draw.shuffle(steps)
    kinds = "first words", "lines", "elsewhere"
    chosen = [step for kind in kinds for step in [s for s in steps if s[0] == kind][:120]]
    begun = {
        (i, j): [Request(r.tokens + r.output[:place] + [token], r.problem) for _ in range(4)]
        for i, (_, r, place, _, tokens) in enumerate(chosen)
        for j, token in enumerate(tokens.tolist())
    }
    engine.run([request for each in begun.values() for request in each], "continuations")
    lengths = {at: torch.tensor([len(r.output) for r in each]).float() for at, each in begun.items()}
    for kind in kinds:
        places = [i for i, step in enumerate(chosen) if step[0] == kind]
        of_step = [torch.stack([lengths[i, j] for j in range(len(chosen[i][4]))]) for i in places]
        half = [[x[:, part].mean(1) for x in of_step] for part in ([0, 1], [2, 3])]
        found: dict[str, Any] = dict(name=f"rivals, {kind}", steps=len(places), halves=within(*half))
        found["spread"] = torch.cat([x.mean(1) - x.mean() for x in of_step]).std().item()
        for name, fitted in run.probes.items():
            predicted = [
                (fitted.log_probs(chosen[i][3][None], chosen[i][4][None])[0].exp() @ fitted.middles).cpu()
                for i in places
            ]
            found[name] = within(predicted, [x.mean(1) for x in of_step])
        print(json.dumps(found), flush=True)
        with (run.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")


def within(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Correlation of two lists of numbers for each step's candidates, the mean of each step taken off."""
    if not one:
        return math.nan
    pair = torch.stack([torch.cat([x - x.mean() for x in each]) for each in (one, other)])
    return float(torch.corrcoef(pair)[0, 1])


def loops(run: Run) -> None:
    asked, land, half = {}, dict(landing=24.0, landing_last=12.0), run.targets[len(run.targets) // 2]

    def add(name: str, target: int, phrase: str, tokens: int, **settings: Any) -> None:
        limit = min(LIMIT, round(2.5 * target))
        if settings["mode"] < 2 or run.engine.probe is not None:
            asked[f"{name}; {phrase}, {tokens} said", target] = run.ask(
                phrase, tokens, step=3, target=target, limit=limit, **settings
            )

    names = "prompt", "none", "probe"
    for target in run.targets:
        phrases = run.best_phrases(target)[: 3 if target == half else 2]
        for each in phrases:
            for mode in (0, 1, 2):
                for bridge in (-1, 1, 2, 3) if target == half else (-1, 1):
                    message = f", {MESSAGES[bridge].strip()!r}" if bridge > 0 else ""
                    settings = dict(mode=mode, tolerance=0.2, bridge=bridge, **land)
                    add(f"{names[mode]}, landing, range{message}", target, *each, **settings)
                if mode and target == half:
                    add(f"{names[mode]}, landing", target, *each, mode=mode, **land)
    first = run.best_phrases(half)[0]
    for mode in (0, 1, 2):
        base = dict(mode=mode, tolerance=0.2, bridge=1)
        add(f"{names[mode]}, range, bridge", half, *first, **base)
        for wait, last in (40.0, 12.0), (60.0, 12.0), (24.0, 18.0):
            name = f"{names[mode]}, landing at {wait:.0f} to {last:.0f}, range, bridge"
            add(name, half, *first, landing=wait, landing_last=last, **base)
        for wrap in (60.0, 90.0):
            add(
                f"{names[mode]}, landing, in short at {wrap:.0f}, range, bridge",
                half,
                *first,
                wrap=wrap,
                **base,
                **land,
            )
        add(f"{names[mode]}, landing, range, two bridges", half, *first, bridges=2, **base, **land)
    run.engine.run([request for each in asked.values() for request in each], "loops")
    for (name, target), requests in asked.items():
        run.report(name, requests, target)


RULES = [
    {},
    *(dict(strength=x) for x in (5.0, 20.0, 40.0)),
    *(dict(least_share=x) for x in (0.01, 0.2)),
    dict(early=0.0),
    dict(late_strength=0.0),
    dict(late_ends=0.0),
    dict(sentence_bonus=0.0),
    *(dict(end_threshold=x) for x in (1e-5, 1e-4, 1e-3, 1e-2)),
]


def rules(run: Run) -> None:
    """The rule of ``near`` with one constant changed at a time, for problems and chat."""
    asked, half = {}, run.targets[len(run.targets) // 2]
    phrase, tokens = run.best_phrases(half)[0]
    for mode, name in (1, "none"), (2, "probe"):
        if mode == 2 and run.engine.probe is None:
            continue
        for rule in RULES:
            changed = ", ".join(f"{key} {value:g}" for key, value in rule.items()) or "as it is"
            settings = dict(mode=mode, **rule)
            problems = run.ask(
                phrase, tokens, step=4, target=half, tolerance=0.2, limit=min(LIMIT, round(2.5 * half)), **settings
            )
            asked[f"rule, {name}: {changed}", half, True] = problems
            for target in (80, 160):
                limits = dict(target=target, temperature=0.8, limit=round(2.5 * target))
                chat = [Request(run.prompt(text), **limits, **settings) for text in run.chat]
                asked[f"rule, {name}, chat: {changed}", target, False] = chat
    run.engine.run([request for each in asked.values() for request in each], "rules")
    for (name, target, judged), requests in asked.items():
        run.report(name, requests, target, judged=judged)


def chat(run: Run) -> None:
    targets, factors = (40, 80, 160, 320), (1.0, 1.5, 2.0, 3.0)
    alone_ = {"chat alone": [Request(run.prompt(text), temperature=0.8) for text in run.chat]}
    said_ = {
        (target, factor): [Request(run.prompt(t, "about", factor * target), temperature=0.8) for t in run.chat]
        for target in targets
        for factor in factors
    }
    run.engine.run([r for each in (*alone_.values(), *said_.values()) for r in each], "chat alone")
    run.report("chat alone", alone_["chat alone"], judged=False)
    means = {}
    for (target, factor), requests in said_.items():
        name = f"chat, {factor:g} times the target said"
        means[target, factor] = run.report(name, requests, target, judged=False)["mean"]
    asked = {}
    for target in targets:
        factor = min(factors, key=lambda f: abs(math.log(means[target, f] / target)))
        for mode, name in (1, "none"), (2, "probe"):
            for phrase in (None, "about"):
                for tolerance in (0.0, 0.08, 0.2):
                    for threshold in (-1.0, 1e-4):
                        if mode == 2 and run.engine.probe is None:
                            continue
                        settings = dict(mode=mode, target=target, temperature=0.8, limit=min(640, round(2.5 * target)))
                        settings |= dict(tolerance=tolerance, end_threshold=threshold)
                        prompts = [run.prompt(text, phrase, factor * target) for text in run.chat]
                        what = f", {factor:g} times said" if phrase else ""
                        ends = ", ends above 1e-4" if threshold > 0 else ""
                        label = f"chat {name}{what}, tolerance {tolerance:g}{ends}"
                        asked[label, target] = [Request(prompt, **settings) for prompt in prompts]
    run.engine.run([request for each in asked.values() for request in each], "chat")
    for (name, of), requests in asked.items():
        run.report(name, requests, of, judged=False)


PARTS = dict(alone=alone, said=said, probe=probe, loops=loops, rules=rules, chat=chat, rivals=rivals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file of a Qwen2 model")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer (default: the GGUF file's)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--targets", nargs="+", type=int, default=[67, 134, 200], help="without the part alone")
    parser.add_argument("--rows", type=int, default=1536, help="answers at a time (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=3600, help="of each split at most (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1 << 30, help="keep the first N layers only, for a rehearsal")
    args = parser.parse_args()
    torch.manual_seed(0)
    run = Run(args)
    run.targets = args.targets
    for name in args.parts:
        try:
            PARTS[name](run)
        except Exception:  # a part that fails must not cost the others
            traceback.print_exc()
        run.save(name)


if __name__ == "__main__":
    main()
