"""What guided steps tell SGLang's host processes: metrics beside its own, and predicted lengths for its responses.

Both travel as the engine's auxiliary output: tensors that the scheduler copies to the host together with the sampled
tokens, and looks at when those have arrived. So nothing here makes anybody wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.adapters.metrics import BROKEN, STATUS_NAMES, Metrics
from lenvm_kernels.types import Status

if TYPE_CHECKING:
    from sglang.srt.managers.auxiliary_output import CommittedTokens
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Keys of a response's meta_info.
REMAINING_LENGTHS, OUTPUT_LENGTH = "predicted_remaining_lengths", "predicted_output_length"


@dataclass(frozen=True)
class StepReport:
    """What one step tells the host (an auxiliary output of the engine, on the device or already copied).

    Attributes:
        status: int8 ``[B, N]``; a :class:`Status` for each of N tokens.
        lost_mass: fp32 ``[B, N]``, likewise.
        broken: bool ``[B]``; rows that lost guidance in this step (``GuidanceTable.faults``); None without metrics.
        remaining_lengths: fp32 ``[B, N]``; predicted after each token, NaN where not asked for; None when nobody asks.
        prompt_lengths: fp32 ``[B]``; predicted for each prompt, likewise.
        metrics: of the process, or None.
        milliseconds: of the value model's work.
        is_verified: the tokens are drafts that were accepted, and the one after them.
    """

    status: torch.Tensor
    lost_mass: torch.Tensor
    broken: torch.Tensor | None
    remaining_lengths: torch.Tensor | None
    prompt_lengths: torch.Tensor | None
    metrics: Metrics | None
    milliseconds: Callable[[], float]
    is_verified: bool = False

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepReport:
        """As SGLang's ``DeviceAuxiliaryOutput``."""
        copies: dict[str, Any] = {name: copy_tensor(x) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **copies)

    def consume(self, batch: ScheduleBatch, commits: Sequence[CommittedTokens | None]) -> None:
        """As SGLang's ``HostAuxiliaryOutput``: the tensors have arrived. Rows without a commit were drawn in vain."""
        committed = {i: commit for i, commit in enumerate(commits) if commit is not None}
        if self.metrics is not None:
            self._count(self.metrics, batch, {i: len(commit.token_ids) for i, commit in committed.items()})
        prompt_lengths = None if self.prompt_lengths is None else self.prompt_lengths[:, None]
        for lengths, key in ((prompt_lengths, OUTPUT_LENGTH), (self.remaining_lengths, REMAINING_LENGTHS)):
            if lengths is None:
                continue
            numbers = lengths.tolist()
            for i, commit in committed.items():
                first = commit.output_index
                for j, number in enumerate(numbers[i][: len(commit.token_ids)]):
                    if math.isfinite(number) and (key == REMAINING_LENGTHS or first == 0):
                        _append(batch.reqs[i], key, first + j, number)

    def _count(self, metrics: Metrics, batch: ScheduleBatch, committed: Mapping[int, int]) -> None:
        assert self.broken is not None  # there are metrics
        status, lost_mass, broken = self.status.tolist(), self.lost_mass.tolist(), self.broken.tolist()
        metrics.value_model_milliseconds.inc(self.milliseconds())
        for i, count in committed.items():
            for j in range(count):
                metrics.rows[BROKEN if broken[i] else STATUS_NAMES[status[i][j]]].inc()
                if status[i][j] != Status.UNGUIDED:
                    metrics.lost_mass.inc(lost_mass[i][j])
            if self.is_verified:
                guided = "no" if batch.reqs[i].lenvm_guidance is None else "yes"
                metrics.verifications[guided].inc()
                metrics.verified_tokens[guided].inc(count)


def _append(req: Req, key: str, index: int, length: float) -> None:
    """Give a request's response a number for the output token of this index; None for tokens without."""
    if req.customized_info is None:
        req.customized_info = {}
    numbers = req.customized_info.setdefault(key, [])
    numbers.extend([None] * (index - len(numbers)))
    numbers.append(round(length, 3))


def without_empty_keys(
    original: Callable,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list],
    index: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``: else every request of a batch has the keys of all."""

    def says_nothing(key: str) -> bool:
        ours = key in (REMAINING_LENGTHS, OUTPUT_LENGTH) and key not in state.customized_info_accumulated
        return ours and all(number is None for number in customized_info[key][index])

    customized_info = {key: values for key, values in customized_info.items() if not says_nothing(key)}
    original(manager, meta_info, state, customized_info, index, *args, **kwargs)
