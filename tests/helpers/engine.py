"""A minimal engine around a guided step, with tiny models and few requests; and steps that act as with CUDA graphs."""

from copy import deepcopy

import pytest
import torch
from torch.utils._pytree import tree_map

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepConfig, ValueSource, value_source
from lenvm_kernels.step.state import Graphs
from lenvm_kernels.types import Status
from lenvm_kernels.values import ValueModel
from tests.helpers.models import EOS, VOCAB, last_value_logits, random_pair

GUIDANCE = [
    {"value_mode": "centered_exp", "value_scale": -20},
    {"value_mode": "mul", "value_scale": 0.8},
    {"target_length": 30, "constraint": "eq_soft"},
    {"target_length": 12, "entropy_threshold": 0.8},
    None,
]
TILT = GUIDANCE[0]
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20]]
MOST_LIKELY = "most likely"

ATOL = 2e-5  # on value logits of O(1), fp32 against fp32

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class StepModels:
    """A ``transformers`` backbone, its head, and the value model of both."""

    def __init__(self):
        self.backbone, self.head = random_pair("qwen2")
        self.value = ValueModel.from_causal_lm(self.backbone, self.head)

    def values(self, sequences):
        """Value logit at the last token of each sequence."""
        return last_value_logits(self.backbone, self.head, sequences)

    def assert_values(self, output, sequences, scored=None):
        """Check values of candidates in ``scored`` rows against plain forwards, and return their number.

        ``sequences``: tokens before the candidates of each row, None for a row without a request. If ``scored`` is
        None, guided rows are scored."""
        ids = output.candidates.token_ids.tolist()
        scored = (output.candidates.status == Status.GUIDE).tolist() if scored is None else scored
        wanted = [(i, j) for i, is_scored in enumerate(scored) if is_scored for j, t in enumerate(ids[i]) if t >= 0]
        if wanted:
            found = output.value_logits[tuple(zip(*wanted, strict=True))]
            expected = self.values([[*sequences[i], ids[i][j]] for i, j in wanted])
            torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
        return len(wanted)


class RecordedGraphs(Graphs):
    """Calls the function of the first run with a key and returns results at fixed addresses, as graphs do."""

    def __init__(self, device):
        super().__init__(device)
        self.recorded = {}

    @staticmethod
    def supports(device):
        return True

    def run(self, key, function):
        function, written = self.recorded.setdefault(key, (function, []))
        result = function()
        if not written:
            written.append(tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result))
        return tree_map(lambda x, y: x.copy_(y) if isinstance(x, torch.Tensor) else x, written[0], result)


class PaddedStep(GuidedStep):
    """A step that pads its batches and calls recorded functions, as with CUDA graphs."""

    graphs_class = RecordedGraphs


def make_step(model, *, rows=8, max_len=96, page_size=4, num_pages=None, step_class=GuidedStep, **options):
    """A step and its slots; ``model`` is a value model, a probe, None or a :class:`ValueSource`."""
    values = model if isinstance(model, ValueSource) else value_source(model)
    device = "cpu" if values.device is None else values.device
    slots = PagedSlots(rows, max_len, page_size=page_size, num_pages=num_pages, device=device)
    return step_class(values, slots, StepConfig(vocab_size=VOCAB, **options)), slots


def take_step(step, scores, tokens, table_rows, lengths, **options):
    """Prepare a step and take it; fields of its batch and its sampling are keyword arguments.

    ``drawn`` may be :data:`MOST_LIKELY`, the most likely tokens of the prepared scores."""
    batch, sampling = (
        {field: options.pop(field) for field in kind._fields if field in options} for kind in (StepBatch, Sampling)
    )
    logits, drafts = scores if sampling.get("is_logits") else None, options.pop("drafts", None)
    prepared = step.prepare(logits, StepBatch(tokens, table_rows, lengths, **batch), drafts)
    if options.get("drawn") is MOST_LIKELY:
        options["drawn"] = scores.argmax(1)
    return step.step(prepared, Sampling(**sampling), scores=scores, **options)


