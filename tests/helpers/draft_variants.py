"""Compiled variants that operators on requests and drafts need, for several batch sizes, on tensors and on slices.

``python -m tests.helpers.draft_variants NAME ...`` (without TRITON_INTERPRET) prints, as JSON, the number of variants
of each kernel. Nothing is compiled or launched.
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget

from bench.launches import intercept_launches, targeting
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops.begin_step import begin_step, empty_requests
from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.topk_candidates import empty_scored, topk_candidates
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.types import DeltaTokens, Drafts, Filters, ScoredCandidates
from tests.helpers.serving_variants import keys, note_key, slice_of_longer

CPU = torch.device("cpu")


def calls(name, rows, with_drafts, drafts, changed):
    """One call; ``changed`` is applied to the tensors that a caller may slice."""
    ids = changed(torch.ones(with_drafts, drafts, dtype=torch.int64))
    some = Drafts(ids, changed(torch.zeros(with_drafts, drafts, dtype=torch.int32)))
    numbers = torch.zeros(rows * (1 + drafts), dtype=torch.int32)
    per_request = [changed(torch.zeros(with_drafts, dtype=torch.int32)) for _ in range(4)]
    if name == "begin_step":
        table, out = GuidanceTable(40, CPU).columns, empty_requests(rows, CPU, drafts)
        tokens, table_rows = (changed(torch.zeros(with_drafts, dtype=torch.int64)) for _ in range(2))
        numbers = [x.float() for x in per_request[:3]]
        filters = Filters(per_request[0], *(torch.ones(1).expand(with_drafts) if rows > 2 else x for x in numbers))
        scores = changed(torch.zeros(with_drafts * (1 + drafts), 50))
        options = dict(drafts=some, drawn=changed(scores[:, 0].long()), filters=filters, out=out)
        options |= dict(scores=scores, addresses=torch.zeros(4, dtype=torch.int64))
        begin_step(table, tokens, table_rows, per_request[3], **options, backend="triton")
    elif name == "limit_span":
        # An engine's table never changes its size.
        table, tokens = GuidanceTable(40, CPU).columns, changed(torch.zeros(with_drafts, 2, dtype=torch.int64))
        lens, table_rows = (changed(torch.zeros(with_drafts, dtype=dtype)) for dtype in (torch.int32, torch.int64))
        logits = changed(torch.zeros(with_drafts * (1 + drafts), 50))
        limit_span(logits, table, tokens, table_rows, lens, new_lens=lens, drafts=some, backend="triton")
    elif name == "pack_drafts":
        scored = ScoredCandidates(numbers[:, None].repeat(1, 4), numbers, numbers, numbers.bool())
        pack_drafts(scored, some, backend="triton")
    elif name == "topk_candidates":
        integers, floats = (changed(torch.zeros(with_drafts, dtype=dtype)) for dtype in (torch.int32, torch.float32))
        options = dict(top_k=integers, top_p=floats, min_p=floats, max_candidates=4, backend="triton")
        options |= dict(table=GuidanceTable(40, CPU).columns, table_rows=integers, generated=integers)
        options |= dict(requests=empty_requests(with_drafts, CPU), scored=empty_scored(with_drafts, 4, CPU))
        options |= dict(drawn=integers)
        topk_candidates(torch.zeros(with_drafts, 48), **options, step=torch.ones(1).long(), sample=rows > 1)
    elif name == "verify_drafts":
        verify_drafts(changed(numbers[: with_drafts * (1 + drafts)]), some, backend="triton")
    else:
        lens, starts, counts, cached = (changed(torch.zeros(with_drafts, dtype=torch.int32)) for _ in range(4))
        token_ids, table_rows = (changed(torch.zeros(n, dtype=torch.int64)) for n in (rows, with_drafts))
        delta = DeltaTokens(token_ids, starts, lens, cached, table_rows)
        slot_table = changed(torch.zeros(40, 50, dtype=torch.int32))
        heads = dict(num_heads=2, num_kv_heads=1)
        parents = dict(candidate_parents=some.parents, backend="triton")
        lay_out(some.token_ids, counts, slot_table, delta=delta, **heads, **parents)


def strided_slice(x):
    """A matrix as a slice that is not aligned to 16 bytes and has longer rows; a vector unchanged."""
    return x if x.dim() < 2 else torch.cat([x[:, :1], x], dim=1)[:, 1:]


def main() -> None:
    sizes = [(1, 1), (2, 1), (16, 16), (17, 16), (19, 17), (33, 1)]
    with targeting(GPUTarget("cuda", 90, 32)), intercept_launches(note_key):
        for rows, with_drafts in sizes:
            for changed in (lambda x: x, slice_of_longer, strided_slice):
                for name in sys.argv[1:]:
                    calls(name, rows, with_drafts, 3, changed)
    print(json.dumps({kernel: len(variants) for kernel, variants in keys.items()}))


if __name__ == "__main__":
    main()
