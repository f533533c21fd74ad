"""Device functions that kernels of several operators share."""

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter_ptr, arrivals):
    """Whether this is the last of ``arrivals`` programs to come here; it may then read what the others stored before.

    The counter has to be 0 before the first arrives, and is 0 again after the last."""
    # The update is made by one thread. The barrier orders the stores of the others before it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")  # a plain store has no order among the atomic updates
    return is_last