class Engine:
    """An engine around a guided step. A sequence is a list of tokens per request."""

    def __init__(self, step, slots):
        self.step, self.slots = step, slots
        self.device = step.device

    def tensor(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def admit(self, row, tokens, guidance, *, prompt_len, seed=0, eos=(EOS,)):
        """Reserve a request's slots and add its parameters; raises OutOfSlots."""
        self.slots.extend(row, len(tokens))
        params = parse_guidance(guidance) if isinstance(guidance, dict) else guidance
        begins = params is not None and params.start_token_ids  # without start tokens, a span is open after any prompt
        span = {"span": params.span_state(tokens[:prompt_len])} if begins else {}
        self.step.add_request(row, params, set(eos), prompt_len=prompt_len, seed=seed, **span)

    def start(self, rows, prompts, guidance, *, room=1, **options):
        """Admit requests with room for ``room`` more tokens, and compute their prompts; returns this engine."""
        for row, tokens, g in zip(rows, prompts, guidance, strict=True):
            self.admit(row, [*tokens, *[0] * room], g, prompt_len=len(tokens))
        self.prefill(rows, prompts, **options)
        return self

    def prefill(self, rows, sequences, **options):
        """Compute all tokens of new requests except the last."""
        self.step.extend(*self.prompts(rows, [tokens[:-1] for tokens in sequences]), **options)

    def prompts(self, rows, pieces, cached=None):
        """Arguments of ``GuidedStep.extend`` for the tokens after ``cached``; the first token belongs to no request."""
        lens, cached = [len(tokens) for tokens in pieces], [0] * len(rows) if cached is None else cached
        return (
            self.tensor([0] + [token for tokens in pieces for token in tokens]),
            self.tensor(rows),
            self.tensor([1 + sum(lens[:i]) for i in range(len(lens))]),
            self.tensor(lens),
            self.tensor(cached),
        )

    def new_tokens(self, sequences, new):
        """The last ``new[i]`` tokens of each sequence, in a tensor with one unused column."""
        tokens = torch.full((len(sequences), max(new) + 1), -7)
        for i, (sequence, n) in enumerate(zip(sequences, new, strict=True)):
            tokens[i, :n] = torch.tensor(sequence[len(sequence) - n :])
        return tokens.to(self.device)

    def decode(self, rows, sequences, scores, *, top_k=6, min_p=0.05, new=None, **options):
        """Take a step after each sequence has grown by one token, or by ``new[i]`` tokens."""
        lengths, row_numbers = self.tensor([len(tokens) for tokens in sequences]), self.tensor(rows)
        if new is not None:
            options["new_lens"] = self.tensor(new)
        of_each = lambda x, dtype: x if isinstance(x, torch.Tensor) else self.tensor([x] * len(rows), dtype)  # noqa: E731
        filters = dict(
            top_k=of_each(top_k, torch.int32),
            top_p=of_each(1.0, torch.float32),
            min_p=of_each(min_p, torch.float32),
            temperature=of_each(0.8, torch.float32),
        )
        return take_step(
            self.step,
            scores,
            self.tensor([tokens[-1] for tokens in sequences]) if new is None else self.new_tokens(sequences, new),
            row_numbers,
            lengths,
            **{**filters, "is_logits": True, "sample": True, **options},
        )


def random_scores(rows):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


class RandomModel:
    """A base model with scores that depend only on the last token and the length."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.by_token, self.by_length = (torch.randn(VOCAB, VOCAB, generator=generator) * 2 for _ in range(2))

    def scores(self, sequence):
        return self.by_token[sequence[-1]] + self.by_length[len(sequence)]


def run_requests(engine, sequences, guidance, steps, *, base=None, seeds=None, rows=None, **options):
    """Decode requests from their prompts; returns the sequences and the outputs of all steps.

    ``base``: the base model; if None, a :class:`RandomModel`."""
    base, rows = base or RandomModel(), list(range(len(sequences))) if rows is None else rows
    seeds = seeds or [100 + i for i in range(len(sequences))]
    for row, tokens, g, seed in zip(rows, sequences, guidance, seeds, strict=True):
        engine.admit(row, tokens + [0] * steps, g, prompt_len=len(tokens), seed=seed)
    begins = [1 + sum(len(tokens) - 1 for tokens in sequences[:i]) for i in range(len(sequences))]
    engine.prefill(rows, sequences, begins=begins)
    sequences, outputs = [list(tokens) for tokens in sequences], []
    for _ in range(steps):
        scores = torch.stack([base.scores(tokens) for tokens in sequences])
        # A copy, because a later step overwrites the output of a graph.
        outputs.append(deepcopy(engine.decode(rows, sequences, scores.to(engine.device), **options)))
        for tokens, token in zip(sequences, outputs[-1].tokens.tolist(), strict=True):
            tokens.append(token if token >= 0 else tokens[0])
    return sequences, outputs
