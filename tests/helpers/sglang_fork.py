"""The LenVM fork of SGLang, or a stand-in for it; what its in-process runner sees of the engine, images included."""

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lenvm_kernels.adapters import sglang_fork
from tests.helpers.models import EOS, VOCAB

ALL = 1 << 30  # the fork's top_k without a limit
GUIDED_SAMPLING = "sglang.srt.lvm.lvm_guided_sampling"
SAMPLER = f"{GUIDED_SAMPLING}:LvmGuidedSampler"
RUNNER = "sglang.srt.model_executor.model_runner"
MEMORY = "sglang.srt.utils.common"
_GENERATOR = torch.Generator().manual_seed(20)
BY_TOKEN, BY_LENGTH = (torch.randn(size, VOCAB, generator=_GENERATOR) for size in (VOCAB, 400))


def make_stand_in():
    """The modules of the fork that ``install()`` looks into, with functions that do nothing."""

    def guidance(token_probs, token_values, token_ids, **kwargs): ...
    def mask(*, prefix_lens, candidate_lens, cached_prefix_lens, device): ...
    def head():
        return type("MLP2SiLUValueHead", (), {"forward": lambda self, hidden_states: None})

    class LvmGuidedSampler:
        def _build_pending(self, probs, reqs, temperatures, top_ps, top_ks, min_ps): ...
        def _apply_guidance(self, pending, lvm_values): ...

        @staticmethod
        def _get_prefix_ids_incremental(req):
            return [*req.origin_input_ids, *req.output_ids]

        def apply(self, probs, reqs, temperatures, top_ps, top_ks, min_ps):
            pending = self._build_pending(probs, reqs, temperatures, top_ps, top_ks, min_ps)
            if pending is None:
                return None
            if pending.send_batch_indices:
                rids = [pending.req_list[row].rid for row in pending.send_batch_indices]
                reqs = [pending.req_list[row] for row in pending.send_batch_indices]
                answer = self._inproc.tree_value(rids, pending.prefix_ids_send, pending.candidate_ids_send, reqs)
                self._apply_guidance(pending, answer)
            return pending.guided

    class ModelRunner:
        def initialize(self, min_per_gpu_memory): ...

        def sample(self, logits_output, forward_batch):
            return self.sampler(logits_output, forward_batch.sampling_info)

    def get_available_gpu_memory(device, gpu_id, distributed=False, empty_cache=True, cpu_group=None): ...

    names = "req_list device guided send_batch_indices prefix_ids_send candidate_ids_send candidate_probs_send"
    pending = dataclasses.make_dataclass("PendingLvmResult", [*names.split(), ("gpu_candidates", tuple, None)])
    contents = {
        RUNNER: dict(ModelRunner=ModelRunner),
        MEMORY: dict(get_available_gpu_memory=get_available_gpu_memory),
        GUIDED_SAMPLING: dict(
            LvmGuidedSampler=LvmGuidedSampler,
            PendingLvmResult=pending,
            _extract_token_temperature_scale=lambda req: None,
            get_eos_token_ids=lambda req: req.eos_token_ids,
            lvm_combined_guidance=guidance,
            lvm_expectation_guidance=guidance,
            lvm_hard_value_constraint_guidance=guidance,
        ),
        "sglang.srt.lvm.tree_value_spec": dict(build_tree_value_custom_mask_and_positions=mask),
        "sglang.srt.lvm.lvm_inproc_runner": dict(build_tree_value_custom_mask_and_positions=mask),
        "sglang.srt.models.qwen2_lvm": dict(MLP2SiLUValueHead=head()),
        "sglang.srt.models.qwen3_lvm": dict(MLP2SiLUValueHead=head()),
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


def use_stand_in(monkeypatch):
    """The stand-in's modules, in place of the fork whether there is one or not; ``install()`` was not called yet."""
    modules = make_stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sglang_fork, "_fork", None)
    monkeypatch.setattr(sglang_fork, "_originals", {})
    return modules


