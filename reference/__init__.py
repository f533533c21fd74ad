"""Pure-PyTorch references of the operators, with the same file names as in ``lenvm_kernels.ops``.

They define what the kernels must compute, run on any device, and support inputs up to fp64. Arguments are checked by
the public functions in ``lenvm_kernels.ops`` only.
"""
