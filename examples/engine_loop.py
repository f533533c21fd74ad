"""A small engine with length guidance: requests join a running batch, each with its own target, and leave it.

``python examples/engine_loop.py [BASE VALUE]`` runs it (default: demo models); docs/guided-step.md explains it."""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from transformers import DynamicCache

import lenvm_kernels as lk
from lenvm_kernels.loading.models import Models

TABLE_ROWS, MAX_LEN, MAX_NEW, PAGE_SIZE = 2, 1024, 90, 16  # concurrent requests, tokens of each, slots per page
SAMPLING = lk.Sampling(top_k=8, top_p=1.0, min_p=0.02, temperature=0.8, is_logits=True, sample=True)
REQUESTS = [("What is a comet?", guidance) for guidance in ({}, {"target_length": 25}, {"target_length": 50})]

device = "cuda" if torch.cuda.is_available() else "cpu"
models = Models.load(*(sys.argv[1:] or ("demo", "demo")), device=device, dtype=torch.float32)
eos_token_ids, int32 = set(models.eos_token_ids), partial(torch.tensor, dtype=torch.int32, device=device)

slots = lk.PagedSlots(TABLE_ROWS, MAX_LEN, page_size=PAGE_SIZE, device=device)
config = lk.StepConfig(vocab_size=models.model.config.vocab_size, text_breaks=lk.text_breaks_of(models.tokenizer))
step = lk.GuidedStep(lk.ModelValues(models.value_model), slots, config)
if device == "cuda":
    step.warm_up()  # compiles all kernels, and captures a CUDA graph for 1, 2, 4, ... requests


def arrive(seed, text, guidance):
    row, tokens = free_rows.pop(), models.encode([text])["input_ids"][0].tolist()
    slots.extend(row, len(tokens) + MAX_NEW)
    params = lk.parse_guidance(guidance, gamma=models.value_model.lenvm_config.gamma)
    step.add_request(row, params, eos_token_ids, prompt_len=len(tokens), seed=seed)
    step.extend(int32(tokens[:-1]), int32([row]), int32([0]), int32([len(tokens) - 1]), int32([0]))
    return SimpleNamespace(seed=seed, row=row, end=len(tokens) + MAX_NEW, tokens=tokens, cache=DynamicCache())


@torch.no_grad()
def decode(batch):
    new = [(int32([r.tokens[r.cache.get_seq_length() :]]), r.cache) for r in batch]  # an engine has its own forward
    logits = torch.cat([models.model(tokens, past_key_values=cache).logits[:, -1] for tokens, cache in new])
    last, rows, lengths = map(int32, zip(*[(r.tokens[-1], r.row, len(r.tokens)) for r in batch], strict=True))
    prepared = step.prepare(logits, lk.StepBatch(last, rows, lengths))
    drawn = torch.multinomial((logits / SAMPLING.temperature).softmax(1), 1)[:, 0]  # for requests without guidance
    return step.step(prepared, SAMPLING, drawn=drawn).tokens.tolist()


waiting, batch, free_rows = [(seed, *x) for seed, x in enumerate(REQUESTS)], [], list(range(TABLE_ROWS))
while waiting or batch:
    batch += [arrive(*waiting.pop(0)) for _ in free_rows[: len(waiting)]]
    for request, token in zip(batch, decode(batch), strict=True):
        request.tokens.append(token)
    for request in [r for r in batch if r.tokens[-1] in eos_token_ids or len(r.tokens) == r.end]:
        step.remove_request(request.row)
        slots.free(request.row)
        free_rows.append(request.row)
        batch.remove(request)
        answer = request.tokens[request.end - MAX_NEW :]
        print(*REQUESTS[request.seed], len(answer), models.tokenizer.decode(answer), sep="\n  ")
