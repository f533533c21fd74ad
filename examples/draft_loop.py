"""The loop of an engine with speculative decoding: drafted tokens are verified by the guided step's own draws.

    python examples/draft_loop.py
    python examples/draft_loop.py --no-drafts  # the same text, in more steps

Drafts are the tokens that followed an earlier occurrence of the last two tokens, so prompts ask for repetition. In
``engine_loop.py`` requests also arrive and leave while others run. ``docs/guided-step.md`` explains the calls.
"""

import argparse
from functools import partial
from types import SimpleNamespace

import torch
from transformers import DynamicCache

from lenvm_kernels import Drafts, GuidedStep, ModelValues, PagedSlots, Sampling, StepBatch, StepConfig, parse_guidance
from lenvm_kernels.loading.models import Models

MAX_DRAFTS, MAX_LEN, MAX_NEW, PAGE_SIZE = 4, 1024, 60, 16  # drafts per step, tokens per request, slots per page
SAMPLING = Sampling(top_k=8, top_p=1.0, min_p=0.02, temperature=0.6, is_logits=True, sample=True)
REQUESTS = [  # a prompt and its custom_params
    ("Say this three times: A comet is a ball of ice and dust.", {"value_mode": "centered_exp", "value_scale": -10}),
    ("Is it true that the moon goes around the earth?", {"target_length": 40, "constraint": "eq_soft"}),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("models", nargs="*", default=["demo", "demo"], help="BASE VALUE, in Hugging Face format")
parser.add_argument("--no-drafts", action="store_true", help="draw one token a step")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
models = Models.load(*args.models, device=device, dtype=torch.float32)
vocab_size = models.model.get_input_embeddings().num_embeddings
eos_token_ids, int32 = set(models.eos_token_ids), partial(torch.tensor, dtype=torch.int32, device=device)


def draft(tokens):
    """Tokens after the last earlier occurrence of the last two tokens; an empty list without one."""
    places = [] if args.no_drafts else range(2, len(tokens))
    last = max((i for i in places if tokens[i - 2 : i] == tokens[-2:]), default=len(tokens))
    return tokens[last : last + MAX_DRAFTS]


def node_logits(request, drafted):
    """The base model's scores after the last token and after each draft, fp32 ``[1 + MAX_DRAFTS, V]``."""
    new = int32([request.tokens[request.cache.get_seq_length() :] + drafted])
    nodes = torch.zeros(1 + MAX_DRAFTS, vocab_size, device=device)
    nodes[: 1 + len(drafted)] = models.model(new, past_key_values=request.cache).logits[0, -1 - len(drafted) :]
    return nodes


def decode(batch):
    """Draw one to ``1 + MAX_DRAFTS`` tokens for each request of the batch."""
    drafted = [draft(request.tokens) for request in batch]
    logits = torch.cat([node_logits(request, tokens) for request, tokens in zip(batch, drafted, strict=True)])
    table_rows = int32([request.table_row for request in batch])
    lengths = int32([len(request.tokens) for request in batch])

    # New tokens of each sequence since its last step, and a chain of drafts after them.
    width = 1 + MAX_DRAFTS
    new_lens = int32([request.new for request in batch])
    tokens = int32([(request.tokens[-request.new :] + [0] * width)[:width] for request in batch])
    token_ids = int32([(tokens + [-1] * MAX_DRAFTS)[:MAX_DRAFTS] for tokens in drafted])
    drafts = Drafts(token_ids, parents=int32([range(-1, MAX_DRAFTS - 1)] * len(batch)))

    # A draft is accepted if it equals the drawn token. The token drawn after the last accepted draft is also added.
    prepared = step.prepare(logits, StepBatch(tokens, table_rows, lengths, new_lens), drafts)
    output = step.step(prepared, SAMPLING, verify="same_draws")

    verified = zip(output.verified.tokens.tolist(), output.verified.lens.tolist(), strict=True)
    for request, (taken, count) in zip(batch, verified, strict=True):
        request.tokens += taken[:count]
        request.new, request.steps = count, request.steps + 1
        if rejected := request.cache.get_seq_length() - (len(request.tokens) - 1):
            request.cache.crop(-rejected)


def output_of(request):
    """The new tokens up to an end of sequence or the limit, and whether they end there."""
    new = request.tokens[request.prompt_len :][:MAX_NEW]
    end = next((i + 1 for i, token in enumerate(new) if token in eos_token_ids), MAX_NEW)
    return new[:end], len(new) >= end


models.model.requires_grad_(False)
slots = PagedSlots(len(REQUESTS), MAX_LEN, page_size=PAGE_SIZE, device=device)
step = GuidedStep(ModelValues(models.value_model), slots, StepConfig(vocab_size=vocab_size, max_drafts=MAX_DRAFTS))
if device == "cuda":
    step.warm_up()

requests = []
for table_row, (text, guidance) in enumerate(REQUESTS):
    prompt = models.encode([text])["input_ids"][0].tolist()
    params = parse_guidance(guidance, gamma=models.value_model.lenvm_config.gamma)
    slots.extend(table_row, len(prompt) + MAX_NEW)
    step.add_request(table_row, params, eos_token_ids, prompt_len=len(prompt), seed=table_row)
    step.extend(int32(prompt[:-1]), int32([table_row]), int32([0]), int32([len(prompt) - 1]), int32([0]))
    state = dict(table_row=table_row, prompt_len=len(prompt), tokens=prompt, cache=DynamicCache())
    requests.append(SimpleNamespace(**state, new=1, steps=0))  # the number of tokens since the last step, and of steps
while batch := [request for request in requests if not output_of(request)[1]]:
    decode(batch)

for (text, guidance), request in zip(REQUESTS, requests, strict=True):
    step.remove_request(request.table_row)
    slots.free(request.table_row)
    new, _ = output_of(request)
    answer = models.tokenizer.decode(new, skip_special_tokens=True)
    print(f"{guidance}\n{text}\n  {len(new)} tokens in {request.steps} steps: {answer}\n")
