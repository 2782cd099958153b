"""Rows of numbers as they are stored, and their products with few queries, read in place by a few lines of C.

A decoded token meets three or four queries with thousands of rows: nothing but reading. torch's products of that shape
read at less than half of the memory's speed, and rows in another form (16-bit numbers, packed symbols) have to be
written out as numbers before they can be multiplied at all. `rows.c` reads each row once, in the form it has, and
multiplies it while it lies in the processor's nearest cache.

It is compiled when the package is installed, where there is a C compiler, and runs on torch's own threads. Where it is
missing, and for whatever it does not cover (another device, many queries, gradients), `matmul` does the same in torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int8
from torch import Tensor

MOST_QUERIES = 16
"""Up to here the C code is faster than torch or nearly as fast, with 32 no longer: docs/benchmarks.md."""

_MOST_WIDTH = 512
_LANES = 8
_TASK_TOKENS = 256
_MOST_PLANES, _MOST_SYMBOLS = 4, 2
_NAMES = {torch.float32: "float", torch.float64: "double"}
_PLAIN, _BFLOAT16, _SYMBOLS, _NIBBLES = range(4)

Logarithms: TypeAlias = Int8[Tensor, "heads tokens 1"]
"""Scales of rows, as base-2 logarithms in eighths."""


class Rows(NamedTuple):
    """Rows ``[heads, tokens, width]`` in the form they have."""

    kind: int
    width: int
    planes: Sequence[Tensor]
    """What they are stored in, each ``[heads, tokens, elements]``."""
    bits: Sequence[int] = ()
    """Of a symbol, in each plane; a plane of 8 begins another kind of symbol."""
    tables: Sequence[Tensor] = ()
    """The numbers of each kind of symbol, ``[symbols, numbers]``."""


@runtime_checkable
class Packed(Protocol):
    """Rows that are not stored as numbers."""

    def rows(self, dtype: torch.dtype) -> Rows:
        """What the C code reads, with tables of `dtype`."""

    def decode(self, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        """The numbers themselves."""


def symbols(planes: Sequence[Tensor], bits: Sequence[int], width: int, tables: Sequence[Tensor]) -> Rows:
    """Rows of symbols, packed as `codecs.packing` does, each of which stands for some numbers."""
    return Rows(_SYMBOLS, width, planes, bits, tables)


def nibbles(codes: Int8[Tensor, "heads tokens bytes"]) -> Rows:
    """Rows of bytes: their low halves less 7.5, then their high halves, which are signed, plus 0.5."""
    return Rows(_NIBBLES, 2 * codes.shape[-1], [codes])


def token_scales(logarithms: Int8[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The scales whose logarithms these are."""
    return torch.exp2(logarithms.to(dtype) * 0.125)


def scores(
    query: Float[Tensor, "heads queries width"], keys: Tensor | Packed, scales: Logarithms | None = None
) -> Float[Tensor, "heads queries tokens"] | None:
    """Products of every query with every row times its scale; None where the C code does not cover that."""
    library = _library()
    rows = None if library is None else _covered(query, keys, scales)
    if library is None or rows is None or query.shape[2] != rows.width:
        return None
    heads, queries, _ = query.shape
    tokens = rows.planes[0].shape[1]
    query = query.contiguous()
    products = query.new_empty(heads, queries, tokens)
    library.scores[query.dtype](
        _arguments(rows, scales, query.dtype),
        query.data_ptr(),
        products.data_ptr(),
        heads,
        queries,
        tokens,
        torch.get_num_threads(),
    )
    return products


