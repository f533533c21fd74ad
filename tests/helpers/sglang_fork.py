"""A stand-in for the LenVM fork of SGLang, with the inputs of its guided sampler."""

import sys
from itertools import chain
from types import ModuleType, SimpleNamespace

import torch

from lenvm_kernels.engines import sglang_fork
from tests.helpers.engine_stubs import stubs
from tests.helpers.models import EOS, IMAGE, VIDEO, VOCAB

ALL = 1 << 30  # the fork's top_k without a limit
SAMPLING = "sglang.srt.lvm.lvm_guided_sampling"
RUNNER = "sglang.srt.model_executor.model_runner"
MEMORY = "sglang.srt.utils.common"
_GENERATOR = torch.Generator().manual_seed(20)
BY_TOKEN, BY_LENGTH = (torch.randn(size, VOCAB, generator=_GENERATOR) for size in (VOCAB, 400))
BY_TOKEN[:, [IMAGE, VIDEO]] = -torch.inf  # no image is drawn


def use_stand_in(monkeypatch):
    """Put modules with the fork's names and parameters into ``sys.modules``, before ``install()``. Returns them by
    name. ``calls`` of the sampler's module records calls of ``initialize`` and ``apply``."""
    modules = {}
    for path, text in stubs("sglang_fork", "0.5.8").items():
        name = path.removesuffix(".py").replace("/", ".")
        modules[name] = ModuleType(name)
        exec(text, vars(modules[name]))
    modules[SAMPLING].calls = calls = []
    sampler, runner = modules[SAMPLING].LvmGuidedSampler, modules[RUNNER].ModelRunner

    def apply(self, probs, reqs, temperatures, top_ps, top_ks, min_ps):
        calls.append(("apply", self, probs, reqs, temperatures, top_ps, top_ks, min_ps))

    for owner, name, function in (
        (modules["sglang.srt.lvm.lvm_value_utils"], "get_eos_token_ids", lambda req: req.eos_token_ids),
        (sampler, "_get_inproc_provider", lambda self: self._inproc),
        (sampler, "apply", apply),
        (runner, "initialize", lambda self, min_per_gpu_memory: calls.append(("initialize", self, min_per_gpu_memory))),
        (runner, "sample", lambda self, logits_output, forward_batch: self.sampler(logits_output, forward_batch)),
    ):
        setattr(owner, name, function)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sglang_fork.install.cache_clear()
    sglang_fork.warn_once.cache_clear()
    return modules


class Request:
    """A request of the engine with all ``tokens`` of its sequence; ``output_ids`` may lack the last token."""

    def __init__(self, rid, prompt, custom_params, *, top_k=8, top_p=1.0, min_p=0.0):
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), []
        self.tokens = list(prompt)
        self.sampling_params = SimpleNamespace(custom_params=custom_params, top_k=top_k, top_p=top_p, min_p=min_p)
        self.eos_token_ids = {EOS}
        self.multimodal_inputs = self.input_embeds = self.req_pool_idx = self.finished_reason = self.session_id = None

    def finished(self):
        return self.finished_reason is not None


