"""Drafts for the tests of the operators that take some."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lenvm_kernels.types import Drafts

BACKENDS = ["triton", "reference"]
LARGEST = 2**31 - 1


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def apart(x, more):
    """The same numbers in a larger tensor, with more memory before, between and after its rows."""
    memory = torch.full((x.shape[0] + 2, x.shape[1] + more), 2, dtype=x.dtype, device=x.device)
    return memory[1:-1, 1 : 1 + x.shape[1]].copy_(x)


def make_drafts(token_ids, parents, *, dtype=torch.int64, device="cpu"):
    """Drafts in rows that are apart, those of the parents farther than those of the tokens."""
    token_ids, parents = torch.as_tensor(token_ids, dtype=dtype), torch.as_tensor(parents, dtype=torch.int32)
    return Drafts(apart(token_ids.to(device), 3), apart(parents.to(device), 4))


def random_drafts(requests, columns, *, seed=0, tokens=5, device="cpu"):
    """Trees of few tokens; in some parents that are none, or absent drafts with others after them."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, tokens, (requests, columns), generator=generator)
    token_ids[torch.rand(requests, columns, generator=generator) < 0.3 / columns] = -1
    parents = torch.randint(0, 2**30, (requests, columns), generator=generator) % (torch.arange(columns) + 1) - 1
    parents[torch.rand(requests, columns, generator=generator) < 0.1] = columns - 1
    return make_drafts(token_ids, parents, device=device)


def listed(drafts):
    """(token, number of its parent's node) of each draft that is there, request by request."""
    found = []
    for token_ids, parents in zip(drafts.token_ids.tolist(), drafts.parents.tolist(), strict=True):
        found.append([])
        for j, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if token < 0:
                break
            found[-1].append((token, parent + 1 if parent in range(j) else 0))
    return found


def assert_refuses_drafts(function, drafts, message_of_rows):
    """``function(drafts)`` works; of wrong drafts it says what is wrong. ``message_of_rows``: of twice the requests."""
    function(drafts)
    requests, columns = drafts.token_ids.shape
    sizes = rf"int32 \[{requests}, {columns}\] on cpu"
    for wrong, error, message in (
        (tuple(drafts), TypeError, "drafts must be Drafts, got tuple"),
        (None, TypeError, "drafts must be Drafts, got NoneType"),
        (drafts._replace(token_ids=[[1]]), TypeError, r"drafts.token_ids must be a tensor int32\|int64 .*, got list"),
        (drafts._replace(token_ids=drafts.token_ids.float()), ValueError, r"drafts.token_ids must be .*, got float32 "),
        (drafts._replace(token_ids=drafts.token_ids[0]), ValueError, r"drafts.token_ids must be .* \[\*, \*\]"),
        (Drafts(*(x[:, :0] for x in drafts)), ValueError, "drafts.token_ids must have at least one column, got none"),
        (
            drafts._replace(token_ids=torch.stack([drafts.token_ids] * 2, dim=-1)[..., 0]),
            ValueError,
            "drafts.token_ids must be contiguous in its last dimension",
        ),
        (drafts._replace(parents=drafts.parents.tolist()), TypeError, "drafts.parents must be a tensor int32 .* list"),
        (drafts._replace(parents=drafts.parents.long()), ValueError, f"drafts.parents must be {sizes}, got int64"),
        (drafts._replace(parents=drafts.parents[:-1]), ValueError, f"drafts.parents must be {sizes}, got int32"),
        (drafts._replace(parents=drafts.parents[:, 1:]), ValueError, f"drafts.parents must be {sizes}, got int32"),
        (drafts._replace(parents=drafts.parents.flatten()), ValueError, f"drafts.parents must be {sizes}, got int32"),
        (
            drafts._replace(parents=drafts.parents.to("meta")),
            ValueError,
            f"drafts.parents must be {sizes}, got .* meta",
        ),
        (
            drafts._replace(parents=torch.stack([drafts.parents] * 2, dim=-1)[..., 0]),
            ValueError,
            "drafts.parents must be contiguous in its last dimension",
        ),
        (Drafts(*(torch.cat([x, x]) for x in drafts)), ValueError, message_of_rows),
        (Drafts(*(x.to("meta") for x in drafts)), ValueError, r"\S+ must be .* on (meta|cpu), got .* on (meta|cpu)"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            function(wrong)
    function(Drafts(drafts.token_ids.int(), drafts.parents))


def variants(name):
    """What :mod:`tests.helpers.draft_variants` prints: how many variants of its kernel an operator asks for."""
    # Another process, because this one may interpret.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.draft_variants", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)
