"""The stages of a training: what ``lenvm collect`` and ``lenvm fit`` do, after all that can be checked."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, PreTrainedTokenizerBase

from lenvm_kernels.adapters.settings import NONE
from lenvm_kernels.cli_arguments import TRUNK
from lenvm_kernels.evaluate.resumable_lines import check_plan
from lenvm_kernels.evaluate.servers import Server
from lenvm_kernels.loading import held_out_prompts, spread, training_prompts
from lenvm_kernels.loading.models import Models, load_tokenizer, locate, quiet, source_of, tokens_of
from lenvm_kernels.loading.prompts import TEST, TRAIN, Prompt, read_prompts
from lenvm_kernels.training import collect as collecting
from lenvm_kernels.training.answers import AnswerStore
from lenvm_kernels.training.checkpoint import VALUE, write
from lenvm_kernels.training.fit import STATE_FILE, Schedule, Training, standardise, values_of
from lenvm_kernels.training.network import Adapters, ValueNetwork
from lenvm_kernels.training.report import CONSTANT, FITTED, INITIAL, Measured, means
from lenvm_kernels.training.targets import Split, gamma_of, split_of
from lenvm_kernels.training.trunk import (
    STANDARDISED,
    TrunkHead,
    TrunkSchedule,
    config_of,
    edges_of,
    fit_trunk,
    rows_of,
    tokens_valued,
)
from lenvm_kernels.training.trunk import values_of as trunk_values_of
from lenvm_kernels.value_model import LenVMConfig, ValueModelConfig
from lenvm_kernels.value_model.trunk import write_trunk

REPORT = "report.json"
# One in so many prompts chooses which epoch of a trunk is kept.
CHOOSES = 20
PACKAGES = ("lenvm-kernels", "torch", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Collecting:
    """How answers are sampled; fields are the flags of ``lenvm collect``."""

    prompts: list[Prompt]
    answers_per_prompt: int
    max_new_tokens: int
    targets: tuple[int, int]
    sampling: dict[str, Any]
    chat: bool
    rows: int
    concurrency: int
    device: str
    dtype: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> Collecting:
        """Read the prompts, and check.

        Raises:
            ValueError, OSError: a flag that does not fit, by name.
        """
        low, high = args.targets or (min(20, args.max_new_tokens), 2000)
        if not low <= min(high, args.max_new_tokens):
            raise ValueError(f"--targets must be LOW <= HIGH with LOW at most --max-new-tokens, got {low} {high}")
        if not 0 < args.held_out < 1:
            raise ValueError(f"--held-out must be a share in (0, 1), got {args.held_out}")
        return cls(
            prompts=_prompts(args.prompts, args.num_prompts, args.held_out, args.seed),
            answers_per_prompt=args.answers_per_prompt,
            max_new_tokens=args.max_new_tokens,
            targets=(low, min(high, args.max_new_tokens)),
            sampling=dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
            chat=not args.plain_prompts,
            rows=args.rows,
            concurrency=args.concurrency,
            device=args.device,
            dtype=args.dtype,
        )


def _prompts(file: Path | None, count: int | None, held_out: float, seed: int) -> list[Prompt]:
    """Those of a file or of the demo, each with a split; ``count`` of each split."""
    if file is None:
        texts = {TRAIN: training_prompts(), TEST: held_out_prompts()}
        prompts = [Prompt(text, split) for split, of_split in texts.items() for text in of_split]
    else:
        prompts = read_prompts(file)
        if prompts[0].split is None:
            if len(prompts) < 2:
                raise ValueError(f"--prompts must be at least two, one to train on and one to test, got {len(prompts)}")
            # By the text: more prompts in the file leave those that were held out where they were.
            order = sorted(range(len(prompts)), key=lambda i: _hash([seed, prompts[i].text]))
            test = set(order[: max(1, min(round(held_out * len(prompts)), len(prompts) - 1))])
            prompts = [replace(p, split=TEST if i in test else TRAIN) for i, p in enumerate(prompts)]
    by_split = [[prompt for prompt in prompts if prompt.split == split] for split in (TRAIN, TEST)]
    if not all(by_split):
        raise ValueError(f"--prompts must have prompts of the split train and of test, {file} has those of one")
    if count is not None:
        by_split = [spread(of_split, count) for of_split in by_split]
    return [prompt for of_split in by_split for prompt in of_split]


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tokenizers with the same tokens have in common."""
    return _hash(sorted(tokenizer.get_vocab().items()))[:16]


