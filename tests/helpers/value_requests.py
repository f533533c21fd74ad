"""Requests of a value model with a cache of scattered pages, against plain forwards of ``transformers``."""

import torch

from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.values import KVCache, RaggedBatch
from tests.helpers.models import VOCAB, last_value_logits

ATOL = 1e-5  # on logits of O(1), fp32 against fp32


def random_tokens(count, seed):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Requests:
    """Requests with scattered cache pages that grow by deltas, as the host stores a batch."""

    def __init__(self, value_model, rows, max_len=64, page_size=1, fill=0.0):
        self.value_model, self.page_size = value_model, page_size
        generator = torch.Generator().manual_seed(5)
        pages = -(-max_len // page_size)
        table = torch.randperm((rows + 2) * pages, generator=generator).view(rows + 2, pages).int()
        self.table = table.to(value_model.device)
        self.cache = KVCache.of_slots(value_model, table.numel() * page_size)
        self.cache.keys.fill_(fill)
        self.cache.values.fill_(fill)
        self.table_rows = torch.randperm(rows + 2, generator=generator)[:rows].to(value_model.device)
        self.prefixes = [[] for _ in range(rows)]

    def batch(self, deltas, candidates, width=None, spare_deltas=0, parents=None, images=None):
        """The ragged batch of these deltas and candidates, with room for ``spare_deltas`` more delta tokens."""
        width = max(map(len, candidates)) if width is None else width
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=self.value_model.device)  # noqa: E731
        padded = lambda lists: i32([x + [-1] * (width - len(x)) for x in lists]).view(len(lists), width)  # noqa: E731
        lens = [len(delta) for delta in deltas]
        delta = DeltaTokens(
            i32([token for delta in deltas for token in delta] + [VOCAB] * spare_deltas),
            starts=i32([sum(lens[:i]) for i in range(len(lens))]),
            lens=i32(lens),
            cached_lens=i32([len(prefix) for prefix in self.prefixes]),
            table_rows=self.table_rows,
        )
        return RaggedBatch.build(
            self.value_model,
            padded(candidates),
            i32([len(tokens) for tokens in candidates]),
            self.table,
            delta=delta,
            candidate_parents=None if parents is None else padded(parents),
            page_size=self.page_size,
            images=images,
        )

    def step(self, deltas, candidates, **layout):
        z = self.value_model.forward(self.batch(deltas, candidates, **layout), self.cache)
        for prefix, delta in zip(self.prefixes, deltas, strict=True):
            prefix += delta
        return z

    def check(self, z, candidates, model, head):
        """Check each candidate's value against a full forward over the prefix and the candidate; padding is 0."""
        assert z.dtype == torch.float32
        expected = torch.zeros(z.shape)
        for i, (prefix, tokens) in enumerate(zip(self.prefixes, candidates, strict=True)):
            if tokens:
                expected[i, : len(tokens)] = last_value_logits(model, head, [[*prefix, token] for token in tokens])
        torch.testing.assert_close(z, expected, rtol=0, atol=ATOL)


MIXED_PREFIXES = [0, 3, 17, 33, 1, 20]
MIXED_DELTAS = [random_tokens(n, seed=20 + n) for n in (9, 1, 0, 5, 1, 18)]
MIXED_CANDIDATES = [random_tokens(n, seed=50 + n) for n in (3, 8, 4, 0, 1, 7)]


def mixed_requests(value_model, **options):
    """Six requests after a forward over their prefixes."""
    requests = Requests(value_model, len(MIXED_PREFIXES), **options)
    requests.step([random_tokens(n, seed=n) for n in MIXED_PREFIXES], [[] for _ in MIXED_PREFIXES])
    return requests
