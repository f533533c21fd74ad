"""How many candidates a decode step has: SmolLM2-135M-Instruct on its own, its tokens filtered by top-k and min-p.

    python -m tools.candidate_counts [--out bench/results/candidate_counts.json]

What a guided step costs follows the candidates that exist, so the benchmarks of the step draw counts from what this
found. The prompts are the demo's held-out ones, the tokens are sampled from the filtered distribution.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers

from lenvm_kernels.demo import held_out_prompts
from lenvm_kernels.demo.models import Models
from lenvm_kernels.ops.topk_candidates import topk_candidates

RESULT = Path(__file__).parents[1] / "bench" / "results" / "candidate_counts.json"
TOP_K, MIN_P, TEMPERATURE = 5, 0.01, 1.0
MAX_NEW_TOKENS, ROWS, SEED = 128, 20, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="where to write the result (default: %(default)s)")
    args = parser.parse_args()
    models = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    prompts = held_out_prompts()
    torch.manual_seed(SEED)
    steps_by_count = torch.zeros(TOP_K + 1, dtype=torch.long)
    for start in range(0, len(prompts), ROWS):
        steps_by_count += count_candidates(models, prompts[start : start + ROWS])
        print(f"{min(start + ROWS, len(prompts))} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    steps = int(steps_by_count.sum())
    result = {
        "command": "python -m tools.candidate_counts",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "model": "SmolLM2-135M-Instruct",
        "sampling": {"top_k": TOP_K, "min_p": MIN_P, "temperature": TEMPERATURE, "seed": SEED},
        "prompts": len(prompts),
        "steps": steps,
        "share_of_steps_by_count": {str(n): int(steps_by_count[n]) / steps for n in range(1, TOP_K + 1)},
        "mean_count": float((steps_by_count * torch.arange(TOP_K + 1)).sum()) / steps,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def count_candidates(models: Models, prompts: list[str]) -> torch.Tensor:
    """Decode steps by their number of candidates, int64 ``[TOP_K + 1]``, of one batch until each row has ended."""
    inputs = models.encode(prompts)
    output = models.model.generate(
        **inputs,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=1.0,
        min_p=MIN_P,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=models.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rows = len(prompts)
    filters = dict(
        top_k=torch.full((rows,), TOP_K, dtype=torch.int32),
        top_p=torch.ones(rows),
        min_p=torch.full((rows,), MIN_P),
        temperature=torch.full((rows,), TEMPERATURE),
    )
    ended = torch.zeros(rows, dtype=torch.bool)
    steps_by_count = torch.zeros(TOP_K + 1, dtype=torch.long)
    for logits, tokens in zip(output.logits, output.sequences[:, inputs["input_ids"].shape[1] :].T, strict=True):
        counts = topk_candidates(logits, **filters, is_logits=True).counts[~ended]
        steps_by_count += torch.bincount(counts, minlength=TOP_K + 1)
        ended |= torch.isin(tokens, torch.tensor(models.eos_token_ids))
    return steps_by_count


if __name__ == "__main__":
    main()