def check_backbone(name: str, flag: str, adapters: Adapters | None) -> Path:
    """Where a backbone is, if the value model runs its architecture, and it reads text alone and has the layers.

    Raises:
        ValueError, OSError: it does not, or there is none; by the flag's name.
    """
    path = locate(flag, name)
    config = AutoConfig.from_pretrained(**source_of(path))
    try:
        facts = ValueModelConfig.from_hf(config)
    except ValueError as error:
        other = "--kind trunk is for every base model"
        raise ValueError(f"{flag} must be of an architecture that the value model runs ({other}): {error}") from error
    if facts.vision is not None:
        raise ValueError(f"{flag} must be a model of text to be trained, {name!r} is a {config.model_type}")
    if adapters is not None and adapters.first_layer >= facts.num_layers:
        raise ValueError(
            f"--first-layer must be below the {facts.num_layers} layers of {name!r}, got {adapters.first_layer}"
        )
    return path


def check_trunk(name: str, layers: tuple[int, ...] | None) -> Path:
    """Where a base model is, if it has the layers that a trunk is to read.

    Raises:
        ValueError, OSError: it does not, or there is none; by the flag's name.
    """
    path = locate("BASE", name)
    count = AutoConfig.from_pretrained(**source_of(path)).get_text_config().num_hidden_layers
    if layers is not None and max(layers) > count:
        raise ValueError(f"--layers must be at most the {count} layers of {name!r}, got {max(layers)}")
    return path


def collect_stage(
    how: Collecting, base: str, folder: Path, *, seed: int, value: str | None = None, url: str | None = None
) -> AnswerStore:
    """Make the answers that a directory lacks.

    Args:
        how: what is sampled.
        base: the base model.
        folder: gets the answers.
        seed: of everything that is drawn.
        value: a value model that guides.
        url: of a server that answers.
    """
    quiet()
    path = locate("BASE", base)
    tokenizer = load_tokenizer("BASE", path)
    if how.chat and tokenizer.chat_template is None:
        raise ValueError(f"BASE must have a chat template, {base!r} has none; --plain-prompts does without")
    server = None if url is None else Server.find("--url", url)
    plan = collecting.Plan(
        base=base,
        value=value,
        prompts=how.prompts,
        samples=how.answers_per_prompt,
        max_new_tokens=how.max_new_tokens,
        targets=None if value is None else how.targets,
        sampling=how.sampling,
        seed=seed,
        rows=how.rows,
        dtype=how.dtype,
        engine=None if server is None else server.engine,
    )
    ids = tokens_of(tokenizer, [prompt.text for prompt in how.prompts], chat=how.chat)
    described = {**plan.described(ids), "vocabulary": vocabulary(tokenizer)}
    store = AnswerStore(folder, described)
    if all(request.key in store.answers for request in plan.requests()):
        return store
    in_process = value if server is None and value is not None else "none"
    models = Models.load(
        base, in_process, device=how.device, dtype=getattr(torch, how.dtype), names=("BASE", "--value")
    )
    if not models.eos_token_ids:
        raise ValueError("BASE must have an eos_token_id in its generation_config, got none")
    collecting.collect(plan, store, models, server, workers=how.concurrency)
    return store


@dataclass(frozen=True)
class Fitting:
    """How a value model is fitted; fields are the flags of ``lenvm fit --kind value-model``."""

    adapters: Adapters | None
    gamma: float | None
    schedule: Schedule
    checkpointing: bool
    dtype: str
    on_cpu: bool
    save_seconds: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> Fitting:
        """Check; the device sizes rows and forwards.

        Raises:
            ValueError: a flag that does not fit, by name.
        """
        gamma = _gamma(args.gamma)
        if args.device not in ("cpu", "cuda"):  # each process takes the GPU of its number
            raise ValueError(f"--device must be cpu or cuda where something is trained, got {args.device!r}")
        if args.dtype == "float16":
            raise ValueError("--dtype must be float32 or bfloat16 where something is trained, got 'float16'")
        if args.epochs < 0:
            raise ValueError(f"--epochs must be at least 0, got {args.epochs}")
        if args.first_layer < 0:
            raise ValueError(f"--first-layer must be at least 0, got {args.first_layer}")
        on_cpu = args.device == "cpu"
        schedule = Schedule(
            epochs=args.epochs,
            learning_rate=args.learning_rate,
            head_learning_rate=args.head_learning_rate,
            batch_tokens=args.batch_tokens,
            row_tokens=args.row_tokens or (512 if on_cpu else 4096),
            forward_tokens=args.forward_tokens or (1536 if on_cpu else 16384),
            seed=args.seed,
        )
        adapters = None if args.full else Adapters(args.adapters, args.first_layer)
        return cls(adapters, gamma, schedule, args.checkpointing, args.dtype, on_cpu, args.save_seconds)


