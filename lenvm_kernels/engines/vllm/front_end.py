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

from lenvm_kernels.engines.vllm.options import VARIABLES, is_off, names_guidance, reason_against, variables
from lenvm_kernels.engines.vllm.processor import LenVMProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

logger = logging.getLogger(f"vllm.{__name__}")  # below the engine's logger, so that it is shown
_OPENAI = "vllm.entrypoints.openai"
# Requests that may ask for beams.
_WITH_BEAMS = {"chat_completion": "ChatCompletionRequest", "completion": "CompletionRequest"}


def install() -> None:
    """Wrap the function that configures an engine, in processes that have loaded it: front ends."""
    engine_args = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if hasattr(engine_args, "create_engine_config") and not is_off():
        _wrap(engine_args, "create_engine_config", after=lambda _, vllm_config: configure(vllm_config))


def configure(vllm_config: VllmConfig) -> None:
    """Pass the settings on to the workers of an engine, and check its requests.

    Raises:
        ValueError: a setting is invalid, or the engine cannot guide requests although a setting is given.
    """
    if variables() and isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[VARIABLES] = variables()
    LenVMProcessor.model_config = vllm_config.model_config
    LenVMProcessor.reason = reason = reason_against(vllm_config)
    if reason is not None:
        if variables():
            raise ValueError(f"{reason}. LENVM_VALUE_MODEL=off turns guidance off")
        logger.info("LenVM: requests cannot be guided: %s", reason)
        return
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "process_inputs", after=check_request)
    for name, request in _WITH_BEAMS.items() if _OPENAI in sys.modules else ():
        protocol = importlib.import_module(f"{_OPENAI}.{name}.protocol")
        _wrap(getattr(protocol, request), "to_beam_search_params", before=refuse_beams)


def check_request(_: InputProcessor, request: EngineCoreRequest) -> None:
    """Reject a request whose prompt or options cannot be guided; the engine answers with status 400.

    ``LenVMProcessor.validate_params`` has accepted its parameters.
    """
    params = request.sampling_params
    if params is None or not names_guidance(params.extra_args):
        return
    if params.watermarking:
        _refuse("watermarking must be false together with guidance, got true")
    settings = LenVMProcessor.settings()
    if settings.value_model is None:
        return
    if request.lora_request is not None:
        source = "a probe" if settings.has_probe else "a value model"
        _refuse(f"guidance by {source} must be absent with a LoRA adapter: its values are those of the base model")
    if settings.reads_tokens and (request.mm_features or request.prompt_embeds is not None):
        given = "images or audio" if request.mm_features else "prompt_embeds"
        _refuse(f"prompts must be text together with guidance by a value model, which reads tokens only, got {given}")


def refuse_beams(request: Any) -> None:
    """Reject beam search with guidance."""
    if names_guidance(request.vllm_xargs):
        _refuse("use_beam_search must be false together with guidance, got true")


def _refuse(message: str) -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(message)


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any, Any], None] = lambda *_: None,
) -> None:
    """Call ``before(self)`` and ``after(self, result)`` around a method, once."""
    original = getattr(owner, name)
    if getattr(original, "is_by_lenvm", False):
        return

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = original(self, *args, **kwargs)
        after(self, result)
        return result

    wrapped.is_by_lenvm = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
