"""``verify_drafts``: draws that follow the drafts for many, few or no tokens."""

from typing import Any

import torch

from lenvm_kernels.fuzz.case import CallInputs, Case, Operator
from lenvm_kernels.fuzz.ops._inputs import DRAFTED, DRAFTS, VOCABULARY, draw_drafts, slice_of_longer
from lenvm_kernels.ops.verify_drafts import verify_drafts

OPTIONS: dict[str, list[Any]] = DRAFTS | {"slices": [False, True], "constants": ["shipped", "small"]}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    drafts = draw_drafts(draws, rows, options)
    width = options["drafts"]
    # At most nodes, a draft that follows the node is drawn.
    drawn = draws.choose("drawn", rows, 1 + width, values=[*VOCABULARY[:DRAFTED], 999, -1, -2])
    follows = draws.chance("follows", rows, 1 + width, of=0.8)
    for j in range(width):
        token, parent = drafts.token_ids[:, j].long(), drafts.parents[:, j].long()
        node = torch.where((parent >= 0) & (parent < j), parent + 1, 0)[:, None]
        is_taken = follows.gather(1, node)[:, 0] & (token >= 0) & draws.chance(f"draft {j}", rows, of=0.7)
        drawn.scatter_(1, node, torch.where(is_taken, token, drawn.gather(1, node)[:, 0])[:, None])
    drawn = drawn.flatten().int()
    return CallInputs({"drawn": slice_of_longer(drawn) if options["slices"] else drawn, "drafts": drafts}, len(rows))


OPERATOR = Operator(
    function=verify_drafts,
    options=OPTIONS,
    inputs=inputs,
    constants={"small": {"REQUESTS": 2}},  # several programs
    free={"drafts.token_ids": "int32 apart", "drafts.parents": "apart"},
)
