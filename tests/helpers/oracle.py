"""The oracle for engines: the guided distribution of a row, computed without cache, batch or kernels."""

import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.types import Mode, Status


class PlainStep:
    """Rows of a base model with vocabulary ``vocab`` and a value model.

    Args:
        values: value logits of the last tokens of sequences, by full forwards of ``transformers``.
        eos: the end-of-sequence token.
        max_candidates: maximum number of candidates.
        defaults: other arguments of :func:`parse_guidance`.
    """

    def __init__(self, values, eos, max_candidates=8, **defaults):
        self.values, self.eos, self.max_candidates, self.defaults = values, eos, max_candidates, defaults

    def row(self, logits, prefix, generated, guidance, sampling):
        """Distribution of the next token, value logits of the candidates by token, and the reason of the row's outcome.

        ``logits``, fp64 ``[V]``, are the scores after ``prefix``, which ends with ``generated`` output tokens;
        ``sampling`` has ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        """
        logits, params = logits[None].clone(), parse_guidance(guidance, **self.defaults)
        probs = torch.softmax(logits / sampling["temperature"], 1)
        if params.has_span:
            if any(end in prefix for (end,) in params.end_token_ids):
                return probs[0], {}, "after span"
            if generated == params.hard_limit:
                forced = torch.zeros_like(probs[0])
                forced[params.closing_token_ids[0]] = 1
                return forced, {}, "hard limit"
            if not params.allow_eos:
                logits[:, self.eos] = -torch.inf
                probs = torch.softmax(logits / sampling["temperature"], 1)
        if params.mode == Mode.UNGUIDED:
            return probs[0], {}, "unguided"
        filters = {name: torch.tensor([number]) for name, number in sampling.items()}
        filters["top_k"] = filters["top_k"].int()
        table = GuidanceTable.from_params([params], [{self.eos}], "cpu").columns
        of_request = dict(table=table, generated=torch.tensor([generated]).int(), backend="reference")
        candidates = topk_candidates(
            logits, **filters, **of_request, is_logits=True, max_candidates=self.max_candidates
        )
        tokens = candidates.token_ids[0].tolist()
        listed = [token for token in tokens if token >= 0]
        values = dict(zip(listed, self.values([[*prefix, token] for token in listed]), strict=True))
        z = torch.tensor([[values.get(token, 0.0) for token in tokens]], dtype=torch.float64)
        reweight_scatter(candidates, z, **of_request, probs=probs)
        return probs[0], values, Status(candidates.status.item()).name
