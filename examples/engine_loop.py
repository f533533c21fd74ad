"""An engine's decode loop with a guided step: requests arrive, share a batch with any mix of guidance, and leave.

Run it with ``python examples/engine_loop.py BASE VALUE``, or without arguments for the demo's models. A transformers
model stands in for the engine's model, and ``PagedSlots`` for its slot table; everything else is an engine's work for
guidance. ``docs/guided-step.md`` explains the calls.
"""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from transformers import DynamicCache

from lenvm_kernels import GuidedStep, ModelValues, PagedSlots, Sampling, StepBatch, StepConfig, parse_guidance
from lenvm_kernels.loading.models import Models

TABLE_ROWS, MAX_LEN, MAX_NEW, PAGE_SIZE = 2, 1024, 60, 16  # concurrent requests, tokens of each, slots per page
SAMPLING = Sampling(top_k=8, top_p=1.0, min_p=0.02, temperature=0.8, is_logits=True, sample=True)
REQUESTS = [  # a prompt and its custom_params
    ("What is a comet?", {}),
    ("What is a comet?", {"value_mode": "centered_exp", "value_scale": -60}),
    ("Why is the sky blue?", {"target_length": 40, "entropy_threshold": 0.5}),
]

device = "cuda" if torch.cuda.is_available() else "cpu"
models = Models.load(*(sys.argv[1:] or ("demo", "demo")), device=device, dtype=torch.float32)
value_model, vocab_size = models.value_model, models.model.get_input_embeddings().num_embeddings
eos_token_ids, int32 = set(models.eos_token_ids), partial(torch.tensor, dtype=torch.int32, device=device)

slots = PagedSlots(TABLE_ROWS, MAX_LEN, page_size=PAGE_SIZE, device=device)
step = GuidedStep(ModelValues(value_model), slots, StepConfig(vocab_size=vocab_size))
if device == "cuda":
    step.warm_up()  # compiles all kernels, and captures a CUDA graph for 1, 2, 4, ... requests

models.model.requires_grad_(False)
waiting, batch, free_rows = list(enumerate(REQUESTS)), [], list(range(TABLE_ROWS))
while waiting or batch:
    while waiting and free_rows:
        seed, (text, guidance) = waiting.pop(0)
        table_row, tokens = free_rows.pop(), models.encode([text])["input_ids"][0].tolist()
        params = parse_guidance(guidance, gamma=value_model.lenvm_config.gamma)
        slots.extend(table_row, len(tokens) + MAX_NEW)
        # A request arrives: its parameters, then all of its prompt but the last token.
        step.add_request(table_row, params, eos_token_ids, prompt_len=len(tokens), seed=seed)
        step.extend(int32(tokens[:-1]), int32([table_row]), int32([0]), int32([len(tokens) - 1]), int32([0]))
        batch.append(SimpleNamespace(seed=seed, table_row=table_row, tokens=tokens, new=[], cache=DynamicCache()))

    table_rows, lengths = int32([r.table_row for r in batch]), int32([len(r.tokens) for r in batch])
    missing = [int32([r.tokens[r.cache.get_seq_length() :]]) for r in batch]  # in the base model's cache
    scores = [models.model(x, past_key_values=r.cache).logits for x, r in zip(missing, batch, strict=True)]
    logits, last_tokens = torch.cat([x[:, -1] for x in scores]), int32([r.tokens[-1] for r in batch])
    # Every step: token temperatures and limits of spans, before anything else reads the logits.
    prepared = step.prepare(logits, StepBatch(last_tokens, table_rows, lengths))
    # The engine's own draw, for unguided requests and for steps skipped by an entropy threshold.
    top = (logits / SAMPLING.temperature).topk(SAMPLING.top_k, dim=1)
    drawn = top.indices.gather(1, torch.multinomial(top.values.softmax(1), 1))[:, 0]
    # One token for each request of the batch, guided or not.
    output = step.step(prepared, SAMPLING, drawn=drawn)

    for request, token in zip(batch, output.tokens.tolist(), strict=True):
        request.tokens.append(token)
        request.new.append(token)
        if token in eos_token_ids or len(request.new) == MAX_NEW:
            # A request leaves.
            step.remove_request(request.table_row)
            slots.free(request.table_row)
            free_rows.append(request.table_row)
            print(*REQUESTS[request.seed], len(request.new), models.tokenizer.decode(request.new), sep="\n  ")
    batch = [request for request in batch if request.table_row not in free_rows]
