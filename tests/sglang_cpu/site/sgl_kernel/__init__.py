"""Replaces SGLang's compiled kernels, which have no CPU build. Each raises an error when it is called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build")

    return missing