def weighted_sum(
    weights: Float[Tensor, "heads queries tokens"], values: Tensor | Packed, scales: Logarithms | None = None
) -> Float[Tensor, "heads queries width"] | None:
    """Sums of the rows times their scales, by each query's weights; None where the C code does not cover that."""
    library = _library()
    rows = None if library is None else _covered(weights, values, scales)
    if library is None or rows is None or weights.stride(2) != 1:
        return None
    heads, queries, tokens = weights.shape
    if tokens != rows.planes[0].shape[1]:
        return None
    sums = weights.new_empty(heads, -(-tokens // _TASK_TOKENS), queries, rows.width)
    library.sums[weights.dtype](
        _arguments(rows, scales, weights.dtype),
        weights.data_ptr(),
        (ctypes.c_int64 * 2)(weights.stride(0), weights.stride(1)),
        sums.data_ptr(),
        heads,
        queries,
        tokens,
        torch.get_num_threads(),
    )
    return sums.sum(1)


def is_compiled() -> bool:
    """Whether the C code is there."""
    return _library() is not None


def _covered(numbers: Tensor, rows: Tensor | Packed, scales: Tensor | None) -> Rows | None:
    """The rows, if the C code can multiply them with `numbers`, ``[heads, queries, ...]``.

    What does not fit is left to torch, which says so: the C code would read past the end.
    """
    if numbers.device.type != "cpu" or numbers.dtype not in _NAMES or not 0 < numbers.shape[1] <= MOST_QUERIES:
        return None
    if not isinstance(rows, Tensor):
        found = rows.rows(numbers.dtype)
    elif rows.dtype == numbers.dtype:
        found = Rows(_PLAIN, rows.shape[2], [rows])
    elif rows.dtype == torch.bfloat16:
        found = Rows(_BFLOAT16, rows.shape[2], [rows])
    else:
        return None
    return found if _is_readable(numbers, found, scales) else None


def _is_readable(numbers: Tensor, rows: Rows, scales: Tensor | None) -> bool:
    """Whether sizes, places and strides are such as the C code reads."""
    if rows.width % _LANES or rows.width > _MOST_WIDTH or len(rows.planes) > _MOST_PLANES:
        return False
    if len(rows.tables) > _MOST_SYMBOLS or max(rows.bits, default=8) > 8:
        return False
    heads, tokens = numbers.shape[0], rows.planes[0].shape[1]
    for tensor in (*rows.planes, *(() if scales is None else (scales,))):
        if not tokens or tensor.shape[:2] != (heads, tokens) or (tensor.stride(2) != 1 and tensor.shape[2] != 1):
            return False
    # Subclasses stand for tensors that are traced, or are nowhere.
    given = (numbers, *rows.planes)
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return not needs_gradients and all(type(tensor) is Tensor for tensor in given)


# ``struct rows``, member by member.
_STRUCT = struct.Struct(f"={3 + 4 * _MOST_PLANES + 1 + 2 * _MOST_SYMBOLS + 4}q")
_ZEROS = (0,) * _MOST_PLANES


def _arguments(rows: Rows, scales: Tensor | None, dtype: torch.dtype) -> bytes:
    """``struct rows``, with addresses in `rows` and `scales`, which must outlive it."""
    kind, width, planes, bits, tables = rows
    no_plane, no_table = _ZEROS[len(planes) :], _ZEROS[len(tables) : _MOST_SYMBOLS]
    sizes = [(plane.data_ptr(), plane.element_size(), plane.stride()) for plane in planes]
    scale = (0, 0, 0, 0)
    if scales is not None:
        scale = (scales.data_ptr(), scales.stride(0), scales.stride(1), _powers(dtype).data_ptr())
    return _STRUCT.pack(
        *(kind, width, len(planes)),
        *([address for address, _, _ in sizes]),
        *no_plane,
        *([strides[0] * size for _, size, strides in sizes]),
        *no_plane,
        *([strides[1] * size for _, size, strides in sizes]),
        *no_plane,
        *(bits or _ZEROS[: len(planes)]),
        *no_plane,
        len(tables),
        *([table.data_ptr() for table in tables]),
        *no_table,
        *([table.shape[1] for table in tables]),
        *no_table,
        *scale,
    )


@lru_cache(maxsize=2)
def _powers(dtype: torch.dtype) -> Float[Tensor, "256"]:
    return token_scales(torch.arange(-128, 128).to(torch.int8), dtype)


class _Library(NamedTuple):
    """The compiled functions, by the dtype of the numbers."""

    scores: dict[torch.dtype, Any]
    sums: dict[torch.dtype, Any]


@lru_cache(maxsize=1)
def _library() -> _Library | None:
    """The compiled code, or None where it was not compiled or finds no threads of torch's to run on."""
    found = find_spec("hf_kvcache.attention._rows")
    if found is None or found.origin is None:
        return None
    try:
        compiled = ctypes.CDLL(found.origin)
    except OSError:
        return None
    library = _Library({}, {})
    sizes = [ctypes.c_int64] * 3 + [ctypes.c_int32]
    for functions, name, pointers in ((library.scores, "scores", 3), (library.sums, "sums", 4)):
        for dtype, number in _NAMES.items():
            functions[dtype] = getattr(compiled, f"{name}_{number}")
            functions[dtype].argtypes, functions[dtype].restype = [ctypes.c_void_p] * pointers + sizes, None
    return library
