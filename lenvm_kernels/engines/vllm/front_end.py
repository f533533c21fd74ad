"""Guidance in vLLM's front end: pass the settings to all workers, reject requests, and add outcomes to responses.

The entry point (``vllm.general_plugins``) is called in every process of every server in this environment. Importable
with any version of vLLM, and without Triton.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from lenvm_kernels.engines import is_off, variables
from lenvm_kernels.engines.vllm import processor
from lenvm_kernels.engines.vllm.processor import LenVMProcessor, guidance_of, names_guidance
from lenvm_kernels.guidance.fields import NAMESPACE, with_selected

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

    from lenvm_kernels.engines.report import EndMetrics

logger = logging.getLogger(f"vllm.{__name__}")  # a child of the engine's logger, so that messages are shown
_OPENAI = "vllm.entrypoints.openai"
_NO_BEAMS = "use_beam_search must be false together with guidance, got true"
_is_beam_search = ContextVar("is_beam_search", default=False)  # in the task of a request to the server


def install() -> None:
    """Wrap the function that configures an engine, which only front ends have loaded."""
    engine_args = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if hasattr(engine_args, "create_engine_config") and not is_off():
        _call_after(engine_args, "create_engine_config", configure)


def configure(_: EngineArgs, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    """Pass the settings to the workers of an engine, and check its requests.

    Raises ValueError if a setting is invalid, or if a setting is given but the engine cannot guide requests.
    """
    given = variables()
    if vllm_config.model_config.runner_type == "pooling":
        return
    if given and isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[processor.VARIABLES] = given
    LenVMProcessor.config, LenVMProcessor.is_checked_later = vllm_config, True
    LenVMProcessor.reason = reason = processor.reason_against(vllm_config)
    if reason is not None:
        if given:
            raise ValueError(f"{reason}. LENVM_VALUE_MODEL=off turns guidance off")
        logger.info("LenVM: requests cannot be guided: %s", reason)
        return
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    _call_after(InputProcessor, "process_inputs", check_request)
    _call_after(OutputProcessor, "add_request", _reporting(note_guidance))
    _call_after(RequestState, "_new_completion_output", _reporting(add_outcome))
    for module, owner, method, call in (
        ("chat_completion.protocol", "ChatCompletionRequest", "to_beam_search_params", refuse_beams),
        ("completion.protocol", "CompletionRequest", "to_beam_search_params", refuse_beams),
        ("chat_completion.protocol", "ChatCompletionRequest", "to_sampling_params", pass_selected),
        ("responses.protocol", "ResponsesRequest", "to_sampling_params", pass_selected),
        ("completion.serving", "OpenAIServingCompletion", "request_output_to_completion_response", extend_completion),
        ("completion.serving", "OpenAIServingCompletion", "completion_stream_generator", extend_stream),
        ("chat_completion.serving", "OpenAIServingChat", "chat_completion_full_generator", extend_chat),
        ("chat_completion.serving", "OpenAIServingChat", "chat_completion_stream_generator", extend_stream),
    ):
        if _OPENAI in sys.modules:
            found = getattr(importlib.import_module(f"{_OPENAI}.{module}"), owner)
            _call_after(found, method, call, is_around=call in (extend_chat, extend_stream))


def check_request(_: InputProcessor, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
    """Parse the guidance of a request, and store it in its parameters for :func:`note_guidance`.

    Without parameters, a request whose prompt or options cannot be guided is unguided. The server's defaults do not
    apply to it.

    Raises:
        VLLMValidationError: the parameters are invalid, or the request cannot be guided. The engine answers this error
            with status 400, and a ValueError with 500.
    """
    from vllm.exceptions import VLLMValidationError

    if (params := request.sampling_params) is None:
        return
    settings = LenVMProcessor.settings()
    try:
        guidance = guidance_of(params, settings)
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error
    if guidance is None:
        return
    reason = None
    if _is_beam_search.get():
        reason = _NO_BEAMS
    elif params.watermarking:
        reason = "watermarking must be false together with guidance, got true"
    elif request.lora_request is not None and settings.value_model is not None:
        reason = "a LoRA adapter must be absent together with guidance by a value model or probe"
    elif settings.reads_tokens and (request.mm_features or request.prompt_embeds is not None):
        given = "images or audio" if request.mm_features else "prompt_embeds"
        reason = f"the prompt must be text together with guidance by a value model, got {given}"
    if reason is None:
        vars(params)["lenvm"] = guidance
    elif settings.is_asked(params.extra_args):
        raise VLLMValidationError(reason)
    else:
        params.extra_args = {**(params.extra_args or {}), NAMESPACE: {}}


def pass_selected(request: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    """Add the fields of a chat request that select defaults to its parameters."""
    if LenVMProcessor.settings().has_choices:
        params.extra_args = with_selected(params.extra_args, request)


def refuse_beams(request: Any, *args: Any, **kwargs: Any) -> None:
    """Raise ValueError if a beam search request has guidance. Its steps are requests without parameters."""
    if names_guidance(request.vllm_xargs):
        raise ValueError(_NO_BEAMS)
    _is_beam_search.set(True)


def note_guidance(
    processor: Any, _: None, request: EngineCoreRequest, prompt: Any, parent: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Store the guidance of a request for its last output. ``parent`` is a request for several outputs."""
    params = request.sampling_params if parent is None else parent.sampling_params
    if params is not None and (state := processor.request_states.get(request.request_id)) is not None:
        vars(state)["lenvm"] = vars(params).get("lenvm")


