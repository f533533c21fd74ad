"""Signatures of the engines' internal functions that the plugins wrap, call or read, as recorded in tested versions.

A process with guidance compares the installed signatures with the recorded ones, and rejects differences by name.
``signatures.json`` is written by ``python -m tools.engine_signatures``.
"""

from __future__ import annotations

import importlib
import inspect
import json
from functools import reduce
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
_SGLANG, _VLLM = "sglang.srt", "vllm.v1.worker.gpu"
_SAMPLING = f"{_SGLANG}.lvm.lvm_guided_sampling"
# The parameters of a constructor are not compared: it is wrapped for the object that it has made.
ANYTHING = "..."
# The recorded targets of each engine, by module and name; a dataclass is recorded by its fields.
USED: dict[str, tuple[str, ...]] = {
    "sglang": (
        f"{_SGLANG}.arg_groups.model_override_base:resolved_view",
        f"{_SGLANG}.configs.hybrid_arch:mambaish_config",
        f"{_SGLANG}.layers.logits_processor:LogitsProcessor._get_pruned_states",
        f"{_SGLANG}.layers.logits_processor:LogitsProcessor.forward",
        f"{_SGLANG}.layers.sampler:Sampler._preprocess_logits",
        f"{_SGLANG}.layers.sampler:Sampler.forward",
        f"{_SGLANG}.managers.auxiliary_output:append_auxiliary_output",
        f"{_SGLANG}.managers.schedule_batch:Req.__init__",
        f"{_SGLANG}.managers.schedule_batch:Req.extend_image_inputs",
        f"{_SGLANG}.managers.scheduler:Scheduler.launch_batch_sample_if_needed",
        f"{_SGLANG}.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.record_weight_version_after_update",
        f"{_SGLANG}.managers.tokenizer_manager:TokenizerManager._send_one_request",
        f"{_SGLANG}.managers.tokenizer_manager:TokenizerManager.update_request_meta_info",
        f"{_SGLANG}.mem_cache.kv_cache_configurator:KVCacheConfigurator.config_from_budget",
        f"{_SGLANG}.mem_cache.radix_cache:RadixCache.checkpoint",
        f"{_SGLANG}.mem_cache.unified_radix_cache:UnifiedRadixCache.checkpoint",
        f"{_SGLANG}.model_executor.forward_batch_info:ForwardBatch.init_new",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.alloc_memory_pool",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.forward",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.load_model",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.sample",
        f"{_SGLANG}.plugins.hook_registry:HookRegistry._apply_target",
        f"{_SGLANG}.runtime_context:get_parallel",
        f"{_SGLANG}.sampling.penaltylib.repetition_penalty:apply_scaling_penalties",
        f"{_SGLANG}.speculative.eagle_utils:eagle_sample",
        f"{_SGLANG}.utils.hf_transformers.tokenizer:get_tokenizer",
    ),
    "sglang_fork": (  # the LenVM fork of SGLang
        f"{_SAMPLING}:LvmGuidedSampler._get_inproc_provider",
        f"{_SAMPLING}:LvmGuidedSampler._post_tree_value",
        f"{_SAMPLING}:LvmGuidedSampler.apply",
        f"{_SAMPLING}:_extract_token_temperature_scale",
        f"{_SAMPLING}:lvm_combined_guidance",
        f"{_SAMPLING}:lvm_expectation_guidance",
        f"{_SAMPLING}:lvm_hard_value_constraint_guidance",
        f"{_SGLANG}.lvm.lvm_value_utils:get_eos_token_ids",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.initialize",
        f"{_SGLANG}.model_executor.model_runner:ModelRunner.sample",
        f"{_SGLANG}.models.qwen2_lvm:MLP2SiLUValueHead.forward",
        f"{_SGLANG}.models.qwen3_lvm:MLP2SiLUValueHead.forward",
        f"{_SGLANG}.utils.common:get_available_gpu_memory",
    ),
    "vllm": (
        "vllm.distributed.parallel_state:GroupCoordinator.broadcast",
        "vllm.distributed.parallel_state:get_tp_group",
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward",
        "vllm.model_executor.models.interfaces:supports_eagle3",
        f"{_VLLM}.buffer_utils:StagedWriteTensor.stage_write",
        f"{_VLLM}.model_runner:GPUModelRunner.load_model",
        f"{_VLLM}.model_runner:GPUModelRunner.sample_tokens",
        f"{_VLLM}.sample.logits_processor.interface:LogitsContext",
        f"{_VLLM}.sample.logits_processor.interface:LogitsProcRequestState",
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state",
    ),
}


def recorded(engine: str) -> dict[str, dict[str, str]]:
    """The signatures by target, for each recorded version."""
    return json.loads(FILE.read_text(encoding="utf-8"))[engine]


def signature_of(target: str) -> str | None:
    """The parameter names of a target, with ``=`` after those with a default; None if the target does not exist."""
    module, name = target.split(":")
    try:
        found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError):
        return None
    if name.endswith(".__init__"):
        return ANYTHING
    return written([(p.name, p.kind, p.default is not p.empty) for p in parameters if p.name not in ("self", "cls")])


def written(parameters: list[tuple[str, Any, bool]]) -> str:
    """Parameters, given by name, kind and whether they have a default, in the format of the file."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    texts, is_keyword_only = [], False
    for name, kind, has_default in parameters:
        if kind == inspect.Parameter.KEYWORD_ONLY and not is_keyword_only:
            texts.append("*")
        is_keyword_only |= kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        texts.append(f"{stars.get(kind, '')}{name}{'=' * has_default}")
    return ", ".join(texts)


def differences(engine: str) -> dict[str, str]:
    """The targets of the installed engine that match no recorded version, each with its difference."""
    versions, found = recorded(engine), {}
    for target in USED[engine]:
        accepted = list(dict.fromkeys(version[target] for version in versions.values()))
        if (signature := signature_of(target)) is None:
            found[target] = "is not there"
        elif signature not in accepted:
            found[target] = f"takes ({signature}), not ({') or ('.join(accepted)})"
    return found


def check(engine: str) -> None:
    """Raise RuntimeError, naming the targets, if any of an engine matches no recorded version."""
    if wrong := differences(engine):
        texts = "; ".join(f"{target.split(':')[1]} {what}" for target, what in wrong.items())
        tried = ", ".join(recorded(engine))
        raise RuntimeError(f"LenVM does not fit this {engine}, only {tried}: {texts}")
