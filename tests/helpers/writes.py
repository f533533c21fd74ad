"""Which operators write."""

from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """Notes the names of operators that write to a tensor they are given."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable:
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))
