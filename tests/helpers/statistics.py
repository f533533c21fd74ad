"""How likely counts are."""

import torch


def p_value(counts, expected, freedom=None):
    """Probability of counts at least as far from those expected, by the chi-square test.

    Args:
        counts: ``[n]``.
        expected: ``[n]``; of the same sum. Those below 5 are put together.
        freedom: degrees of freedom; None: one fewer than there are counts above 0 expected.
    """
    counts, expected = counts.double(), expected.double()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True)))
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1 if freedom is None else freedom
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()
