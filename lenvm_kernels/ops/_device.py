"""Compilation of kernels, and device functions shared by several operators."""

import inspect
from collections.abc import Callable

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def kernel(specialized: str = "") -> Callable:
    """:func:`triton.jit` for kernels that :func:`operator` functions launch.

    Callers pass slices, and batches of any size. Addresses, strides and sizes must not trigger a recompilation, so
    Triton may only specialize on the parameters named in ``specialized``, on constants and on members of tuples.
    """

    def decorate(function: Callable) -> Callable:
        parameters = inspect.signature(function).parameters.values()
        names = [x.name for x in parameters if x.annotation is not tl.constexpr and x.name not in specialized.split()]
        pointers = [name for name in names if name.endswith("_ptr")]
        numbers = [name for name in names if not name.endswith("_ptr")]
        return triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)(function)

    return decorate


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Wait until the previous launches have ended. Without ``OVERLAPS``, they have already ended.

    Every program of a kernel launched with :func:`lenvm_kernels.ops._common.overlapping` must call this before it
    accesses memory, even if it then exits. A launch therefore ends after the previous launches, so waiting for the last
    launch waits for all."""
    if OVERLAPS:
        gdc_launch_dependents()  # lets programs of the next launch start on free resources and wait
        gdc_wait()


@triton.jit
def prefetch(pointers, mask):
    """Prefetch the cache lines of ``pointers`` into L2, without waiting for them.

    A kernel launched with :func:`lenvm_kernels.ops._common.overlapping` may call this before its inputs are written,
    because later writes go through the same cache. The interpreter does not support the instruction."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred is_wanted;
        setp.ne.u32 is_wanted, $2, 0;
        @is_wanted prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,  # Triton requires a result
        is_pure=False,
        pack=1,
    )


@triton.jit
def arrives_last(counter_ptr, arrivals):
    """Whether this is the last of ``arrivals`` programs to call this; it may then read all stores of the others.

    The counter must be 0 before the first arrival, and is 0 again after the last."""
    # The barrier orders the stores of all threads before the update, which one thread makes.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")  # a plain store would not be ordered with the atomic updates
    return is_last
