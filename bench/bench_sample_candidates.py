"""Time ``sample_candidates``: a few hundred bytes a row, so what shows is a launch and the latency of its chain.

Run it as ``python -m bench.bench_sample_candidates``; ``--device cpu`` times the reference. Probabilities are fp32
whatever ``--dtype`` is. On a GPU it stands beside what it replaces: a draw from rows of ``[B, V]``.
"""

import itertools

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import Candidates, Status

VOCAB = 151_936  # Qwen2.5


def make_cases(rows: int, slots: int, device: str) -> list[Case]:
    candidates = Candidates(
        token_ids=torch.rand(rows, VOCAB, device=device).topk(slots).indices.int(),
        probs=torch.softmax(3 * torch.randn(rows, slots, device=device), 1),
        counts=torch.full((rows,), slots, dtype=torch.int32, device=device),
        status=torch.full((rows,), int(Status.GUIDE), dtype=torch.int8, device=device),
        lost_mass=torch.zeros(rows, device=device),
    )
    seeds, positions = torch.arange(rows, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    temperature = torch.ones(rows, device=device)

    def sample():
        return sample_candidates(candidates, candidates.probs, seeds, positions, temperature=temperature)

    # Of a row: its probabilities, seed, position, temperature and status; the token drawn, read and written.
    moved = rows * (slots * 4 + 8 + 4 + 4 + 1 + 4 + 4)
    cases = [Case(f"B={rows} K={slots}", sample, moved)]
    if device == "cuda" and slots == 8:
        dense = torch.zeros(rows, VOCAB, device=device).scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(dense)

        def sample_dense():  # as vLLM's sampler, and torch.multinomial without its checks
            return dense.div(noise.exponential_()).argmax(1)

        cases.append(Case(f"B={rows} from [B, {VOCAB}]", sample_dense, moved))
    return cases


def main() -> None:
    args = parse_args(__doc__)
    rows = [1, 8] if args.quick else [1, 8, 64, 256, 512]
    cases = [case for b, k in itertools.product(rows, [8, 64]) for case in make_cases(b, k, args.device)]
    run_cases("sample_candidates", cases, args)


if __name__ == "__main__":
    main()
