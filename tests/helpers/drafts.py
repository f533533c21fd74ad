"""Drafts for the tests of operators on drafts."""

import torch

from lenvm_kernels.fuzz.ops._inputs import apart
from lenvm_kernels.types import Drafts

LARGEST = 2**31 - 1


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_drafts(token_ids, parents, *, dtype=torch.int64, device="cpu"):
    """Drafts in strided rows; the stride of the parents is larger than the stride of the tokens."""
    token_ids, parents = torch.as_tensor(token_ids, dtype=dtype), torch.as_tensor(parents, dtype=torch.int32)
    return Drafts(apart(token_ids.to(device), 3), apart(parents.to(device), 4))
