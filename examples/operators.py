"""The core of a guided step in four calls, on a CPU (the PyTorch reference) or a GPU (the Triton kernels)."""

from functools import partial

import torch

from lenvm_kernels import (
    GuidanceTable,
    parse_guidance,
    reweight_scatter,
    topk_candidates,
    value_head,
    value_tree_attention,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
i32, randn = partial(torch.tensor, dtype=torch.int32, device=device), partial(torch.randn, device=device)

# 1 candidates: top-k, top-p, min-p of softmax(logits / temperature). A filter is a number, or a tensor [B].
logits = randn(1, 32_000)
candidates = topk_candidates(logits, top_k=5, top_p=1.0, min_p=0.0, temperature=1.0, is_logits=True)

# 2 value model (one layer of it): 1 delta token and 8 candidates after 4 cached tokens, in slots 1 to 4 of the cache
q, k, v, cache = randn(9, 12, 64), randn(9, 2, 64), randn(9, 2, 64), randn(2, 100, 2, 64)
out = value_tree_attention(q, k, v, *cache, i32([[1, 2, 3, 4]]), i32([0]), i32([4]), i32([0, 9]), i32([8]))

# 3 value head: one logit per candidate, token rows 1 to 8 of the hidden states
hidden, head = out.flatten(1), (randn(768, 768) / 28, randn(768), randn(1, 768) / 28, randn(1))
value_logits = value_head(hidden, *head, token_rows=torch.arange(1, 9, device=device)).view(1, 8)

# 4 reweight the candidates towards shorter output, and write them into the probabilities of the whole vocabulary
table = GuidanceTable.from_params([parse_guidance({"mode": "centered_exp", "scale": -20})], [{2}], device).columns
probs = torch.softmax(logits, dim=-1)
guided = reweight_scatter(candidates, value_logits, table, probs=probs)  # [1, 8]; probs now holds the same
next_token = torch.multinomial(probs, 1)

print("candidates", candidates.token_ids.tolist())
print("before    ", [round(p, 3) for p in (candidates.probs / candidates.probs.sum()).flatten().tolist()])
print("guided    ", [round(p, 3) for p in guided.flatten().tolist()])
print("drawn     ", next_token.item())
