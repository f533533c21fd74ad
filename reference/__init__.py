"""Pure-PyTorch references of the operators, with the same file names as in ``lenvm_kernels.ops``.

The references define the results of the kernels, run on any device, and support inputs up to fp64. Arguments are only
checked by the public functions in ``lenvm_kernels.ops``.
"""