def fit_stage(
    how: Fitting, backbone: str, folders: list[Path], output: Path, *, initial: Path | None = None, command: str
) -> dict[str, Any]:
    """Train a value model on the answers of directories, unless it is there, and return its report.

    Args:
        how: the training.
        backbone: of the value model.
        folders: of :func:`collect_stage`, one a round.
        output: gets ``value``, ``adapter`` and ``report.json``.
        initial: adapters to go on from.
        command: for the report.

    Raises:
        ValueError: answers of another vocabulary, or as :class:`Training`.
    """
    quiet()
    path = check_backbone(backbone, "BACKBONE", how.adapters)
    tokenizer = load_tokenizer("BACKBONE", path)
    stores = _opened(folders, backbone, tokenizer)
    gamma = how.gamma
    if gamma is None and initial is not None:
        gamma = LenVMConfig.read(initial).gamma
    if gamma is None:
        gamma = gamma_of([answer for store in stores for answer in store.of_split(TRAIN)])
    training = [split_of(store, TRAIN, gamma) for store in stores]
    test = [split_of(store, TEST, gamma) for store in stores]
    examples = [example for split in training for example in split.examples]
    if not examples:
        raise ValueError("--answers must have answers to training prompts, got none")
    plan = {
        "backbone": backbone,
        "answers": [_hash([asdict(answer) for answer in split.answers])[:16] for split in training],
        "initial": None if initial is None else str(initial),
        "gamma": gamma,
        "adapters": None if how.adapters is None else asdict(how.adapters),
        "schedule": asdict(how.schedule),
        "dtype": how.dtype,
    }
    if (report := _report_of(output, plan)) is not None:
        return report

    began = time.monotonic()
    accelerator = Accelerator(cpu=how.on_cpu)
    torch.manual_seed(how.schedule.seed)
    network = ValueNetwork.load(path, how.adapters, getattr(torch, how.dtype), checkpointing=how.checkpointing)
    if not (output / STATE_FILE).exists():  # which has what is measured here
        standardise(network, examples, how.schedule, accelerator)
    measured = Measured(folders, test, gamma)

    def predicted(split: Split) -> list[torch.Tensor]:
        return values_of(network, split.examples, how.schedule, accelerator)

    mean = torch.cat([example.targets for example in examples]).mean()
    measured.add(CONSTANT, lambda split: [mean.expand_as(example.targets) for example in split.examples])
    if initial is not None:
        network.to(accelerator.device).take(initial)
        if how.schedule.epochs:
            measured.add(INITIAL, predicted)
    run = Training(network, examples, how.schedule, output, plan, accelerator, save_seconds=how.save_seconds)
    run.run()
    measured.add(FITTED, predicted)

    report = {}
    if accelerator.is_main_process:
        write(network, path, tokenizer, gamma, output)
        training_of_it = {
            "answers": len(examples),
            "states": sum(len(example.targets) for example in examples),
            "steps": len(run.losses),
            "mean squared error": means(run.losses, 50),
            "parameters": sum(parameter.numel() for parameter in network.trained().values()),
        }
        of_run = dict(command=command, began=began, device=accelerator.device, plan=plan, training=training_of_it)
        report = _written(output, measured, stores, **of_run)
        run.done()
    accelerator.wait_for_everyone()
    return report


@dataclass(frozen=True)
class TrunkFitting:
    """How a trunk is fitted; fields are the flags of ``lenvm fit``."""

    layers: tuple[int, ...] | None
    gamma: float | None
    states: int
    schedule: TrunkSchedule
    forward_tokens: int
    device: str
    dtype: str
    seed: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> TrunkFitting:
        """Check.

        Raises:
            ValueError: a flag that does not fit, by name.
        """
        if args.epochs < 1:
            raise ValueError(f"--epochs must be at least 1 with --kind trunk, got {args.epochs}")
        return cls(
            layers=None if args.layers is None else tuple(args.layers),
            gamma=_gamma(args.gamma),
            states=args.states,
            schedule=TrunkSchedule(args.epochs, args.learning_rate, args.batch_tokens),
            forward_tokens=args.forward_tokens or (1536 if args.device == "cpu" else 16384),
            device=args.device,
            dtype=args.dtype,
            seed=args.seed,
        )


