"""Answers laid out for a forward: those of a prompt share it, and several prompts share a row."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

# Rows that are looked at for a group that may still fit.
OPEN_ROWS = 64

# Answers to one prompt, by their indices in a list of examples.
Group = list[int]
Row = list[Group]


@dataclass(frozen=True)
class Example:
    """An answer with what its states are to predict.

    Attributes:
        prompt: the tokens of its prompt.
        ids: the tokens of the answer. The last one is not read: nothing is drawn after it.
        targets: fp32 ``[T]``, at least one and at most ``len(ids)``; the values of the last ``T`` of the states after
            the prompt and after each token but the last.
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    targets: torch.Tensor


@dataclass(frozen=True)
class Pack:
    """``N`` rows of ``L`` tokens: of each prompt the tokens once, then its answers' one after the other.

    Attributes:
        ids: int64 ``[N, L]``; 0 behind the end of a row.
        positions: int64 ``[N, L]``; of an answer they go on from its prompt's last one.
        groups: int64 ``[N, L]``; tokens see those of their own group alone (what stands behind the end is one, too),
        branches: int64 ``[N, L]``; and of it the prompt (branch 0) and their own answer.
        states: int64 ``[T]``; the tokens after which there is a value to predict, counted through all rows. The last
            one of a prompt counts once for each answer.
        targets: fp32 ``[T]``; the values.
        examples: int64 ``[T]``; which of all examples each is of.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor
    branches: torch.Tensor
    states: torch.Tensor
    targets: torch.Tensor
    examples: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Which tokens (columns) a token (row) of a row sees: bool ``[N, 1, L, L]``."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        same_group = self.groups[:, :, None] == self.groups[:, None, :]
        same_branch = self.branches[:, :, None] == self.branches[:, None, :]
        of_prompt = self.branches[:, None, :] == 0
        return (same_group & (of_prompt | same_branch) & (place[:, None] >= place[None, :]))[:, None]

    def to(self, device: torch.device) -> Pack:
        """A copy on a device."""
        return Pack(*(getattr(self, field.name).to(device) for field in fields(self)))


def grouped(examples: Sequence[Example], most_tokens: int) -> list[Group]:
    """Indices of examples with the same prompt, in their order, together as long as they fit.

    Args:
        examples: those of a prompt need not be neighbours.
        most_tokens: of a group, its prompt counted once; one that is longer by itself stands alone.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, example in enumerate(examples):
        by_prompt.setdefault(tuple(example.prompt), []).append(index)
    found = []
    for prompt, members in by_prompt.items():
        group: Group = []
        length = len(prompt)
        for index in members:
            more = len(examples[index].ids) - 1
            if group and length + more > most_tokens:
                found.append(group)
                group, length = [], len(prompt)
            group.append(index)
            length += more
        found.append(group)
    return found


def filled(examples: Sequence[Example], most_tokens: int, seed: int | None = None) -> list[Row]:
    """Rows of groups, each group in the fullest row that it fits; shuffled first, by a seed if there is one."""
    groups = grouped(examples, most_tokens)
    if seed is not None:
        random.Random(seed).shuffle(groups)
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # of rows that are not full: tokens left, and the row
    for group in groups:
        tokens = tokens_of(examples, [group])
        fitting = [entry for entry in room if entry[0] >= tokens]
        if fitting:
            left, row = min(fitting)
            room.remove((left, row))
        else:
            left, row = most_tokens, len(rows)
            rows.append([])
        rows[row].append(group)
        room = [*room, (left - tokens, row)][-OPEN_ROWS:]
    return rows


def tokens_of(examples: Sequence[Example], groups: Iterable[Group]) -> int:
    """How many tokens groups take in a row."""
    return sum(
        len(examples[group[0]].prompt) + sum(len(examples[index].ids) - 1 for index in group) for group in groups
    )


def pack(examples: Sequence[Example], rows: Sequence[Row]) -> Pack:
    """Lay out the groups of some rows."""
    width = max(tokens_of(examples, row) for row in rows)
    columns: list[list[list[int]]] = [[], [], [], []]
    states, targets, members = [], [], []
    for number, row in enumerate(rows):
        ids: list[int] = []
        positions: list[int] = []
        group_of: list[int] = []
        branches: list[int] = []
        for group_number, group in enumerate(row):
            prompt = examples[group[0]].prompt
            last = len(ids) + len(prompt) - 1
            ids += prompt
            positions += range(len(prompt))
            branches += [0] * len(prompt)
            for branch, index in enumerate(group, start=1):
                read = list(examples[index].ids[:-1])
                values = examples[index].targets
                places = (last, *range(len(ids), len(ids) + len(read)))
                states += [number * width + place for place in places[-len(values) :]]
                targets.append(values)
                members += [index] * len(values)
                ids += read
                positions += range(len(prompt), len(prompt) + len(read))
                branches += [branch] * len(read)
            group_of += [group_number] * (len(ids) - len(group_of))
        padding = width - len(ids)
        for column, found, fill in zip(columns, (ids, positions, group_of, branches), (0, 0, -1, 0), strict=True):
            column.append(found + [fill] * padding)
    ids_, positions_, groups_, branches_ = map(torch.tensor, columns)
    states_, targets_, members_ = torch.tensor(states), torch.cat(targets), torch.tensor(members)
    return Pack(ids_, positions_, groups_, branches_, states_, targets_, members_)
