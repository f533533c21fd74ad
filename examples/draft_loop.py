"""The loop of an engine with speculative decoding: drafted tokens are verified by the guided step's own draws.

    python examples/draft_loop.py
    python examples/draft_loop.py --no-drafts  # the same text, in more steps

Drafts are the tokens that followed an earlier occurrence of the last two tokens, so prompts ask for repetition. The
base model is a transformers model, run for one request at a time. In ``engine_loop.py`` requests also arrive and leave
while others run. ``docs/guided-step.md`` explains the calls.
"""

import argparse
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from lenvm_kernels import Drafts, GuidedStep, ModelValues, PagedSlots, Sampling, StepBatch, StepConfig, parse_guidance
from lenvm_kernels.loading.models import Models

MAX_DRAFTS, MAX_LEN, PAGE_SIZE = 4, 1024, 16  # drafts per step, tokens per request, slots per page
SAMPLING = Sampling(top_k=8, top_p=1.0, min_p=0.02, temperature=0.6, is_logits=True, sample=True)
REQUESTS = [  # a prompt and its custom_params
    ("Say this three times: A comet is a ball of ice and dust.", {"value_mode": "centered_exp", "value_scale": -10}),
    (
        "Is it true that the moon goes around the earth, and the earth around the sun?",
        {"target_length": 40, "constraint": "eq_soft"},
    ),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="base model: a directory in Hugging Face format")
parser.add_argument("--value-model", default="demo", help="the same, with a value head and the base model's vocabulary")
parser.add_argument("--max-new-tokens", type=int, default=60)
parser.add_argument("--no-drafts", action="store_true", help="draw one token a step")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
models = Models.load(args.model, args.value_model, device=device, dtype=torch.float32)
vocab_size = models.model.get_input_embeddings().num_embeddings
eos_token_ids = set(models.eos_token_ids)


@dataclass
class DraftedRequest:
    """The engine's state of a request."""

    table_row: int
    prompt_len: int
    tokens: list[int]
    new: int = 1  # tokens since the last step
    steps: int = 0
    cache: DynamicCache = field(default_factory=DynamicCache)  # of the base model


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def draft(tokens):
    """Tokens after the last earlier occurrence of the last two tokens; empty if there is none."""
    if args.no_drafts:
        return []
    for i in reversed(range(2, len(tokens))):
        if tokens[i - 2 : i] == tokens[-2:]:
            return tokens[i : i + MAX_DRAFTS]
    return []


@torch.no_grad()
def node_logits(request, drafted):
    """The base model's scores after the last token and after each draft, fp32 ``[1 + MAX_DRAFTS, V]``."""
    new = torch.tensor([request.tokens[request.cache.get_seq_length() :] + drafted], device=device)
    logits = models.model(new, past_key_values=request.cache, use_cache=True).logits[0].float()
    nodes = torch.zeros(1 + MAX_DRAFTS, vocab_size, device=device)
    nodes[: 1 + len(drafted)] = logits[-1 - len(drafted) :]
    return nodes


slots = PagedSlots(len(REQUESTS), MAX_LEN, page_size=PAGE_SIZE, device=device)
config = StepConfig(vocab_size=vocab_size, max_drafts=MAX_DRAFTS)
step = GuidedStep(ModelValues(models.value_model), slots, config)
if device == "cuda":
    step.warm_up()


def arrive(table_row, text, guidance):
    """Give a request its table row and the slots of its prompt."""
    tokens = models.encode([text])["input_ids"][0].tolist()
    slots.extend(table_row, len(tokens))
    params = parse_guidance(guidance, gamma=models.value_model.lenvm_config.gamma)
    step.add_request(table_row, params, eos_token_ids, prompt_len=len(tokens), seed=table_row)
    table_rows, prompt = int32([table_row]), int32(tokens[:-1])
    step.extend(prompt, table_rows, int32([0]), int32([len(prompt)]), int32([0]))
    return DraftedRequest(table_row, len(tokens), tokens)


def decode(batch):
    """Draw one to ``1 + MAX_DRAFTS`` tokens for every request of the batch."""
    drafted = [draft(request.tokens) for request in batch]
    logits = torch.cat([node_logits(request, tokens) for request, tokens in zip(batch, drafted, strict=True)])
    for request in batch:
        slots.extend(request.table_row, len(request.tokens))
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
        left = request.cache.get_seq_length() - (len(request.tokens) - 1)
        if left:
            request.cache.crop(-left)  # remove rejected drafts from the base model's cache


def end(request):
    """Length at which the sequence ends, by an end of sequence or at the limit; None if it has not ended."""
    limit = request.prompt_len + args.max_new_tokens
    ends = [i + 1 for i, token in enumerate(request.tokens) if i >= request.prompt_len and token in eos_token_ids]
    found = min([*ends, limit])
    return found if found <= len(request.tokens) else None


requests = [arrive(table_row, *request) for table_row, request in enumerate(REQUESTS)]
batch = list(requests)
while batch:
    decode(batch)
    for request in list(batch):
        if end(request) is not None:
            step.remove_request(request.table_row)
            slots.free(request.table_row)
            batch.remove(request)

for (text, guidance), request in zip(REQUESTS, requests, strict=True):
    new = request.tokens[request.prompt_len : end(request)]
    answer = models.tokenizer.decode(new, skip_special_tokens=True)
    print(f"{guidance}\n{text}\n  {len(new)} tokens in {request.steps} steps: {answer}\n")