class Item(SimpleNamespace):
    """An image of ``rows x columns`` tokens from index ``first`` of a prompt on, in the engine's format."""

    def __init__(self, first, rows, columns, seed=0, **changes):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        pixels = torch.randn(4 * rows * columns, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
        values = dict(
            modality=SimpleNamespace(name="IMAGE"),
            hash=10**15 + seed,  # depends on the pixels only
            feature=pixels,
            offsets=[(first, first + rows * columns - 1)],
            model_specific_data=dict(image_grid_thw=grid),
            image_grid_thw=grid,
        )
        super().__init__(**values | changes)

    def is_image(self):
        return self.modality.name == "IMAGE"


class Engine:
    """A model runner after ``install()``; scores of its base model depend on the last token and the length.

    ``free`` are the bytes of free memory returned by successive calls, ``function`` is the guidance function (if None,
    one of the fork's), and ``options`` are the server's.
    """

    lag = 0  # number of tokens missing on the host in a decode batch, 1 with the overlapping scheduler

    def __init__(
        self, modules, monkeypatch, value_model, *, free=(2**34,), function=None, is_draft_worker=False, **options
    ):
        free, self.asked_memory = list(free), []

        def get_available_gpu_memory(*args, **kwargs):
            self.asked_memory.append((args, kwargs))
            return (free.pop(0) if len(free) > 1 else free[0]) / 2**30

        monkeypatch.setattr(modules[MEMORY], "get_available_gpu_memory", get_available_gpu_memory)
        self.lvm_guided_sampler = object.__new__(modules[SAMPLING].LvmGuidedSampler)
        self.lvm_guided_sampler._inproc = None
        self.lvm_guided_sampler._fn = function or modules[SAMPLING].lvm_combined_guidance
        given = dict(tokenizer_path=str(value_model), disable_cuda_graph=False, mem_fraction_static=0.9)
        inproc = dict(model_path=str(value_model), json_model_override_args="{}", mem_fraction_static=0.5)
        given |= {"lvm_guided_inproc": True} | {f"lvm_guided_inproc_{name}": value for name, value in inproc.items()}
        self.model_runner = object.__new__(modules[RUNNER].ModelRunner)
        vars(self.model_runner).update(
            sampler=self,
            server_args=SimpleNamespace(**given | options),
            is_draft_worker=is_draft_worker,
            device="cpu",
            gpu_id=0,
            dtype=torch.float32,
            tp_group=SimpleNamespace(world_size=1, cpu_group=None),
            model_config=SimpleNamespace(vocab_size=VOCAB, is_multimodal=True),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(7, 90, dtype=torch.int32)),
            max_running_requests=5,
        )
        self.model_runner.initialize(0.0)
        self.draws = torch.Generator().manual_seed(21)

    @property
    def runner(self):
        return self.lvm_guided_sampler._inproc

    def step(self, requests, rows=(), *, ends=None, prefixes=None):
        """Probabilities before and after guidance of a batch of requests with all their tokens, also from before a
        retraction.

        A batch of prompts has ``rows`` of the engine's request pool, ``ends`` of the chunks (if None, all tokens), and
        ``prefixes`` in the engine's radix cache (if None, 0 tokens).
        """
        is_decode, lens = not rows, [len(request.tokens) for request in requests]
        ends, prefixes = ends or lens, [n - 1 for n in lens] if is_decode else prefixes or [0] * len(requests)
        for request, row, n in zip(requests, rows or [r.req_pool_idx for r in requests], lens, strict=True):
            request.req_pool_idx = row
            request.output_ids = request.tokens[len(request.origin_input_ids) : n - self.lag * is_decode]
        scores = [BY_TOKEN[r.tokens[n - 1]] + BY_LENGTH[n] for r, n in zip(requests, ends, strict=True)]
        parts = [r.tokens[first:end] for r, first, end in zip(requests, prefixes, ends, strict=True)]
        part_lens = torch.tensor([len(part) for part in parts], dtype=torch.int32)
        sampling = [r.sampling_params for r in requests]
        batch = SimpleNamespace(
            reqs=list(requests),
            temperatures=torch.ones(len(requests), 1),
            filters=(
                torch.tensor([float(x.top_p) for x in sampling]),
                torch.tensor([x.top_k for x in sampling], dtype=torch.int32),
                torch.tensor([float(x.min_p) for x in sampling]),
            ),
            forward_mode=SimpleNamespace(is_decode=lambda: is_decode, is_mixed=lambda: False),
            input_ids=torch.tensor([*chain(*parts), *[VOCAB - 1] * is_decode]),  # with padding
            extend_seq_lens=part_lens,
            extend_start_loc=part_lens.cumsum(0, dtype=torch.int32) - part_lens,
            req_pool_indices=torch.tensor([r.req_pool_idx for r in requests]),
            seq_lens=torch.tensor(ends),
            # On the host. ``tolist`` of a tensor would count as a host-device sync.
            seq_lens_cpu=SimpleNamespace(tolist=lambda: ends),
        )
        probs = torch.softmax(torch.stack(scores), dim=-1)
        self.model_runner.sample(probs, batch)
        return probs, self.result

    def __call__(self, probs, batch):
        """Replaces the fork's sampler up to the guidance, which rewrites probabilities in place."""
        self.result = self.lvm_guided_sampler.apply(probs.clone(), batch.reqs, batch.temperatures, *batch.filters)
        return torch.zeros(len(batch.reqs), dtype=torch.int64)
