"""What a layer does to its input before the product, or to its output after it, as data: factors, norms and rotations.

    y = output(linear(input(x)))      x: [..., K], y: [..., N]

Transforms of one side are applied in the order of their list.  A permutation of columns is part of a format, as its index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

INPUT, OUTPUT = "input", "output"
KINDS = ("multiply", "divide", "rms_norm", "rotate")
DTYPES = ("float64", "float32", "bfloat16", "float16")           # in which rotations are computed
MOST_BUILT = 1 << 15                                             # columns of a Hadamard matrix that is built


@dataclass(frozen=True, slots=True)
class Transform:
    """One transform of a layer.

    kind: 'multiply' or 'divide' by a tensor [K]; 'rms_norm' with a weight [K]; 'rotate': blocks of `size` elements times a
    matrix.  side: 'input' or 'output'.  tensor: its name in the checkpoint.  Without one a rotation is the Hadamard matrix of
    Sylvester, whose columns have length 1, and a norm has a weight of ones.
    base: of the built matrix, whose Kronecker product with Sylvester's it is: 1, or a size in hadamard.json.
    size: of the blocks.  normalized: whether the matrix is divided by sqrt(size).  transposed: whether it is transposed.
    perm: name of an index by which rows and columns of the matrix are permuted, '' for none.
    dtype: the dtype in which a rotation is computed, '' for that of x.  eps: of a norm.  repeats: tensors that only state what
    the fields above do.
    """

    kind: str
    side: str = INPUT
    tensor: str = ""
    size: int = 0
    normalized: bool = False
    transposed: bool = False
    perm: str = ""
    base: int = 1
    dtype: str = "float32"
    eps: float = 0.0
    repeats: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors in the checkpoint, without those that repeat."""
        return tuple(name for name in (self.tensor, self.perm) if name)

    @property
    def label(self) -> str:
        """The transform in a few words: 'rotate 32', 'divide by mlp.act.scales'."""
        words = {"multiply": "multiply by", "divide": "divide by", "rms_norm": "RMS norm", "rotate": f"rotate {self.size}"}
        what = words[self.kind]
        side = f"{self.side} " if self.side == OUTPUT else ""
        return f"{side}{what} {self.tensor}".strip()

    def data(self) -> dict[str, Any]:
        """The transform as JSON: what differs from the defaults."""
        own = asdict(self)
        return {field.name: own[field.name] for field in fields(self) if field.name == "kind" or own[field.name] != field.default}


@cache
def base_matrices() -> dict[int, str]:
    """Hadamard matrices whose size is no power of two -> their elements by rows as bits in hexadecimal digits, 1 for +1.

    Those of N. J. A. Sloane's library that QuaRot, SpinQuant, Quark and AutoRound take, in their order.
    """
    data = json.loads(Path(__file__).with_name("hadamard.json").read_text())
    return {int(size): digits for size, digits in data.items()}


def base_of(size: int) -> int:
    """The base of the Hadamard matrix of a size: 1 for powers of two and where no base fits."""
    fits = [base for base in base_matrices() if size % base == 0 and (size // base) & (size // base - 1) == 0]
    return fits[0] if fits and size & (size - 1) else 1


def transform_of(data: Any) -> Transform:
    """A transform from its JSON.  Raises ValueError with what is wrong."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is no object")
    types = {field.name: type(field.default) if field.name != "kind" else str for field in fields(Transform)}
    for name, value in data.items():
        if name not in types:
            raise ValueError(f"unknown key {name!r}; known are {', '.join(types)}")
        if name == "repeats" and isinstance(value, list) and all(isinstance(own, str) for own in value):
            continue
        if type(value) is not types[name] and not (types[name] is float and type(value) is int):
            raise ValueError(f"{name} = {value!r} is no {types[name].__name__}")
    if data.get("kind") not in KINDS:
        raise ValueError(f"kind {data.get('kind')!r} is none of {', '.join(KINDS)}")
    if data.get("dtype", "") not in ("", *DTYPES):
        raise ValueError(f"dtype {data['dtype']!r} is none of {', '.join(DTYPES)}")
    if data.get("side", INPUT) not in (INPUT, OUTPUT):
        raise ValueError(f"side {data['side']!r} is none of {INPUT}, {OUTPUT}")
    return Transform(**{**data, "repeats": tuple(data.get("repeats", ()))})


def why_unfit(transform: Transform, extent: int, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why a transform does not fit a side of so many elements; '' where it does.  shapes: of its tensors, by name."""
    if missing := [name for name in transform.tensors if name not in shapes]:
        return f"there is no tensor '{missing[0]}'"
    size = transform.size if transform.kind == "rotate" else extent
    if size < 1 or extent % size:
        return f"blocks of {size} do not divide {extent} elements"
    matrix = transform.kind == "rotate"
    if not transform.tensor:
        blocks = size // transform.base if transform.base in (1, *base_matrices()) and size % transform.base == 0 else 0
        if matrix and (blocks < 1 or blocks & (blocks - 1) or size > MOST_BUILT):
            return f"a Hadamard matrix of {size} columns is not stored, and none of its size is built"
        return "" if matrix or transform.kind == "rms_norm" else f"'{transform.kind}' has no tensor"
    wanted = {transform.tensor: (size, size) if matrix else (size,), transform.perm: (size,)}
    for name in transform.tensors:
        shape = tuple(shapes[name])
        if shape != wanted[name] and [own for own in shape if own != 1] != [own for own in wanted[name] if own != 1]:
            return f"'{name}' is {list(shape)}, and {list(wanted[name])} is needed"
    return ""
