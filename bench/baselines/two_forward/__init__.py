"""The published way to take a guided step, as the baseline of speed comparisons: two forwards, and a host between them.

What the authors' fork of SGLang does (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``, in-process value model), in
plain eager PyTorch on the weights of a :class:`ValueModel`, with what the benchmarks ask for: rows with a top-k, all of
them guided by a scale (``mul``) or all to a target (``eq``). A step, in the fork's order:

1. Candidates by ``torch.topk``, then top-p and min-p, with the fork's host reads (is any row so, the widest k, the
   candidate lists).
2. Extend forward over the tokens the value model has not seen, usually one a request; its head is computed and dropped.
3. Candidate forward, under a mask that numpy builds on the host and a copy brings to the device. The candidates' slots
   are taken from the pool and given back.
4. Value head, in the model's dtype; its logits are cut into one tensor a request.
5. Guidance: a loop over requests for end-of-sequence tokens and 20 Newton iterations without a bracket, on the device;
   with a target request by request on the host instead, in fp64.
6. A clone of ``[B, V]``, into which the guided rows are scattered, and a multinomial draw from it.

Where the fork differs from this package, this does what the fork does:

- ``value_min`` does not count.
- The Newton iteration stops short of its target on some rows. Lengths are those of values clamped to 1 - 1e-9.
- One guided row takes away the filters of all rows: unguided ones are drawn from their whole vocabulary.
- Draws are the device generator's, not a request's own.

Where this differs from the fork:

- Attention reads keys and values that were gathered into ``[B, L]``, with ``scaled_dot_product_attention``; the fork's
  Triton kernel reads them in their slots. On long prefixes the fork moves fewer bytes.
- Projections of q, k, v and gate, up are one matrix each, as in the fork; norms, rotary embedding, activation and the
  cache write are PyTorch operators, where the fork has kernels. No side stream: the main one would wait for it.
- Probabilities come from one softmax; the fork also writes them over the logits.
- Requests leave where another one comes in their place. The fork drops those that are not in a step, and computes all
  their tokens again afterwards. Prompts may come ahead (:meth:`TwoForwardStep.extend`); in the fork the first step has
  them.
- Requests with neutral parameters are unguided (:func:`parse_guidance` makes them so).

``step.py`` takes the step: its candidates are those of ``candidates.py``, their values come from ``forward.py``, which
keeps keys and values in the slots of ``cache.py``, and ``guidance.py`` has the probabilities that follow.
"""

from bench.baselines.two_forward.step import TwoForwardStep as TwoForwardStep
