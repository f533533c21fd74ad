"""The front end of vLLM: it passes the settings on to all workers, and rejects requests that cannot be guided.

Its entry point, in the group ``vllm.general_plugins``, is called in every process of every server in this environment.
Importable with any version of vLLM, and without Triton.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from lenvm_kernels.engines import variables
from lenvm_kernels.engines.vllm import processor
from lenvm_kernels.engines.vllm.processor import LenVMProcessor, is_off, names_guidance
from lenvm_kernels.guidance.fields import NAMESPACE, with_selected

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

logger = logging.getLogger(f"vllm.{__name__}")  # below the engine's logger, so that it is shown
_OPENAI = "vllm.entrypoints.openai"


def install() -> None:
    """Wrap the function that configures an engine, in processes that have loaded it: front ends."""
    engine_args = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if hasattr(engine_args, "create_engine_config") and not is_off():
        _call_after(engine_args, "create_engine_config", configure)


def configure(_: EngineArgs, vllm_config: VllmConfig) -> None:
    """Pass the settings on to the workers of an engine, and check its requests.

    Raises:
        ValueError: a setting is invalid, or the engine cannot guide requests although a setting is given.
    """
    given = variables()
    if vllm_config.model_config.runner_type == "pooling":  # it generates nothing
        return
    if given and isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[processor.VARIABLES] = given
    LenVMProcessor.config = vllm_config
    LenVMProcessor.reason = reason = processor.reason_against(vllm_config)
    if reason is not None:
        if given:
            raise ValueError(f"{reason}. LENVM_VALUE_MODEL=off turns guidance off")
        logger.info("LenVM: requests cannot be guided: %s", reason)
        return
    from vllm.v1.engine.input_processor import InputProcessor

    _call_after(InputProcessor, "process_inputs", check_request)
    for name, request, method, call in (
        ("chat_completion", "ChatCompletionRequest", "to_beam_search_params", refuse_beams),
        ("completion", "CompletionRequest", "to_beam_search_params", refuse_beams),
        ("chat_completion", "ChatCompletionRequest", "to_sampling_params", pass_selected),
        ("responses", "ResponsesRequest", "to_sampling_params", pass_selected),
    ):
        if _OPENAI in sys.modules:
            _call_after(getattr(importlib.import_module(f"{_OPENAI}.{name}.protocol"), request), method, call)


def check_request(_: InputProcessor, request: EngineCoreRequest) -> None:
    """Raise ValueError if a request whose prompt or options cannot be guided contains guidance.

    ``LenVMProcessor.validate_params`` has accepted its parameters. The engine answers with status 400. Requests without
    parameters are not guided by the server's defaults either.
    """
    params = request.sampling_params
    if params is None:
        return
    settings, must = LenVMProcessor.settings(), None
    if params.watermarking:
        must = "watermarking must be false together with guidance, got true"
    elif request.lora_request is not None and settings.value_model is not None:
        must = "a LoRA adapter must be absent together with guidance by a value model or probe"
    elif settings.reads_tokens and (request.mm_features or request.prompt_embeds is not None):
        given = "images or audio" if request.mm_features else "prompt_embeds"
        must = f"the prompt must be text together with guidance by a value model, got {given}"
    if must is None:
        return
    if names_guidance(params.extra_args):
        raise ValueError(must)
    params.extra_args = {**(params.extra_args or {}), NAMESPACE: {}}


def pass_selected(request: Any, params: Any) -> None:
    """Add the fields of a chat request that select defaults to its parameters."""
    if LenVMProcessor.settings().has_choices:
        params.extra_args = with_selected(params.extra_args, request)


def refuse_beams(request: Any, _: Any) -> None:
    """Raise ValueError if a request for beams contains guidance."""
    if names_guidance(request.vllm_xargs):
        raise ValueError("use_beam_search must be false together with guidance, got true")


def _call_after(owner: Any, name: str, call: Callable[[Any, Any], None]) -> None:
    """Call ``call(self, result)`` after a method, once."""
    original = getattr(owner, name)
    if getattr(original, "calls", None) is call:
        return

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(self, result)
        return result

    vars(wrapped)["calls"] = call
    setattr(owner, name, wrapped)