def add_outcome(state: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    """Add the guidance outcome to the last output of a request."""
    guidance, reason = vars(state).get("lenvm"), output.finish_reason
    if guidance is None or reason is None or state.detokenizer is None:
        return
    tokens = state.detokenizer.output_token_ids  # in a stream, ``output`` only has new tokens
    is_ended = reason == "stop" and not isinstance(output.stop_reason, str)  # by a token
    breaks = text_breaks() if guidance.unit else ()
    if outcome := guidance.outcome(state.prompt_token_ids or (), tokens, tokens[-1:] if is_ended else (), breaks):
        vars(output)["lenvm"] = outcome
        end_metrics().count(outcome, reason)


@cache
def text_breaks() -> Sequence[int]:
    """The ends and starts in the vocabulary, for counting words and sentences."""
    from lenvm_kernels.engines.tokenizers import load_text_breaks

    assert LenVMProcessor.config is not None
    model = LenVMProcessor.config.model_config
    breaks = load_text_breaks(model.tokenizer, model.get_vocab_size())
    return () if breaks is None else breaks.tolist()


@cache
def end_metrics() -> EndMetrics:
    """The metrics of this process, created after the engine has set up ``prometheus_client``."""
    from lenvm_kernels.engines.report import EndMetrics

    assert LenVMProcessor.config is not None
    return EndMetrics(model_name=str(LenVMProcessor.config.model_config.served_model_name))


def extend_completion(_: Any, response: Any, results: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Add the outcomes to the choices of a response, which are in the order of the results' outputs."""
    outputs = [output for result in results for output in result.outputs]
    _extend(response, {i: vars(output)["lenvm"] for i, output in enumerate(outputs) if "lenvm" in vars(output)})


async def extend_chat(original: Callable, serving: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a chat response: add the outcomes to its choices."""
    outcomes = dict[int, Any]()
    response = await original(serving, *_noting(args, outcomes), **kwargs)
    _extend(response, outcomes)
    return response


async def extend_stream(original: Callable, serving: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Around the server-sent events of a response: add the outcome to the last event of each choice."""
    outcomes = dict[int, Any]()
    async for event in original(serving, *_noting(args, outcomes), **kwargs):
        if outcomes and event.startswith("data: {"):
            content = json.loads(event.removeprefix("data: "))
            for choice in content.get("choices", ()):
                if choice.get("finish_reason") is not None and choice["index"] in outcomes:
                    choice["lenvm"] = outcomes.pop(choice["index"])
                    event = f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
        yield event


def _noting(args: Sequence[Any], outcomes: dict[int, Any]) -> list[Any]:
    """Wrap the engine's results among the arguments, so that their outcomes are stored by choice index.

    The first argument is the request. Results of completions are pairs of the prompt's index and a result.
    """
    choices = args[0].n or 1

    async def noted(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for item in results:
            place, result = item if isinstance(item, tuple) else (0, item)
            for output in result.outputs:
                if "lenvm" in vars(output):
                    outcomes[output.index + place * choices] = vars(output)["lenvm"]
            yield item

    return [noted(arg) if isinstance(arg, AsyncIterator) else arg for arg in args]


def _extend(response: Any, outcomes: Mapping[int, Any]) -> None:
    """Add the outcomes to the choices of a response; errors have no choices."""
    for choice in getattr(response, "choices", ()):
        if choice.index in outcomes:
            choice.lenvm = outcomes[choice.index]


@cache
def _reporting(call: Callable[..., None]) -> Callable[..., None]:
    """Log exceptions of a function, because a report must not end the engine."""

    @wraps(call)
    def reporting(*args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            logger.exception("LenVM: a response lacks the outcome of its guidance")

    return reporting


def _call_after(owner: Any, name: str, call: Callable[..., Any], *, is_around: bool = False) -> None:
    """Wrap a method once: ``call(self, result, ...)`` runs after it, or ``call(original, self, ...)`` instead."""
    original = getattr(owner, name)
    if getattr(original, "calls", None) is call:
        return

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_around:
            return call(original, self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        call(self, result, *args, **kwargs)
        return result

    vars(wrapped)["calls"] = call
    setattr(owner, name, wrapped)
