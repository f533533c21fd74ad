"""The operators' references with a fault, for ``lenvm fuzz --against tests.helpers.planted_faults:FAULT.OPERATOR``."""

from types import SimpleNamespace

import torch

from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.fuzz.ops.candidate_values import exact as exact_candidate_values
from lenvm_kernels.reference._common import sums_of_squares

# The part of a result that a fault is planted in.
PARTS = {
    "gather_requests": lambda requests: requests.generated,
    "expand_drafts": lambda nodes: nodes.generated,
    "topk_candidates": lambda found: found.probs,
    "select_scored": lambda scored: scored.positions,
    "pack_drafts": lambda trees: trees.counts,
    "catch_up": lambda delta: delta.cached_lens,
    "embed_tokens": lambda embedded: embedded.cos,
    "ragged_layout": lambda layout: layout.positions,
    "rope_cache": lambda heads: heads[0],
    "verify_drafts": lambda verified: verified.lens,
    "candidate_values": lambda logits: logits[0],
}


def reference(name):
    def call(*arguments, **keywords):
        return operators()[name].function(*arguments, **keywords, backend="reference")

    return call


def rounded_once(name, result_dtype):
    """The reference in fp64: in fp32 PyTorch's sums do not give a row the same bits in every batch."""

    def call(*arguments, **keywords):
        doubles = {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in keywords.items()}
        return reference(name)(*arguments, **doubles).to(result_dtype(keywords))

    return call


def topk_candidates(scores, **keywords):
    found = reference("topk_candidates")(scores.double(), **keywords)
    return found._replace(probs=found.probs.float(), lost_mass=found.lost_mass.float())


def embed_tokens(*, embedding, **keywords):
    embedded = reference("embed_tokens")(embedding=embedding.double(), **keywords)
    return embedded._replace(hidden=embedded.hidden.to(embedding.dtype), square_sums=embedded.square_sums.float())


def ragged_linear(*, x, weight, square_sums_out=None, **keywords):
    """With the sums of squares of the result as it is rounded."""
    y = rounded_once("ragged_linear", lambda _: x.dtype)(x=x, weight=weight, **keywords)
    if square_sums_out is not None:
        rows = int(keywords.get("num_rows", len(x)))
        square_sums_out[:, :rows] = sums_of_squares(y[:rows].double()).float()
    return y


def candidate_values(**keywords):
    """With the matmul's operand rounded as the kernel rounds it, which no wider dtype does."""
    return tuple(x.float() for x in exact_candidate_values(**keywords))


EXACT = {
    "candidate_values": candidate_values,
    "topk_candidates": topk_candidates,
    "embed_tokens": embed_tokens,
    "value_head": rounded_once("value_head", lambda keywords: torch.float32),
    "ragged_linear": ragged_linear,
    "value_tree_attention": rounded_once("value_tree_attention", lambda keywords: keywords["q"].dtype),
}
CORRECT = {name: EXACT.get(name, reference(name)) for name in operators()}


def planted(change):
    """Functions by operator whose result is changed in place."""

    def of(name):
        def call(*arguments, **keywords):
            result = CORRECT[name](*arguments, **keywords)
            change(PARTS.get(name, lambda whole: whole)(result))
            return result

        return call

    return SimpleNamespace(**{name: of(name) for name in operators()})


def _off(x):
    if x.dtype == torch.bool:
        x.logical_not_()
    else:
        x += torch.where(x > 0.5, 1e-3 if x.is_floating_point() else 1, 0).to(x.dtype)


def _nan(x):
    x[x > 0.5] = torch.nan


def _odd(x):
    if len(x) % 2:
        x *= 1 + 2.0**-22


def _many(x):
    if len(x) > 4:
        x[0] += 1


correct = SimpleNamespace(**CORRECT)
off, nan, odd, many = map(planted, (_off, _nan, _odd, _many))


def fails(*arguments, **keywords):
    raise RuntimeError("out of luck")


def halves(*arguments, **keywords):
    return CORRECT["value_head"](*arguments, **keywords).half()


# --- of equal candidates the last one ---


def _reversed(candidates):
    flip = {name: getattr(candidates, name).flip(1).contiguous() for name in ("token_ids", "probs")}
    return candidates._replace(**flip)


def _topk_candidates(scores, **keywords):
    found = correct.topk_candidates(scores, **keywords)
    if found.probs.shape[1] > 1:
        tied = (found.probs[:, 0] == found.probs[:, 1]) & (found.counts > 1)
        found.token_ids[tied, :2] = found.token_ids[tied, :2].flip(1)
    return found


def _reweight_scatter(candidates, value_logits, table, **keywords):
    flipped = correct.reweight_scatter(_reversed(candidates), value_logits.flip(1), table, **keywords)
    return flipped.flip(1)


def _sample_candidates(candidates, guided_probs, seeds, positions, *, temperature=None):
    arguments = seeds, positions
    drawn = correct.sample_candidates(candidates, guided_probs, *arguments, temperature=temperature)
    if temperature is None:
        return drawn
    last = correct.sample_candidates(_reversed(candidates), guided_probs.flip(1), *arguments, temperature=temperature)
    return torch.where(temperature < 1e-6, last, drawn)


ties = SimpleNamespace(
    topk_candidates=_topk_candidates, reweight_scatter=_reweight_scatter, sample_candidates=_sample_candidates
)
