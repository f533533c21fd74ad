"""A value model for guided steps, and its expected values by plain forwards of ``transformers``."""

import math

import torch
from torch.nn.functional import softplus
from transformers import Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.types import Status
from lenvm_kernels.values import ValueModel
from tests.helpers.engine import PROMPTS, Engine, make_step
from tests.helpers.models import EOS, TINY, last_value_logits, random_head, random_model

ATOL = 2e-5  # on value logits of O(1), fp32 against fp32


class StepModels:
    """A ``transformers`` backbone, its head, and the value model of both."""

    def __init__(self):
        self.backbone, self.head = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY)), random_head()
        self.value = ValueModel.from_causal_lm(self.backbone, self.head)

    def values(self, sequences):
        """Value logit at the last token of each sequence."""
        return last_value_logits(self.backbone, self.head, sequences)

    def lengths(self, sequences, gamma):
        """Predicted remaining length of each sequence."""
        return softplus(self.values(sequences)) / -math.log(gamma)

    def assert_values(self, output, sequences):
        """Check values of guided rows' candidates against plain forwards, and return their number.

        ``sequences``: tokens before the candidates of each row, None for a row without a request."""
        ids, status = output.candidates.token_ids.tolist(), output.candidates.status.tolist()
        wanted = [(i, j) for i, s in enumerate(status) if s == Status.GUIDE for j, t in enumerate(ids[i]) if t >= 0]
        if wanted:
            found = output.value_logits[tuple(zip(*wanted, strict=True))]
            expected = self.values([[*sequences[i], ids[i][j]] for i, j in wanted])
            torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
        return len(wanted)

    def assert_guided(self, output, sequences, guidance, prompt_lens):
        """As :meth:`assert_values`; also checks guided probabilities and that drawn tokens are probable."""
        ids, status = output.candidates.token_ids.tolist(), output.candidates.status.tolist()
        count = self.assert_values(output, sequences)
        params = [None if g is None else parse_guidance(g) for g in guidance]
        generated = [len(tokens) - n for tokens, n in zip(sequences, prompt_lens, strict=True)]
        probs = reweight_scatter(
            output.candidates,
            output.value_logits,
            GuidanceTable.from_params(params, [{EOS}] * len(params), "cpu").columns,
            generated=torch.tensor(generated, dtype=torch.int32),
        )
        torch.testing.assert_close(output.probs, probs, rtol=0, atol=1e-5)
        for i, token in enumerate(output.tokens.tolist()):
            assert (token >= 0) == (status[i] in (Status.GUIDE, Status.SINGLE))
            assert token < 0 or output.probs[i, ids[i].index(token)] > 0
        return count

    def start(self, rows, guidance, *, prompts=PROMPTS, **options):
        """An engine with the first ``len(rows)`` prompts and room for 60 more tokens each, and its sequences."""
        prompts = prompts[: len(rows)]
        engine = Engine(*make_step(self.value, **options)).start(rows, prompts, guidance, room=60)
        return engine, [list(tokens) for tokens in prompts]