def install_in_fork():
    """The fork after ``install()``: its module, its functions as they were, and its sampler with these."""
    pytest.importorskip("sglang.srt.lvm", reason="needs the LenVM fork of SGLang (sglang-LenVM)")
    importlib.import_module("sglang.srt.lvm.lvm_inproc_runner")  # so that it has a copy of the fork's function
    originals = sglang_fork.install()
    module = importlib.import_module(GUIDED_SAMPLING)
    methods = {name.rpartition(".")[2]: f for name, f in originals.items() if name.startswith(SAMPLER)}
    return SimpleNamespace(
        module=module, originals=originals, Original=type("Original", (module.LvmGuidedSampler,), methods)
    )


class Request:
    """A request of the engine, which knows all ``tokens`` of its sequence; ``output_ids`` may be one short of them."""

    def __init__(self, rid, prompt, custom_params, *, top_k=8, top_p=1.0, min_p=0.0):
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), []
        self.tokens = list(prompt)
        self.sampling_params = SimpleNamespace(custom_params=custom_params, top_k=top_k, top_p=top_p, min_p=min_p)
        self.eos_token_ids = {EOS}
        self.multimodal_inputs = self.input_embeds = self.req_pool_idx = self.finished_reason = self.session_id = None

    def finished(self):
        return self.finished_reason is not None


