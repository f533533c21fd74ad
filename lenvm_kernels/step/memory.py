"""The memory that a guided step needs, by formula."""

import math

from lenvm_kernels.ops.pack_drafts import tree_columns
from lenvm_kernels.ops.ragged_linear import num_splits, square_sums_shape
from lenvm_kernels.ops.value_tree_attention import num_counters, plan_shape, workspace_shape
from lenvm_kernels.step.inputs import CANDIDATES, CANDIDATES_OF_MODEL, MAX_ROWS
from lenvm_kernels.values import LengthProbe, ValueModel


def working_bytes(
    values: ValueModel | LengthProbe | None,
    *,
    requests: int,
    max_len: int,
    vocab_size: int,
    max_candidates: int | None = None,
    max_delta: int = 16,
    max_drafts: int = 0,
    tokens: int | None = None,
) -> int:
    """Upper bound on the bytes that a step or a :meth:`GuidedStep.extend` allocates while it runs.

    An engine must reserve memory for both, each with ``max_requests``. They never run at once but cannot share memory:
    with graphs, the memory of the step stays allocated; without graphs, torch's allocator keeps the freed blocks of
    both, and releasing them takes a host-device sync. In addition, the cache of a :class:`GuidedStep` with ``N`` layers
    and ``S`` slots always has ``2 N S Hkv D e`` bytes.

    Each bound is the sum of

    - ``T (e (2 H + I + 2 (Hq + 2 Hkv) D) + 4 P H + 4 G + 6 D + 64)``, with ``P`` partial sums over ``I``, at
      most 5 or ``I / H`` (0 if there is only one) and ``G = H / 64`` groups of squares (:func:`ragged_linear`);
    - ``4 X W Hq (D + 1) + 32 N + 8 B Hkv``, with ``X <= 16`` splits of the cached tokens for the ``W <= T`` tokens
      with several splits, and ``N <= 1 + X (T + B)`` plan rows (:func:`value_tree_attention`);
    - ``B (1 + D) (V / 16 + 320 K + 64)`` for the candidates.

    A probe takes the last term and ``B (1 + D) M (e + 4 P)`` for the ``M`` columns of its projection.

    Args:
        values: a value model has the dimensions ``H``, ``I``, ``Hq``, ``Hkv``, ``D`` and ``e`` bytes per element. If
            None, only the candidates take memory.
        requests: B; a step computes at most 512 requests at once.
        max_len: maximum tokens of a row of the slot table.
        vocab_size: V.
        max_candidates: K of a step. If None, the default of a :class:`StepConfig`.
        max_delta: M of a step.
        max_drafts: D of a step.
        tokens: T; ``chunk_tokens`` for an extend. If None, ``B (M + D + (1 + D) K)`` as in a step.
    """
    is_model = isinstance(values, ValueModel)
    k = 0 if tokens is not None else max_candidates or (CANDIDATES_OF_MODEL if is_model else CANDIDATES)
    requests = min(requests, MAX_ROWS) if tokens is None else requests
    request_bytes = requests * (1 + max_drafts) * (vocab_size // 16 + 320 * k + 64)
    if isinstance(values, LengthProbe):
        return request_bytes + requests * (1 + max_drafts) * values.row_bytes
    if values is None:
        return request_bytes
    config = values.config
    t = requests * (max_delta + tree_columns(max_drafts, k)) if tokens is None else tokens
    heads = config.num_heads + 2 * config.num_kv_heads
    parts = num_splits(config.hidden_size, config.intermediate_size)
    sizes = (t, requests, config.num_heads // config.num_kv_heads, max_len)
    elements = 2 * config.hidden_size + config.intermediate_size + 2 * heads * config.head_dim
    token_bytes = elements * values.dtype.itemsize + 6 * config.head_dim + 64
    token_bytes += 4 * parts * config.hidden_size if parts > 1 else 0
    token_bytes += 4 * square_sums_shape(1, config.hidden_size)[0]
    attention_bytes = 4 * math.prod(workspace_shape(*sizes)) * config.num_heads * (config.head_dim + 1)
    attention_bytes += 4 * (math.prod(plan_shape(*sizes)) + num_counters(requests, config.num_kv_heads))
    return t * token_bytes + attention_bytes + request_bytes
