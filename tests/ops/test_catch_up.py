"""``catch_up``: which tokens are computed at which step, and their slots."""

import pytest
import torch

from lenvm_kernels.ops.catch_up import catch_up
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from tests.helpers.drafts import i32


def make_requests(lengths, cached_lens, table_rows, *, guided=None, wants_length=None, device="cpu"):
    """Requests, all guided unless ``guided`` is passed. Fields that do not matter are 1."""
    requests = empty_requests(len(lengths), torch.device(device))
    for x in requests:
        x.fill_(1)
    requests.positions.copy_(i32(*lengths) - 1)
    requests.cached_lens.copy_(i32(*cached_lens))
    requests.table_rows.copy_(torch.tensor(table_rows))
    requests.guided.copy_(torch.tensor([True] * len(lengths) if guided is None else guided))
    requests.wants_length.copy_(torch.tensor([False] * len(lengths) if wants_length is None else wants_length))
    return requests


def make_history(rows, held, device="cpu"):
    """A history whose tokens are ``100 * row + column`` and whose cached lengths are -5."""
    history = empty_history(rows, held, torch.device(device))
    history.tokens.copy_(100 * torch.arange(rows)[:, None] + torch.arange(held))
    history.cached_lens.fill_(-5)  # shows which rows are written
    return history


# With a history of three tokens: the length of each request, its table row, numbers of cached tokens and of scored
# candidates, whether it is guided and wants a length; then the positions of the computed tokens.
WHO_COMPUTES = [
    ((8, 5, 7, 2, True, False), [7]),
    ((8, 2, 6, 1, True, False), [6, 7]),
    ((9, 7, 6, 1, False, True), [6, 7, 8]),
    ((4, 0, 4, 2, True, True), []),  # all are cached
    ((9, 4, 8, 0, True, False), []),  # waits
    ((5, 8, 3, 0, False, True), []),  # waits
    ((8, 1, 5, 0, True, False), [5, 6, 7]),  # can wait no longer
    ((7, 9, 4, 0, False, True), [4, 5, 6]),
    ((8, 6, 5, 3, False, False), []),  # needs no values
    ((3, 3, 0, 0, False, False), []),
    ((1, 10, 0, 1, True, False), [0]),
    ((2, 11, 0, 1, True, False), [0, 1]),
]


@pytest.mark.parametrize("page_size", [1, 5])
def test_computed_tokens_and_their_slots(device, backend, page_size):
    """Each row has its own pages, and the slot table is a slice. With pages of 5, slots of row 2 exceed 32 bits."""
    asked, expected = zip(*WHO_COMPUTES, strict=True)
    lengths, rows, cached_lens, counts, guided, wants_length = zip(*asked, strict=True)
    requests = make_requests(lengths, cached_lens, rows, guided=guided, wants_length=wants_length, device=device)
    history = make_history(13, 3, device)
    pages = torch.randperm(12 * 17, generator=torch.Generator().manual_seed(0)).int().view(12, 17)
    pages[2] = 2**31 - 1 - pages[2]
    options = dict(page_size=page_size, backend=backend)
    delta = catch_up(history, requests, i32(*counts).to(device), pages.to(device)[:, 4:], **options)
    assert delta.lens.tolist() == [len(positions) for positions in expected]
    assert delta.cached_lens.tolist() == list(cached_lens)
    left = [-5] * 13
    for i, (row, positions) in enumerate(zip(rows, expected, strict=True)):
        padding = 3 - len(positions)
        assert delta.token_ids[i].tolist() == [100 * row + p % 3 for p in positions] + [0] * padding
        slots = [pages[row, 4 + p // page_size].item() * page_size + p % page_size for p in positions]
        assert delta.slots[i].tolist() == slots + [-1] * padding
        left[row] = cached_lens[i] + len(positions)
    assert history.cached_lens.tolist() == left
