"""Device functions that kernels of several operators share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Wait until the launches before this one have ended, with ``OVERLAPS``; without, they have.

    Every program of a kernel launched with :func:`lenvm_kernels.ops._common.overlapping` calls this before it reads or
    writes memory, whatever it does afterwards. A launch then ends after those before it, so that who waits for the last
    waits for all."""
    if OVERLAPS:
        gdc_launch_dependents()  # the programs of the next launch may take the places that are free, and wait there
        gdc_wait()


@triton.jit
def prefetch(pointers, mask):
    """Ask for the cache lines of ``pointers`` to come into the L2 cache. Nothing waits for them.

    A kernel launched with :func:`lenvm_kernels.ops._common.overlapping` may do so before its inputs are there: who
    writes the bytes later writes them into the same cache. No interpreter knows the instruction."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred is_wanted;
        setp.ne.u32 is_wanted, $2, 0;
        @is_wanted prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,  # there has to be a result
        is_pure=False,
        pack=1,
    )


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
