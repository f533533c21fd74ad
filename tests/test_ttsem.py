"""ttsem, which runs the operators' property tests as compiled TTIR (``make races``), finds planted faults."""

import sys

import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.races,
    pytest.mark.skipif("ttsem" not in sys.modules, reason="needs python -m ttsem.sanitize pytest"),
]


@triton.jit
def _shift_kernel(x_ptr, distance, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i + distance, tl.load(x_ptr + i, mask=i < N), mask=i < N)


def test_a_sound_kernel(device):
    x = torch.arange(8.0, device=device)
    _shift_kernel[(2,)](x, 0, 8, 4)
    assert x.cpu().tolist() == list(range(8))


def test_planted_race_between_programs(device):
    """The first program stores an element that the second loads."""
    with pytest.raises(Exception, match=r"program instances .* both touch element 4 of `x_ptr`"):
        _shift_kernel[(2,)](torch.arange(16.0, device=device), 3, 8, 4)


def test_planted_access_out_of_bounds(device):
    with pytest.raises(Exception, match="past the end of the tensor passed as `x_ptr`"):
        _shift_kernel[(1,)](torch.arange(8.0, device=device), 4, 8, 8)
