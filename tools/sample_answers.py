"""Sample the answers that the demo's value model is trained on: those of SmolLM2-135M-Instruct, by vLLM on a CPU.

    lenvm export demo-models
    VLLM_CPU_KVCACHE_SPACE=3 .venv-vllm/bin/python -m tools.sample_answers --model demo-models/base

Every round answers each prompt of ``lenvm_kernels/demo/prompts.json`` twice and adds a file to ``--data``, so stopping
early costs answers, not prompts; files already there are kept. A line of a file is one answer::

    {"split": "train", "prompt": 17, "prompt_ids": [...], "ids": [...], "finished": true, "first": 0}

``prompt`` is the place in its split. ``prompt_ids`` are the tokens of the chat template with the prompt, ``ids`` those
of the answer. ``ids`` end with the end of sequence if ``finished``; otherwise the limit has cut them off.

Guidance draws tokens that the model seldom draws, and asks how long answers are that have such tokens. So in every
other round an answer begins with ``first`` tokens, 1 to 95, of which one in four is drawn with equal chances from all
candidates. What follows them is the model's own; an answer that has ended before is not kept.
"""

import argparse
import json
import os
import time
from pathlib import Path

PROMPTS = Path(__file__).parent.parent / "lenvm_kernels" / "demo" / "prompts.json"
TEMPERATURE, TOP_K, MIN_P, MAX_NEW_TOKENS = 0.8, 8, 0.02, 256
ANSWERS_PER_ROUND = 2
# Of the rounds with odd numbers.
MOST_FIRST, SHARE_OF_EQUAL_CHANCES = 96, 0.25


def sample(model: str, data: Path, rounds: int, minutes: float) -> None:
    """Write ``round_*.jsonl`` until the rounds are done, or the minutes are over at the beginning of one."""
    # vLLM's engine then is in this process and draws from the generator that is seeded below. Its own seeds of requests
    # are for GPUs.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    share = 0.0

    def draw(sampler, logits, *args):
        """Top-k and min-p. On a CPU vLLM's own draws noise for the whole vocabulary, which takes longer than a step."""
        top, ids = logits.topk(TOP_K, dim=-1)
        probs = top.softmax(-1)
        probs = probs.where(probs >= MIN_P * probs[:, :1], 0.0)
        equal = torch.rand(len(probs), 1) < share
        probs = torch.where(equal, (probs > 0).float(), probs)
        return ids.gather(1, torch.multinomial(probs, 1)).squeeze(1), None

    TopKTopPSampler.forward_cpu = draw

    data.mkdir(parents=True, exist_ok=True)
    splits = json.loads(PROMPTS.read_text(encoding="utf-8"))
    prompts = [(split, place) for split, texts in splits.items() for place in range(len(texts))]
    deadline = time.monotonic() + 60 * minutes
    engine = LLM(model, dtype="bfloat16", max_model_len=512, max_num_seqs=256, gpu_memory_utilization=0.35)
    tokenizer = engine.get_tokenizer()
    chats = [[{"role": "user", "content": splits[split][place]}] for split, place in prompts]
    chats = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]

    def answers(starts, limits):
        """One answer to each of the token ids, of at most so many tokens."""
        params = [SamplingParams(temperature=TEMPERATURE, max_tokens=limit, detokenize=False) for limit in limits]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in starts], params)
        return [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason == "stop") for output in outputs]

    for number in range(rounds):
        file = data / f"round_{number}.jsonl"
        if file.exists():
            continue
        if time.monotonic() > deadline:
            print(f"{minutes:g} minutes are over: {number} of {rounds} rounds done")
            break
        torch.manual_seed(number)
        firsts = [0] * (len(prompts) * ANSWERS_PER_ROUND)
        begun = [[] for _ in firsts]
        asked = [index % len(prompts) for index in range(len(firsts))]
        if number % 2:
            firsts = torch.randint(1, MOST_FIRST, (len(firsts),)).tolist()
            share = SHARE_OF_EQUAL_CHANCES
            drawn = answers([chats[index] for index in asked], firsts)
            share = 0.0
            kept = [i for i, (_, ended) in enumerate(drawn) if not ended]
            begun, firsts, asked = [drawn[i][0] for i in kept], [firsts[i] for i in kept], [asked[i] for i in kept]
        rest = answers(
            [chats[index] + ids for index, ids in zip(asked, begun, strict=True)],
            [MAX_NEW_TOKENS - first for first in firsts],
        )
        lines = []
        for index, ids, first, (more, ended) in zip(asked, begun, firsts, rest, strict=True):
            line = {"split": prompts[index][0], "prompt": prompts[index][1], "prompt_ids": chats[index]}
            line |= {"ids": ids + more, "finished": ended, "first": first}
            lines.append(json.dumps(line) + "\n")
        # By a rename: a file that is there is whole.
        partial = file.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the directory base that lenvm export writes")
    parser.add_argument(
        "--data", type=Path, default=Path("build/answers"), help="folder for the answers (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of two answers a prompt (default 4)")
    parser.add_argument("--minutes", type=float, default=60, help="start no round after this time (default 60)")
    args = parser.parse_args()
    for option in ("rounds", "minutes"):
        if getattr(args, option) <= 0:
            parser.error(f"--{option} must be positive")
    sample(args.model, args.data, args.rounds, args.minutes)


if __name__ == "__main__":
    main()
