"""Encodes bfloat16 matrices into the tensors of a compressed format, and decodes them, with numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.core.codecs import StreamError
from qdsl.jobs.compress import df11
from qdsl.jobs.compress.exponent_forms import FIX3, FIX4, HLANE

FORMS = {"hlane": HLANE, "fix4": FIX4, "fix3": FIX3}
STREAM_NAMES = {"df11": df11.NAMES, **{name: form.tensor_names for name, form in FORMS.items()}}
DTYPES = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64"}
NUMPY = {"U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "BF16": "<u2"}

Tensors = Mapping[str, NDArray[Any]]
Shape = tuple[int, ...]


def encode(format: str, matrices: Sequence[NDArray[np.uint16]], threads: int) -> dict[str, NDArray[Any]]:
    """The tensors that encode bit patterns [..., N, K]; several matrices only in DF11.  Raises StreamError for what the format
    cannot encode.
    """
    if format == "df11":
        return df11.encode([one.reshape(-1) for one in matrices], threads)
    [matrix] = matrices
    return FORMS[format].encode(matrix.reshape(as_rows(matrix.shape)))


def decode(format: str, tensors: Tensors, shapes: Sequence[Shape], threads: int | None, *, every: bool = False,
           ) -> list[NDArray[np.uint16]]:
    """The decoded bit patterns, [n] for each matrix.  every: also check tensors that only other decoders read.

    Raises StreamError for tensors that are damaged, or of matrices of other shapes.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if format == "df11":
        splits = np.cumsum(sizes)[:-1]
        if not np.array_equal(tensors["split_positions"], splits) or tensors["sign_mantissa"].size != sum(sizes):
            raise StreamError(f"split_positions are not those of matrices {', '.join(str(list(shape)) for shape in shapes)}")
        return np.split(df11.decode(tensors, threads, every=every), splits)
    [shape] = shapes
    return [FORMS[format].decode(tensors, as_rows(shape)).reshape(-1)]


def as_rows(shape: Shape) -> tuple[int, int]:
    """The matrix shape of a tensor: experts [E, N, K] are one matrix of E * N rows."""
    return math.prod(shape[:-1]), shape[-1]
