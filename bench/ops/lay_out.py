"""Time of ``lay_out``: a few dependent loads at decode steps, and prompts.

At a decode step, each request is guided, has K candidates and lacks ``missing`` of the ``M`` tokens in the history.
Pages of 16 slots are in random order. With ``delta``, each request has a prompt of ``delta`` tokens instead.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from bench.models import VOCAB
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.types import DeltaTokens

REQUEST_BYTES = 4 + 8 + 1 + 3 * 4  # length, table row, a flag, and three numbers of tokens
TOKEN_BYTES = 4 + 4  # id and page


def make_call(
    *,
    B=64,
    K,
    M=16,
    R=64,
    missing=1,
    length=4096,
    page_size=16,
    delta=None,
    index=torch.int64,
    is_tree=False,
    heads=(12, 2),
):
    """A call for ``B`` requests of ``length`` tokens in ``R`` table rows.

    Args:
        delta: passed tokens per request, with ids of dtype ``index``. If None, ``missing`` of the ``M`` tokens in the
            history are not cached.
        is_tree: whether the parent of a candidate is the previous one.
    """
    device, full = torch.get_default_device(), partial(torch.full, (B,), dtype=torch.int32)
    rows, pages = torch.randperm(R)[:B], -(-length // page_size)
    if delta is None:
        requests, history = empty_requests(B, device), empty_history(R, M, device)
        for x in requests:
            x.fill_(1)
        requests.lengths.fill_(length)
        requests.cached_lens.fill_(length - missing)
        requests.request_rows.copy_(rows)
        tokens = dict(requests=requests, history=history)
    else:
        ids, starts = torch.randint(VOCAB, (B * delta,), dtype=index), torch.arange(0, B * delta, delta)
        tokens = dict(delta=DeltaTokens(ids, starts.int(), full(delta), full(length - delta), rows.to(index)))
    return partial(
        lay_out,
        torch.randint(VOCAB, (B, K), dtype=torch.int32),
        full(K),
        torch.randperm(R * pages, dtype=torch.int32).view(R, pages),
        candidate_parents=(torch.arange(K, dtype=torch.int32) - 1).repeat(B, 1) if is_tree else None,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        **tokens,
    )


def make_case(*, B, K, M, R, missing, delta, length):
    call = make_call(B=B, K=K, M=M, R=R, missing=missing, delta=delta, length=length)
    moved = B * (REQUEST_BYTES + (missing if delta is None else delta) * TOKEN_BYTES + 4 * K)
    return TimedCase(call, moved + nbytes(call()))


FORMS = {f"lay_out K{K}, pages of {page}": dict(K=K, page_size=page) for K, page in ((1, 1), (8, 4), (8, 16), (64, 64))}
FORMS |= {f"lay_out M{M}": dict(K=8, M=M) for M in (1, 5, 64)}
FORMS |= {f"lay_out of trees K{K}": dict(K=K, is_tree=True) for K in (8, 44)}  # 44: 4 drafts, 8 candidates each
FORMS |= {
    f"lay_out of prompts {index} K{K}": dict(K=K, delta=1, index=index)
    for index in (torch.int32, torch.int64)
    for K in (0, 8)
}
_ONE = dict(B=1, K=1, M=1, R=1, length=1, page_size=1, index=torch.int32, heads=(1, 1))
FORMS["lay_out, every size 1"] = _ONE
FORMS["lay_out of trees, every size 1"] = _ONE | dict(is_tree=True)
FORMS["lay_out of prompts, every size 1"] = _ONE | dict(delta=1)

PRODUCTION = dict(B=64, K=8, M=16, R=257, missing=1, delta=None, length=1000)
AXES = dict(B=[1, 8, 256], K=[2, 64], M=[4], missing=[0, 4, 16])
PROMPTS = [(1, 32_768), (1, 4096), (64, 64)]  # requests, tokens of each
OTHERS = [dict(B=512, R=4097), *(dict(B=B, K=0, delta=n, length=n) for B, n in PROMPTS)]
BENCHMARK = Benchmark("lay_out", make_case, PRODUCTION, AXES, OTHERS, quick=[{}, dict(B=1)])
