"""In place of SGLang's compiled kernels, of which there is no build for a CPU: what is missing says so when called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise RuntimeError(f"sgl_kernel.{name} was called, which has no CPU build")

    return missing