class Item(SimpleNamespace):
    """An image of so many rows and columns of tokens, at these places of a prompt; as the engine has it."""

    def __init__(self, first, rows, columns, seed=0, **changes):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        pixels = torch.randn(4 * rows * columns, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
        values = dict(
            modality=SimpleNamespace(name="IMAGE"),
            hash=10**15 + seed,  # of the pixels alone
            feature=pixels,
            offsets=[(first, first + rows * columns - 1)],
            model_specific_data=dict(image_grid_thw=grid),
            image_grid_thw=grid,
        )
        super().__init__(**values | changes)

    def is_image(self):
        return self.modality.name == "IMAGE"


class OnHost:
    """Numbers that the engine has on the host: a tensor's ``tolist`` would count as reading the device."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def tolist(self):
        return list(self.numbers)


class Sampler:
    """In place of the fork's sampler, as far as guidance; ``result`` is the probabilities that it would go on with."""

    def __init__(self, guided_sampler):
        self.lvm_guided_sampler, self.result = guided_sampler, None

    def __call__(self, logits_output, info, *args):
        probs = torch.softmax(logits_output.next_token_logits, dim=-1)
        filters = info.temperatures, info.top_ps, info.top_ks, info.min_ps
        self.result = self.lvm_guided_sampler.apply(probs, info.reqs, *filters)
        return torch.zeros(len(info.reqs), dtype=torch.int64)


class Engine:
    """One model runner after ``install()``, whose base model's scores follow from the last token and the length.

    Args:
        modules: of the fork or of the stand-in for it, by name.
        monkeypatch: of the test.
        value_model: directory.
        rows, max_len: of the engine's request pool.
        max_requests: of a batch.
        lag: tokens that the host's lists are short of in a decode batch: 1 under the overlapping scheduler.
        free: bytes of memory free at each call.
        function: of guidance (None: one of the fork's).
        is_draft_worker: of the model runner.
        options: of the server.
    """

    def __init__(
        self,
        modules,
        monkeypatch,
        value_model,
        *,
        rows=7,
        max_len=90,
        max_requests=5,
        lag=0,
        free=(2**34,),
        function=None,
        is_draft_worker=False,
        **options,
    ):
        free, self.asked_memory = list(free), []

        def get_available_gpu_memory(*args, **kwargs):
            self.asked_memory.append((args, kwargs))
            return (free.pop(0) if len(free) > 1 else free[0]) / 2**30

        monkeypatch.setitem(sglang_fork._originals, f"{RUNNER}:ModelRunner.initialize", lambda self, memory: None)
        monkeypatch.setattr(modules[MEMORY], "get_available_gpu_memory", get_available_gpu_memory)
        guided_sampling = modules[GUIDED_SAMPLING]
        self.model_runner = object.__new__(modules[RUNNER].ModelRunner)
        self.guided_sampler = object.__new__(guided_sampling.LvmGuidedSampler)
        self.guided_sampler._inproc = None
        self.guided_sampler._fn = guided_sampling.lvm_combined_guidance if function is None else function
        given = dict(
            tokenizer_path=str(value_model),
            disable_cuda_graph=False,
            mem_fraction_static=0.9,
            lvm_guided_inproc=True,
            lvm_guided_inproc_model_path=str(value_model),
            lvm_guided_inproc_json_model_override_args="{}",
            lvm_guided_inproc_mem_fraction_static=0.5,
        )
        vars(self.model_runner).update(
            sampler=Sampler(self.guided_sampler),
            server_args=SimpleNamespace(**given | options),
            is_draft_worker=is_draft_worker,
            device="cpu",
            gpu_id=0,
            dtype=torch.float32,
            tp_group=SimpleNamespace(world_size=1, cpu_group=None),
            model_config=SimpleNamespace(vocab_size=VOCAB, context_len=max_len - 4, is_multimodal=True),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(rows, max_len, dtype=torch.int32)),
            max_running_requests=max_requests,
        )
        self.lag = lag
        self.model_runner.initialize(0.0)
        self._draws = torch.Generator().manual_seed(21)

    @property
    def runner(self):
        return self.guided_sampler._inproc

    def prefill(self, requests, rows, *, ends=None, prefixes=None):
        """The probabilities before and after a batch of prompts, or of chunks of them up to ``ends``.

        Args:
            requests: each with all of its tokens, also those that it had generated before a retraction.
            rows: of the engine's request pool.
            ends: of the chunks; those whose prompt goes on draw nothing.
            prefixes: tokens of each that the engine finds in its radix cache.
        """
        ends = [len(r.tokens) for r in requests] if ends is None else ends
        prefixes = [0] * len(requests) if prefixes is None else prefixes
        for request, row in zip(requests, rows, strict=True):
            request.req_pool_idx = row
            request.output_ids = request.tokens[len(request.origin_input_ids) :]
        parts = [r.tokens[first:end] for r, first, end in zip(requests, prefixes, ends, strict=True)]
        lens = torch.tensor([len(part) for part in parts], dtype=torch.int32)
        return self._run(
            requests,
            ends,
            forward_mode=SimpleNamespace(is_decode=lambda: False, is_mixed=lambda: False),
            input_ids=torch.tensor([token for part in parts for token in part]),
            extend_seq_lens=lens,
            extend_start_loc=lens.cumsum(0, dtype=torch.int32) - lens,
        )

    def decode(self, requests):
        """The probabilities before and after a decode batch."""
        for request in requests:
            known = len(request.tokens) - self.lag
            request.output_ids = request.tokens[len(request.origin_input_ids) : known]
        return self._run(
            requests,
            [len(r.tokens) for r in requests],
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_mixed=lambda: False),
            input_ids=torch.tensor([r.tokens[-1] for r in requests] + [VOCAB - 1]),  # with padding
        )

    def draw(self, requests, probs):
        """Tokens by ``probs [B, V]``, which the sequences grow by."""
        for request, row in zip(requests, probs, strict=True):
            request.tokens.append(int(torch.multinomial(row, 1, generator=self._draws)))

    def _run(self, requests, lengths, **batch):
        def column(name):
            return torch.tensor([getattr(r.sampling_params, name) for r in requests])

        logits = torch.stack([BY_TOKEN[r.tokens[n - 1]] + BY_LENGTH[n] for r, n in zip(requests, lengths, strict=True)])
        info = SimpleNamespace(
            reqs=list(requests),
            temperatures=torch.ones(len(requests), 1),
            top_ks=column("top_k").int(),
            top_ps=column("top_p").float(),
            min_ps=column("min_p").float(),
            update_regex_vocab_mask=lambda: None,
            apply_logits_bias=lambda logits: None,
        )
        forward_batch = SimpleNamespace(
            req_pool_indices=torch.tensor([r.req_pool_idx for r in requests]),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=OnHost(lengths),
            sampling_info=info,
            return_logprob=False,
            top_logprobs_nums=[],
            token_ids_logprobs=[],
            positions=torch.tensor(lengths) - 1,
            **batch,
        )
        before = torch.softmax(logits, dim=-1)  # the fork writes them into the logits
        self.model_runner.sample(SimpleNamespace(next_token_logits=logits), forward_batch)
        return before, self.model_runner.sampler.result
