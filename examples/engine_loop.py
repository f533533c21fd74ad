"""An engine's loop with a guided step: requests arrive, share a batch with any mix of guidance, and leave.

    python examples/engine_loop.py
    python examples/engine_loop.py --model BASE --value-model VALUE

The base model, a transformers model that runs one request at a time, stands in for an engine's model. Everything else
is an engine's work for guidance. ``docs/guided-step.md`` explains the calls.
"""

import argparse
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from lenvm_kernels import GuidedStep, ModelValues, PagedSlots, Sampling, StepBatch, StepConfig, parse_guidance
from lenvm_kernels.loading.models import Models

TABLE_ROWS, MAX_LEN, PAGE_SIZE = 2, 1024, 16  # concurrent requests, tokens per request, slots per page
# Each filter is a number for all requests, or a tensor with one number per request.
SAMPLING = Sampling(top_k=8, top_p=1.0, min_p=0.02, temperature=0.8, is_logits=True, sample=True)
REQUESTS = [  # a prompt and its custom_params
    ("What is a comet?", None),
    ("What is a comet?", {"value_mode": "centered_exp", "value_scale": -60}),
    ("Why is the sky blue?", {"target_length": 40, "entropy_threshold": 0.5}),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="base model: a directory in Hugging Face format")
parser.add_argument("--value-model", default="demo", help="the same, with a value head and the base model's vocabulary")
parser.add_argument("--max-new-tokens", type=int, default=60)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
models = Models.load(args.model, args.value_model, device=device, dtype=torch.float32)
value_model, vocab_size = models.value_model, models.model.get_input_embeddings().num_embeddings
eos_token_ids = set(models.eos_token_ids)


@dataclass
class Request:
    """The engine's state of a request."""

    table_row: int
    text: str
    guidance: dict | None
    prompt_len: int
    tokens: list[int]
    cache: DynamicCache  # of the base model


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@torch.no_grad()
def base_logits(request):
    """The base model's scores of the request's next token, fp32 ``[V]``."""
    new = torch.tensor([request.tokens[request.cache.get_seq_length() :]], device=device)
    return models.model(new, past_key_values=request.cache, use_cache=True).logits[0, -1].float()


# PagedSlots is for engines without a slot table.
slots = PagedSlots(TABLE_ROWS, MAX_LEN, page_size=PAGE_SIZE, device=device)
step = GuidedStep(ModelValues(value_model), slots, StepConfig(vocab_size=vocab_size))
if device == "cuda":
    step.warm_up()  # compiles all kernels, and captures a CUDA graph for 1, 2, 4, ... requests


def arrive(table_row, text, guidance, seed):
    """Give a request its table row and the slots of its prompt."""
    tokens = models.encode([text])["input_ids"][0].tolist()
    slots.extend(table_row, len(tokens))
    params = None if guidance is None else parse_guidance(guidance, gamma=value_model.lenvm_config.gamma)
    table_rows, prompt = int32([table_row]), int32(tokens[:-1])

    # A request arrives: its parameters, then all of its prompt but the last token.
    step.add_request(table_row, params, eos_token_ids, prompt_len=len(tokens), seed=seed)
    step.extend(prompt, table_rows, int32([0]), int32([len(prompt)]), int32([0]))

    return Request(table_row, text, guidance, len(tokens), tokens, DynamicCache())


def decode(batch):
    """Draw one token for every request of the batch."""
    logits = torch.stack([base_logits(request) for request in batch])
    for request in batch:  # room for the last token's keys and values
        slots.extend(request.table_row, len(request.tokens))
    table_rows = int32([request.table_row for request in batch])
    lengths = int32([len(request.tokens) for request in batch])
    last_tokens = int32([request.tokens[-1] for request in batch])

    # Every step: token temperatures and limits of spans, before anything else reads the logits.
    prepared = step.prepare(logits, StepBatch(last_tokens, table_rows, lengths))

    # The engine's own draw, for unguided requests and for steps skipped by an entropy threshold.
    top = (logits / SAMPLING.temperature).topk(SAMPLING.top_k, dim=1)
    drawn = top.indices.gather(1, torch.multinomial(top.values.softmax(1), 1))[:, 0]

    # One token for each request of the batch, guided or not.
    output = step.step(prepared, SAMPLING, drawn=drawn)

    for request, token in zip(batch, output.tokens.tolist(), strict=True):
        request.tokens.append(token)


def leave(request):
    """Free the table row and the slots of a request that has ended, and print its answer."""
    # A request leaves.
    step.remove_request(request.table_row)
    slots.free(request.table_row)

    new = request.tokens[request.prompt_len :]
    text = models.tokenizer.decode(new, skip_special_tokens=True)
    print(f"{request.guidance}\n{request.text}\n  {len(new)} tokens: {text}\n")


torch.manual_seed(0)
waiting, batch, free_rows = list(enumerate(REQUESTS)), [], list(range(TABLE_ROWS))
while waiting or batch:
    while waiting and free_rows:
        seed, (text, guidance) = waiting.pop(0)
        batch.append(arrive(free_rows.pop(), text, guidance, seed))
    decode(batch)
    for request in list(batch):
        if request.tokens[-1] in eos_token_ids or len(request.tokens) == request.prompt_len + args.max_new_tokens:
            leave(request)
            batch.remove(request)
            free_rows.append(request.table_row)
