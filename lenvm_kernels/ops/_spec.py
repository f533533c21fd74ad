"""Specifications of an operator's tensor arguments, one line per argument: parsed once, checked in each call.

    q: float [T, Hq, D]           any floating-point dtype. T, Hq and D are the sizes of the first tensor with them
    k_new: =q [T, Hkv, D]         dtype of q
    bias?: =q|float32 [2 * D]     dtype of q or, if that has 16 bits, fp32; may be None
    sums: single [*, T]           fp32 (also fp64 on the reference); any number of rows
    ends: int32 [R, E+]           at least one column
    probs: float32 [B, K=2**n]    a power of two up to 64
    bins: float32 [N=1..64]       1 to 64
    slots: int [T]                int32 or int64
    token_ids: int32 [T] contiguous

The last dimension must be contiguous, unless the line ends with ``contiguous`` (all dimensions) or ``strided`` (none).
An argument may be a named tuple of :mod:`lenvm_kernels.types`, which declares dtypes and shapes of its fields:

    candidates: Candidates of topk_candidates (token_ids, status) contiguous
    table: GuidanceColumns (mode, scale) strided single

Parentheses list the fields that are read; without them, all are. A shape applies to all fields; ``single`` accepts fp64
for fp32 fields on the reference.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

import lenvm_kernels.types as types
from lenvm_kernels.ops._common import COLUMNS, FLOATS, INT_DTYPES, SINGLES, check_tensor, resolve_backend

Size = Callable[[dict[str, int]], int]

_LINE = re.compile(r"(\w+)(\??): (=?[\w|]+)(?: of (\w+))?(?: \(([\w, ]+)\))?(?: \[([^]]*)\])?([ a-z]*)")
# Accepted dtypes by backend.
_DTYPES: dict[str, dict[str, tuple[torch.dtype, ...]]] = {
    "float": FLOATS,
    "single": SINGLES,
    "int": dict.fromkeys(FLOATS, INT_DTYPES),
}


class _Rule(NamedTuple):
    """Check of one tensor."""

    name: str  # in messages
    argument: int  # index of the argument
    field: str  # field of the argument, or empty
    is_optional: bool
    dtypes: tuple[torch.dtype, ...]
    like: int  # index of an argument with the accepted dtype, or -1; for 16 bits, ``dtypes`` are also accepted
    dims: tuple[str, ...]  # name or expression of each size
    expressions: tuple[tuple[str, Size], ...]  # the dims that are expressions
    limits: tuple[tuple[int, str, Callable[[int], bool]], ...]  # dimension, accepted sizes in words, and as a function
    layout: str  # contiguous, strided or empty


class Spec:
    """Checks of an operator's arguments, see the module's docstring."""

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[_Rule]] = {backend: [] for backend in FLOATS}
        self._kinds: list[tuple[str, int, bool, Any, str]] = []
        self.types: dict[str, Any] = {}  # types of the arguments: Tensor or a named tuple, or None
        for line in text.strip().splitlines():
            self._add(line.strip())

    def _add(self, line: str) -> None:
        match = _LINE.fullmatch(line)
        assert match, f"no line of a specification: {line!r}"
        name, optional, dtype, producer, fields, shape, flags = match.groups()
        argument, kind = len(self.types), getattr(types, dtype, None)
        self.types[name] = (kind or Tensor) | None if optional else kind or Tensor
        if kind is None:
            self._add_rule((name, argument, "", bool(optional)), dtype, shape, flags)
            return
        wanted = f"the {dtype} of {producer}" if producer else dtype
        self._kinds.append((name, argument, bool(optional), kind, wanted))
        for field in fields.split(", ") if fields else kind._fields:
            declared, own_shape = FIELD_FORMS[kind][field]
            word = "single" if "single" in flags and declared is torch.float32 else str(declared).removeprefix("torch.")
            layout = flags.replace("single", "")
            if "," in own_shape:  # rows of a list are contiguous
                layout = layout.replace("strided", "")
            self._add_rule((f"{name}.{field}", argument, field, bool(optional)), word, shape or own_shape, layout)

    def _add_rule(self, subject: tuple[str, int, str, bool], dtype: str, shape: str, layout: str) -> None:
        """Add the check of ``subject``, the first fields of the :class:`_Rule`."""
        like, own = -1, dtype
        if dtype.startswith("="):
            other, _, own = dtype[1:].partition("|")
            like = list(self.types).index(other)
        sizes = list(enumerate(shape.split(", ")))
        limits = tuple((i, *_limit(size)) for i, size in sizes if size[-1] == "+" or "=" in size)
        dims = tuple(f"{subject[0]}.{i}" if size == "*" else _unlimited(size) for i, size in sizes)
        expressions = tuple((dim, expression(dim)) for dim in dims if not re.fullmatch(r"\w*[A-Za-z]\w*(\.\w+)*", dim))
        for backend, rules in self._rules.items():
            dtypes = _DTYPES[own][backend] if own in _DTYPES else (getattr(torch, own),) if own else ()
            rules.append(_Rule(*subject, dtypes, like, dims, expressions, limits, layout.strip()))

    def check(
        self, backend: str, *arguments: Any, device: torch.device | None = None, sizes: Mapping[str, int] | None = None
    ) -> tuple[str, dict[str, int]]:
        """Check all arguments, in the order of the lines. Return the resolved backend, and the sizes by name.

        Args:
            backend: as passed to the operator.
            arguments: all arguments of the specification.
            device: device of the tensors. If None, the first tensor's device.
            sizes: sizes that no tensor has.

        Raises:
            TypeError: an argument is not a tensor or named tuple.
            ValueError: any other violation. The message has the argument, and the accepted and the actual values.
        """
        for name, argument, is_optional, kind, wanted in self._kinds:
            fields = arguments[argument]
            if not isinstance(fields, kind) and not (fields is None and is_optional):
                raise TypeError(f"{name} must be {wanted}, got {type(fields).__name__}")
        first = self._rules["reference"][0]
        first_tensor = getattr(arguments[0], first.field) if first.field else arguments[0]
        backend = resolve_backend(backend, first.name, first_tensor)
        if device is None and isinstance(first_tensor, Tensor):
            device = first_tensor.device
        bound = dict(sizes or {})
        for rule in self._rules[backend]:
            name, argument, field, is_optional, dtypes, like, dims, expressions, limits, layout = rule
            x: Any = getattr(arguments[argument], field, None) if field else arguments[argument]
            if x is None and is_optional:
                continue
            if like >= 0:
                dtype = arguments[like].dtype
                dtypes = (dtype, *dtypes) if dtype.itemsize == 2 else (dtype,)
            for dim, size_of in expressions:
                bound[dim] = size_of(bound)
            # A step without a CUDA graph checks a thousand tensors, so :func:`check_tensor` is only for failures.
            shape = tuple(map(bound.get, dims))
            is_right = isinstance(x, Tensor) and x.dtype in dtypes and x.device == device
            if is_right and x.shape != shape:
                is_right = None in shape and x.dim() == len(dims)
                for dim, size in zip(dims, x.shape, strict=False):
                    is_right = is_right and bound.setdefault(dim, size) == size
            if not is_right or not (layout or x.stride(-1) == 1):
                check_tensor(name, x, dtypes=dtypes, shape=shape, device=device, unit_stride=not layout)
            if layout == "contiguous" and not x.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tuple(x.stride())}")
            for i, accepted, accepts in limits:
                if not accepts(x.shape[i]):
                    part = "element" if len(dims) == 1 else ("row", "column")[i]
                    raise ValueError(f"{name} must have {accepted.format(part=part, size=x.shape[i])}")
        return backend, bound


def _unlimited(size: str) -> str:
    return size.split("=")[0].removesuffix("+")


def _limit(size: str) -> tuple[str, Callable[[int], bool]]:
    """The accepted values of a size, in words and as a function."""
    if size.endswith("+"):
        return "at least one {part}, got none", lambda n: n > 0
    if size.endswith("=2**n"):
        return f"a power of two up to {COLUMNS[-1]} {{part}}s, got {{size}}", lambda n: n in COLUMNS
    least, most = map(int, size.partition("=")[2].split(".."))
    return f"{least} to {most} {{part}}s, got {{size}}", lambda n: least <= n <= most


def expression(text: str) -> Size:
    """The function that computes a size such as ``N * (1 + D)`` from sizes by name."""
    body = re.sub(r"[A-Za-z_]\w*", r'sizes["\g<0>"]', text)
    # With a file name, because torch.compile does not trace functions without one.
    return eval(compile(f"lambda sizes: {body}", __file__, "eval"))


def _forms(kind: type) -> dict[str, tuple[Any, str]]:
    """Dtype (or the word for several dtypes) and shape of each annotated field of a named tuple."""
    forms: dict[str, tuple[Any, str]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        form = getattr(hint, "__metadata__", [""])[0]
        if isinstance(form, types.Column):
            forms[name] = form.dtype, "R, *" if form.is_list else "R"
        elif form:
            dtype, _, shape = form.partition(" ")
            forms[name] = dtype if dtype in _DTYPES else getattr(torch, dtype), shape[1:-1]
    return forms


# All named tuples of types.py. Computed at import, because torch.compile does not trace it.
FIELD_FORMS: dict[Any, dict[str, tuple[Any, str]]] = {
    kind: _forms(kind) for kind in vars(types).values() if isinstance(kind, type) and hasattr(kind, "_fields")
}
_SIZES = {
    kind: {name: [expression(_unlimited(size)) for size in shape.split(", ")] for name, (_, shape) in forms.items()}
    for kind, forms in FIELD_FORMS.items()
    if kind is not types.GuidanceColumns
}


def empty(
    kind: Any,
    device: torch.device,
    sizes: dict[str, int],
    without: Collection[str] = (),
    single: torch.dtype = torch.float32,
) -> Any:
    """A named tuple of uninitialized tensors, with the dtypes and shapes declared in :mod:`lenvm_kernels.types`.

    Fields of ``without`` get their defaults. fp32 fields have the dtype ``single``."""
    fields = {}
    for name, shape in _SIZES[kind].items():
        if name not in without:
            declared = FIELD_FORMS[kind][name][0]
            dtype = single if declared is torch.float32 else declared
            fields[name] = torch.empty([size_of(sizes) for size_of in shape], dtype=dtype, device=device)
    return kind(**fields)
