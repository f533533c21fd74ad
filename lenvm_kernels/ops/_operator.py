"""The one way from an operator's public function to its kernels or its reference."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lenvm_kernels.ops._common import INTERPRETED

if INTERPRETED:
    from lenvm_kernels.ops._interpreter import repair_interpreter

    repair_interpreter()

Launch = Callable[..., None]
Operands = ParamSpec("Operands")


def operator(
    *, mutates: Sequence[str], reference: Launch, name: str | None = None
) -> Callable[[Callable[Operands, None]], Callable[Concatenate[str, Operands], None]]:
    """Make an operator of the function that launches its kernels.

    The function takes tensors, numbers, and ``None`` for what is optional, all by position and annotated. The first is
    a tensor it writes; it returns nothing. What comes of it takes the same after the backend, ``triton`` or
    ``reference``. It

    - makes the GPU of the first tensor the current one, because that is where Triton launches;
    - is ``torch.ops.lenvm.<name>`` to whoever records operators instead of running them: ``torch.compile``,
      ``torch.export``, ``make_fx``. What they recorded does the same when it runs. Others do not pay for the
      dispatcher.

    Args:
        mutates: names of the tensors that are written.
        reference: the function for the reference backend; takes the same arguments.
        name: of the operator; ``None`` is that of the function's module.
    """

    def decorate(launch: Launch) -> Launch:
        def execute(backend: str, *operands: Any) -> None:
            if backend == "reference":
                reference(*operands)
            elif operands[0].is_cuda:
                with torch.cuda.device_of(operands[0]):
                    launch(*operands)
            else:
                launch(*operands)

        schema = torch.library.infer_schema(launch, mutates_args=mutates)
        library_op = torch.library.custom_op(
            f"lenvm::{name or launch.__module__.rpartition('.')[2]}",
            execute,
            mutates_args=mutates,
            schema=schema.replace("(", "(str backend, ", 1),
        )
        library_op.register_fake(lambda *backend_and_operands: None)

        @functools.wraps(launch)
        def call(backend: str, *operands: Any) -> None:
            written = operands[0]
            # Whether operators are recorded here, or have no data to run on (``FakeTensor``).
            if (
                is_dynamo_compiling()
                or type(written) is not Tensor
                or (is_in_torch_dispatch_mode() and get_proxy_mode() is not None)
            ):
                library_op(backend, *operands)
            else:
                execute(backend, *operands)

        return call

    return decorate
