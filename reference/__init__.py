"""Pure-PyTorch references of the operators: file for file the names of ``lenvm_kernels.ops``.

They define what the kernels must compute, run anywhere, and follow the dtype of their inputs up to fp64. They check
nothing: the public functions in ``lenvm_kernels.ops`` do.
"""
