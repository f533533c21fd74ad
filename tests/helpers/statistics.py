"""Chi-square test of counts."""

import torch


def p_value(counts, expected, freedom=None):
    """Probability of counts at least as far from the expected ones, by the chi-square test.

    Args:
        counts: ``[n]``.
        expected: expected counts ``[n]``, with the same sum. Counts expected below 5 are merged.
        freedom: degrees of freedom. If None, the number of merged counts that are expected above 0, less one.
    """
    counts, expected = counts.double(), expected.double()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True)))
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1 if freedom is None else freedom
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()
