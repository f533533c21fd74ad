"""Which operators run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes the names of operators: of all, and of those that write to a tensor they are given."""

    def __init__(self):
        super().__init__()
        self.names, self.writes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        if function._schema.is_mutable:
            self.writes.append(function._schema.name)
        return function(*args, **(kwargs or {}))
