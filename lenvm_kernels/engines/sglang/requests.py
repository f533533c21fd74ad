"""The guidance of a request, read by the server's front end and by its schedulers."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang.srt.environ import envs
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

from lenvm_kernels.engines.settings import MAX_END_TOKENS, MAX_SCALED_TOKENS, MAX_STOP_TOKENS, Settings
from lenvm_kernels.engines.tokenizers import load_with
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.guidance.params import read_names

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req

    Request: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | Req


def settings_of(options: Any) -> Settings:
    """The settings of this process. Its tokenizer is loaded as the engine loads it."""
    path, names = options.tokenizer_path, ("tokenizer_mode", "trust_remote_code", "revision", "tokenizer_backend")
    load_with(path, partial(get_tokenizer, path, **{name: getattr(options, name) for name in names}))
    return Settings.current(path)


def guidance_of(request: Request, settings: Settings, failure: str | None = None) -> GuidanceParams | None:
    """The parameters of a request, or None without guidance.

    Args:
        request: the request, in any process.
        settings: the settings of the process.
        failure: why requests with guidance are rejected. If None, they are accepted.

    Raises:
        ValueError: naming the field of ``custom_params``, what came and what is accepted; or a feature that cannot be
            combined with guidance.
    """
    sampling = request.sampling_params
    if sampling.custom_params is None:
        return None
    if not isinstance(sampling.custom_params, dict):
        raise ValueError(f"custom_params must be an object of named values, got {sampling.custom_params!r}")
    params = settings.parse_request(sampling.custom_params)
    if not params.needs_step and not params.token_temperature_scale:
        return None
    if failure is not None:
        raise ValueError(f"guidance in custom_params must be absent: {failure}")
    if not -(2**63) <= (sampling.sampling_seed or 0) < 2**63:
        raise ValueError(f"sampling_seed must be an int64, got {sampling.sampling_seed}")
    for name, tokens, most in (
        ("stop_token_ids", sampling.stop_token_ids or (), MAX_STOP_TOKENS),
        ("token_temperature_scale", params.token_temperature_scale, MAX_SCALED_TOKENS),
    ):
        if len(tokens) > most:
            raise ValueError(f"{name} must be of at most {most} tokens together with guidance, got {len(tokens)}")
    given = {
        "beam_width": (sampling.beam_width or 1) > 1,  # beams are not drawn
        "watermark": sampling.watermark is not None,  # it replaces the drawn token
        # The engine aborts a request if its token is outside the engine's filters.
        "return_sampling_mask": getattr(request, "return_sampling_mask", False),
    }
    if settings.reads_tokens:
        # Requests before they are scheduled have no session, and requests for embeddings no input embeddings.
        session = getattr(request, "session", None)
        given |= {
            "input_embeds": getattr(request, "input_embeds", None) is not None,
            "positional_embed_overrides": request.positional_embed_overrides is not None,
            # If the value model reads images, the scheduler rejects unsupported ones (PromptImages).
            "images, videos and audio": getattr(request, "mm_inputs", None) is not None and not settings.reads_images,
            # Its requests share slots outside the radix cache, which are not computed for requests without guidance.
            "a streaming session": session is not None and session.streaming,
        }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} cannot be combined with guidance in custom_params")
    return params


def check_off(request: Request, reason: str) -> None:
    """Raise ValueError with the reason if a request has parameters of guidance, although there is none.

    The engine itself reads a ``thinking_budget``. Names that may be another component's are ignored.
    """
    custom_params = request.sampling_params.custom_params
    if isinstance(custom_params, dict):
        try:
            given = read_names(custom_params, is_shared=True)
        except ValueError:  # a name that looks like a field
            return
        if given.keys() - {"thinking_budget"}:
            raise ValueError(f"guidance in custom_params must be absent: {reason}")


def separate_sample(request: Request) -> None:
    """Give a guided request that is about to be sent its own sampling parameters.

    The ``n`` samples of a prompt are sent one after the other and share one object. Each sample that is sent changes
    the seed in this object, so that the next sample draws other tokens.
    """
    shared = request.sampling_params
    request.sampling_params = own = copy.copy(shared)
    if shared.sampling_seed is not None:
        shared.sampling_seed = seed_of(str(shared.sampling_seed))
    if not envs.SGLANG_USE_PICKLE_IPC.get():
        own.custom_params = {name: _for_msgpack(value) for name, value in own.custom_params.items()}


def _for_msgpack(value: Any) -> Any:
    """A parameter as the engine's msgpack accepts it: nested lists and objects as JSON text."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return json.dumps(value) if any(isinstance(part, (list, dict)) for part in parts) else value


def seed_of(text: str) -> int:
    """A seed, at least 0, that depends on a text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def end_tokens(req: Req) -> set[int]:
    """The tokens at which the engine ends a request's output; their value is 0. Stop strings have no token."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:  # the engine then also ignores stop tokens
        return set()
    ids = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    ids |= {getattr(tokenizer, "eos_token_id", None), *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return set(sorted(ids - {None})[:MAX_END_TOKENS])