def fit_trunk_stage(how: TrunkFitting, base: str, folders: list[Path], output: Path, *, command: str) -> dict[str, Any]:
    """Fit a trunk to the answers of directories, unless it is there, and return its report.

    Args:
        how: the training.
        base: the base model, whose answers they are.
        folders: of :func:`collect_stage`, one a round.
        output: gets ``value`` and ``report.json``.
        command: for the report.

    Raises:
        ValueError: answers of another vocabulary, or layers that the base model does not have.
    """
    quiet()
    path = check_trunk(base, how.layers)
    stores = _opened(folders, base, load_tokenizer("BASE", path))
    of_split = {split: [store.of_split(split) for store in stores] for split in (TRAIN, TEST)}
    answered = [
        (store.prompts[answer.prompt]["ids"], answer)
        for store, answers in zip(stores, of_split[TRAIN], strict=True)
        for answer in answers
    ]
    chooses = torch.tensor([answer.prompt % CHOOSES == CHOOSES - 1 for _, answer in answered])
    valued = [bool(tokens_valued(answer)) for _, answer in answered]
    if not (torch.tensor(valued) & ~chooses).any():
        raise ValueError("--answers must have answers to training prompts, got none of two tokens or more")
    gamma = gamma_of([answer for _, answer in answered]) if how.gamma is None else how.gamma
    plan = {
        "kind": "trunk",
        "base": base,
        "answers": [_hash([asdict(answer) for answer in answers])[:16] for answers in of_split[TRAIN]],
        "gamma": gamma,
        "layers": how.layers,
        "states": how.states,
        "schedule": asdict(how.schedule),
        "dtype": how.dtype,
        "seed": how.seed,
    }
    plan = json.loads(json.dumps(plan))  # as the report has it
    if (report := _report_of(output, plan)) is not None:
        return report

    began = time.monotonic()
    models = Models.load(base, NONE, device=how.device, dtype=getattr(torch, how.dtype), names=("BASE", "--value"))
    torch.manual_seed(how.seed)
    num_layers, embedding = models.of_trunk()
    edges = edges_of(max(len(answer.ids) for _, answer in answered))
    config = config_of(models, base, how.layers or (num_layers,), edges)
    of_rows: dict[str, Any] = dict(most=how.states, forward_tokens=how.forward_tokens)
    rows = rows_of(models, config.layers, answered, **of_rows)
    is_training = ~chooses[rows.answers]
    training = rows.of(is_training)
    head = TrunkHead(training.states[torch.randperm(len(training))[:STANDARDISED]], embedding, len(edges) - 1)
    head.to(how.device)
    losses = fit_trunk(head, training, rows.of(~is_training), embedding, edges, how.schedule)
    write_trunk(config, head.tensors(), gamma, output / VALUE)

    splits = [split_of(store, TEST, gamma, of_prompts=False) for store in stores]
    measured = Measured(folders, splits, gamma)
    mean = 1 - gamma ** training.remaining[~training.is_cut]
    measured.add(CONSTANT, lambda split: [mean.mean().expand_as(example.targets) for example in split.examples])

    def predicted(split: Split) -> list[torch.Tensor]:
        of_answers = [(example.prompt, answer) for example, answer in zip(split.examples, split.answers, strict=True)]
        found = rows_of(models, config.layers, of_answers, most=sys.maxsize, forward_tokens=how.forward_tokens)
        values = trunk_values_of(head, found, embedding, edges, gamma)
        return list(values.split(torch.bincount(found.answers, minlength=len(of_answers)).tolist()))

    measured.add(TRUNK, predicted)
    of_training = {
        "answers": len(answered),
        "states": len(training),
        "negative log-likelihood": losses,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }
    of_run = dict(command=command, began=began, device=how.device, plan=plan, training=of_training)
    return _written(output, measured, stores, **of_run)


def _gamma(text: str) -> float | None:
    """Of ``--gamma``; None: of the answers."""
    if text == "auto":
        return None
    with suppress(ValueError):
        if 0 < (gamma := float(text)) < 1:
            return gamma
    raise ValueError(f"--gamma must be auto or a number in (0, 1), got {text!r}")


def _opened(folders: list[Path], model: str, tokenizer: PreTrainedTokenizerBase) -> list[AnswerStore]:
    """The answers of directories, if their tokens are those of the model."""
    stores = [AnswerStore.open(folder, "--answers") for folder in folders]
    for folder, store in zip(folders, stores, strict=True):
        if store.plan["vocabulary"] != vocabulary(tokenizer):
            raise ValueError(
                f"BASE must have the vocabulary of the base model {store.plan['base']!r} that answered in "
                f"{str(folder)!r}, {model!r} has another"
            )
    return stores


def _report_of(output: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """That of a training which has been done, if it was this one."""
    if not (output / REPORT).exists():
        return None
    report = json.loads((output / REPORT).read_text(encoding="utf-8"))
    check_plan(plan, report["plan"], output)
    return report


def _written(
    output: Path,
    measured: Measured,
    stores: list[AnswerStore],
    *,
    command: str,
    began: float,
    device: Any,
    plan: dict[str, Any],
    training: dict[str, Any],
) -> dict[str, Any]:
    """The report of a training that began then, in its file."""
    guided = [store.plan.get("targets") is not None for store in stores]
    report = {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "device": str(device),
        "plan": plan,
        "training": training,
        "guided": dict(zip(map(str, measured.folders), guided, strict=True)),
        "test": measured.found,
    }
    (output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
