"""Runs the Triton kernels of vLLM's second model runner on a CPU in Triton's interpreter, for tests."""

import importlib.util
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.backends
from triton.runtime.interpreter import InterpreterBuilder

# vLLM looks for an active backend of Triton.
driver = types.SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def with_boolean_mask(method, place):
    """vLLM's kernels use integers as masks, which the compiler accepts but the interpreter does not."""

    def masked(self, *args, **kwargs):
        mask = args[place]
        if getattr(getattr(mask, "data", None), "dtype", np.bool_) != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return method(self, *args, **kwargs)

    return masked


for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
    setattr(InterpreterBuilder, name, with_boolean_mask(getattr(InterpreterBuilder, name), place))


class TopKInTorch:
    """Replaces vLLM's kernel for top-k and top-p, which does not run in the interpreter, by its PyTorch version."""

    module = "vllm.v1.sample.ops.topk_topp_sampler"

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.HAS_TRITON = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, TopKInTorch())
