"""Training: the loop, its state on disk, and values of answers."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from lenvm_kernels.evaluate.resumable_lines import check_plan
from lenvm_kernels.training.network import ValueNetwork
from lenvm_kernels.training.packs import Example, Row, filled, pack, tokens_of

STATE_FILE = "state.pt"
# States that the standardisation is measured on, at least.
MEASURED_STATES = 16384

Forward = list[Row]
# What each process does before the weights change.
Step = list[list[Forward]]


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and in which portions.

    Attributes:
        epochs: times that every answer is seen.
        learning_rate: the highest, of the backbone or its adapters; it rises over the first ``warm_up`` steps and falls
            to 0 as a cosine.
        head_learning_rate: the same of the head.
        batch_tokens: of a step of the optimizer, all processes together.
        row_tokens: of a row of :class:`lenvm_kernels.training.packs.Pack`. Attention takes their square.
        forward_tokens: of a forward, at least one row.
        warm_up: share of all steps.
        seed: of the order of answers and of the head.
    """

    epochs: int
    learning_rate: float
    head_learning_rate: float
    batch_tokens: int
    row_tokens: int
    forward_tokens: int
    warm_up: float = 0.03
    seed: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The share of the highest rates at a step, the first one 0."""
        warm_up = max(1, math.ceil(self.warm_up * steps))
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (steps - warm_up + 1)))


def steps_of(examples: Sequence[Example], schedule: Schedule, processes: int = 1) -> list[Step]:
    """Every step of a training.

    Rows of a forward have nearly the same length, and all processes make as many forwards: some may have no row.
    """
    steps = []
    for epoch in range(schedule.epochs):
        rows = filled(examples, schedule.row_tokens, schedule.seed + epoch)
        lengths = [tokens_of(examples, row) for row in rows]
        batch: list[int] = []
        batches, total = [batch], 0
        for index, length in enumerate(lengths):
            if batch and total + length > schedule.batch_tokens:
                batch, total = [], 0
                batches.append(batch)
            batch.append(index)
            total += length
        for batch in batches:
            steps.append(_forwards([(lengths[i], rows[i]) for i in batch], schedule.forward_tokens, processes))
    return steps


def _forwards(rows: list[tuple[int, Row]], most_tokens: int, processes: int) -> Step:
    """Deal rows, each with its length, to forwards of at most so many tokens, padding counted."""
    rows = sorted(rows, key=lambda row: -row[0])
    forwards: list[Forward] = []
    while rows:
        count = max(1, most_tokens // rows[0][0])
        # Enough forwards for all processes, if there are enough rows.
        count = min(count, max(1, math.ceil(len(rows) / max(1, processes - len(forwards)))))
        forwards.append([row for _, row in rows[:count]])
        rows = rows[count:]
    of_process = [forwards[i::processes] for i in range(processes)]
    most = max(map(len, of_process))
    return [found + [[]] * (most - len(found)) for found in of_process]


class Training:
    """A training that may be ended and gone on with.

    Args:
        network: what is trained, in place.
        examples: what it is trained on.
        schedule: how.
        folder: gets the state; an existing one is gone on with.
        plan: all that decides what comes of the training; the state of another one is refused.
        accelerator: places the network and adds gradients of several processes.
        save_seconds: between two writings of the state.

    Raises:
        ValueError: the folder has the state of another plan.
    """

    def __init__(
        self,
        network: ValueNetwork,
        examples: Sequence[Example],
        schedule: Schedule,
        folder: Path,
        plan: dict[str, Any],
        accelerator: Accelerator,
        *,
        save_seconds: float = 300,
    ) -> None:
        self._examples, self._schedule, self._accelerator = examples, schedule, accelerator
        self._file, self._plan, self._save_seconds = folder / STATE_FILE, plan, save_seconds
        self._steps = steps_of(examples, schedule, accelerator.num_processes)
        self.losses: list[float] = []
        self._network = network
        head = list(network.head.parameters())
        body = [parameter for name, parameter in network.trained().items() if not name.startswith("head.")]
        groups = [
            {"params": body, "highest": schedule.learning_rate},
            {"params": head, "highest": schedule.head_learning_rate},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self._module, self._optimizer = accelerator.prepare(network, optimizer)
        if self._file.exists():
            self._load()

    def run(self) -> None:
        """Train to the end. Ctrl-C ends it after the step that is under way, with the state written.

        Raises:
            ValueError: a loss or a gradient is not finite; the state is that of the last writing before.
            KeyboardInterrupt: the run goes on from here the next time.
        """
        self._module.train()
        saved, steps = time.monotonic(), len(self._steps)
        main = self._accelerator.is_main_process
        with (
            tqdm(total=steps, initial=len(self.losses), unit="step", desc="fit", disable=not main) as bar,
            _interrupt_deferred() as interrupted,
        ):
            while len(self.losses) < steps:
                self.losses.append(self._step(len(self.losses)))
                bar.update()
                bar.set_postfix(loss=f"{sum(self.losses[-50:]) / len(self.losses[-50:]):.5f}")
                ends, is_due = self._any(interrupted(), time.monotonic() - saved > self._save_seconds)
                if ends or is_due:
                    self._save()
                    saved = time.monotonic()
                if ends:
                    raise KeyboardInterrupt

    def _step(self, number: int) -> float:
        """One step of the optimizer; the mean squared error before it."""
        accelerator, schedule = self._accelerator, self._schedule
        forwards = self._steps[number]
        states = sum(
            len(self._examples[index].targets)
            for of_process in forwards
            for rows in of_process
            for row in rows
            for group in row
            for index in group
        )
        rate = schedule.rate(number, len(self._steps))
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * rate
        total = torch.zeros((), device=accelerator.device)
        mine = forwards[accelerator.process_index]
        for i, rows in enumerate(mine):
            is_last = i == len(mine) - 1
            with nullcontext() if is_last else accelerator.no_sync(self._module):
                # A process without rows left takes part with a weight of 0.
                made = pack(self._examples, rows or [self._some_row()]).to(accelerator.device)
                error = (self._module(made).sigmoid() - made.targets).square().sum() * bool(rows) / states
                accelerator.backward(error * accelerator.num_processes)  # which averages over processes
            total += error.detach()
        loss = float(accelerator.reduce(total, "sum"))
        norm = accelerator.clip_grad_norm_(self._module.parameters(), 1.0)
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            raise ValueError(
                f"the loss of step {number + 1} is {loss} and its gradient {float(norm)}; {self._file} keeps the last "
                "good state, and a lower --learning-rate in a new --output may help"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _any(self, *flags: bool) -> list[bool]:
        """Each flag, set if it is in one of the processes: they save together."""
        if self._accelerator.num_processes == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.float32, device=self._accelerator.device)
        return (self._accelerator.reduce(found, "sum") > 0).tolist()

    def _some_row(self) -> Row:
        return [[min(range(len(self._examples)), key=lambda i: tokens_of(self._examples, [[i]]))]]

    def _save(self) -> None:
        """Write the state under another name first: a full disk or a kill leaves the one that was there."""
        if self._accelerator.is_main_process:
            state = {
                "plan": json.dumps(self._plan),
                "losses": self.losses,
                "trained": self._network.trained(),
                "buffers": dict(self._network.head.named_buffers()),
                "optimizer": self._optimizer.state_dict(),
            }
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            try:
                torch.save(state, new)
            except RuntimeError as error:  # as torch says of a disk that is full
                new.unlink(missing_ok=True)
                raise OSError(f"{new} could not be written: {error}") from error
            os.replace(new, self._file)
        self._accelerator.wait_for_everyone()

    def _load(self) -> None:
        state = torch.load(self._file, map_location=self._accelerator.device, weights_only=True)
        check_plan(self._plan, json.loads(state["plan"]), self._file)
        with torch.no_grad():
            for name, parameter in self._network.trained().items():
                parameter.copy_(state["trained"][name])
            for name, buffer in self._network.head.named_buffers():
                buffer.copy_(state["buffers"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses = list(state["losses"])

    def done(self) -> None:
        """The state is no longer needed."""
        if self._accelerator.is_main_process:
            self._file.unlink(missing_ok=True)


def standardise(
    network: ValueNetwork, examples: Sequence[Example], schedule: Schedule, accelerator: Accelerator
) -> None:
    """Measure the states of the backbone as it is, and the mean target, on answers drawn by the seed."""
    rows = filled(examples, schedule.row_tokens, schedule.seed)
    found: list[torch.Tensor] = []
    network.to(accelerator.device)
    count = 0
    for row in rows:
        with torch.no_grad():
            found.append(network.states(pack(examples, [row]).to(accelerator.device)).float())
        count += len(found[-1])
        if count >= MEASURED_STATES:
            break
    mean = float(torch.cat([example.targets for example in examples]).mean())
    network.head.standardise(torch.cat(found), mean)


@torch.no_grad()
def values_of(
    network: ValueNetwork, examples: Sequence[Example], schedule: Schedule, accelerator: Accelerator
) -> list[torch.Tensor]:
    """The predicted values of every state of answers that has a target; processes share the work."""
    network.eval()
    rows = [(tokens_of(examples, row), row) for row in filled(examples, schedule.row_tokens)]
    mine = _forwards(rows, schedule.forward_tokens, accelerator.num_processes)[accelerator.process_index]
    found: dict[int, torch.Tensor] = {}
    for forward in tqdm(mine, desc="measure", unit="forward", disable=not accelerator.is_main_process):
        if forward:
            made = pack(examples, forward)
            values = network(made.to(accelerator.device)).sigmoid().cpu()
            found |= {index: values[made.examples == index] for index in made.examples.unique().tolist()}
    everywhere = {index: values for of_process in gather_object([found]) for index, values in of_process.items()}
    return [everywhere[index] for index in range(len(examples))]


@contextmanager
def _interrupt_deferred() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; a second time it ends at once."""
    pressed = False

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
