"""A value model for guided steps, and its expected values by plain forwards of ``transformers``."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.types import Status
from lenvm_kernels.values import ValueModel
from tests.helpers.models import TINY, last_value_logits, random_head, random_model

ATOL = 2e-5  # on value logits of O(1), fp32 against fp32


class StepModels:
    """A ``transformers`` backbone, its head, and the value model of both."""

    def __init__(self):
        self.backbone, self.head = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY)), random_head()
        self.value = ValueModel.from_causal_lm(self.backbone, self.head)

    def values(self, sequences):
        """Value logit at the last token of each sequence."""
        return last_value_logits(self.backbone, self.head, sequences)

    def assert_values(self, output, sequences, scored=None):
        """Check values of candidates in rows that are ``scored`` against plain forwards, and return their number.

        ``sequences``: tokens before the candidates of each row, None for a row without a request. If ``scored`` is
        None, guided rows are."""
        ids = output.candidates.token_ids.tolist()
        scored = (output.candidates.status == Status.GUIDE).tolist() if scored is None else scored
        wanted = [(i, j) for i, is_scored in enumerate(scored) if is_scored for j, t in enumerate(ids[i]) if t >= 0]
        if wanted:
            found = output.value_logits[tuple(zip(*wanted, strict=True))]
            expected = self.values([[*sequences[i], ids[i][j]] for i, j in wanted])
            torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
        return len(wanted)
