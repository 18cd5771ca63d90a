"""Side branches of a weight: terms that are added to its decoded numbers, stored in tensors of their own.

    low_rank      w[n, k] += up[n, r] * down[r, k], one r after the other (SVDQuant, LoftQ, LQER)
    csr           w[n, k] += value[e] for the entry e of row n in column k (SqueezeLLM, SpQR)
    dense_rows    w[row[r], k] += row_value[r, k], one r after the other

Every product and every sum is rounded to float32.  A weight with a branch is the sum of `packed.base` and the branch; both are
sliced, gathered and joined alike (branch_pieces.py).  Kinds work on fields, matrices and lists by name; a BranchTensor stores
one field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor

from qdsl.core.shapes import Axis, axis, shape_in_files
from qdsl.core.slices import fill
from qdsl.runtime.weight.branch_kinds import KINDS, Fields
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.match import stored_dtype

Shape = tuple[int, int]
INDEX, HALF = "i32", 16                                          # the type of an index; bits of half a word


@dataclass(frozen=True, slots=True, init=False)
class BranchTensor:
    """The tensor that stores a branch's field, a list or a matrix.

    digits: extents of the digits of its positions, slowest first.  order: for the field's rows and columns, the indices of their
    digits.  Both are empty if the field is the tensor, or half of its words: from bit `at`, of type `kind`.
    """

    name: str
    kind: str
    axes: tuple[Axis, ...]
    digits: tuple[Axis, ...]
    order: tuple[tuple[int, ...], ...]
    at: int | None

    def __init__(self, name: str, dtype: str, *axes: str, digits: Sequence[str] = (), order: Sequence[Sequence[int]] = (),
                 half: tuple[str, int] | None = None, **_: object) -> None:
        kind, at = half or (dtype, None)
        fill(self, name=name, kind=kind, at=at, axes=tuple(map(axis, axes)), digits=tuple(map(axis, digits)),
             order=tuple(map(tuple, order)))

    def dtype(self, params: Mapping[str, int | str]) -> torch.dtype:
        return stored_dtype(str(params.get(self.kind, self.kind)))

    def step(self, dim: str) -> int:
        """The step of N or K at whose multiples the field can be sliced."""
        return lcm(*(digit.by({}) for digit in self.digits if digit.dim == dim))

    def unpack_field(self, tensor: Tensor, shape: Shape) -> Tensor:
        """The field that a tensor of a weight [N, K] holds."""
        if self.at is not None:
            half = tensor << HALF - self.at >> HALF
            return half & 0xFFFF if self.kind == INDEX else half.to(torch.int16).view(torch.float16)
        if not self.order:
            return tensor
        sizes = [-1 if digit.dim == "?" else digit.extent(*shape, {}) or 0 for digit in self.digits]
        fixed = prod(size for size in sizes if size >= 0)
        sizes = [tensor.numel() // fixed if size < 0 < fixed else max(0, size) for size in sizes]
        places = [place for digits in self.order for place in digits]
        return tensor.reshape(sizes).permute(places).reshape([prod(sizes[place] for place in digits) for digits in self.order])

    def pack_field(self, field: Tensor, shape: Shape) -> Tensor:
        """The tensor that holds a field; for half words, a tensor with only that half filled.  The inverse of `unpack_field`.

        Raises FormatError if the field does not fit.
        """
        if self.at is not None:
            if self.kind == INDEX and not field.is_meta and bool((wrong := (field < 0) | (field > 0xFFFF)).any()):
                raise FormatError(f"'{self.name}' holds 16 bits, not {int(field[wrong][0])}")
            half = field if self.kind == INDEX else field.contiguous().view(torch.int16).to(torch.int32)
            return (half & 0xFFFF) << self.at
        if not self.order:
            return field.contiguous()
        sizes = [0 if digit.dim == "?" else digit.extent(*shape, {}) or 0 for digit in self.digits]
        for digits, extent in zip(self.order, field.shape, strict=True):
            fixed = prod(sizes[place] for place in digits if self.digits[place].dim != "?")
            if extent % max(1, fixed):
                raise FormatError(f"'{self.name}' holds multiples of {fixed}, not {extent}")
            for place in digits:
                sizes[place] = extent // max(1, fixed) if self.digits[place].dim == "?" else sizes[place]
        places = [place for digits in self.order for place in digits]
        if prod(sizes) != field.numel():
            raise FormatError(f"'{self.name}' holds no field [{', '.join(map(str, field.shape))}]")
        split = field.reshape([sizes[place] for place in places])
        inverse = [places.index(place) for place in range(len(places))]
        whole = shape_in_files(self.axes, *shape, {}, field.numel())
        assert whole is not None
        return split.permute(inverse).reshape(whole).contiguous()


@dataclass(frozen=True, slots=True)
class Branch:
    """A term that a format adds to its decoded weight.  kind: of core/branches.py.  tensors: of its fields.

    ordered: if the weight has a column order, tensors store places of columns; fields always have columns.
    """

    kind: str
    tensors: Mapping[str, BranchTensor]
    ordered: bool

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(tensor.name for tensor in self.tensors.values()))

    def add(self, fields: Fields, weight: Tensor) -> None:
        """Add the branch to float32 weights [N, K], in place."""
        KINDS[self.kind].add(fields, weight)


def check_names(format: str, plus: Sequence[Branch], names: Sequence[str]) -> None:
    """Raises FormatError if some tensors of a branch are present without the others."""
    for branch in plus:
        present = [name for name in branch.names if name in names]
        if present and len(present) < len(branch.names):
            missing = next(name for name in branch.names if name not in names)
            raise FormatError(f"{format}: '{present[0]}' is of a branch that needs '{missing}' too")


def branch_step(plus: Sequence[Branch], names: Collection[str], dim: str) -> int:
    """The step of rows or columns at whose multiples all branches with tensors of these names can be sliced."""
    return lcm(*(tensor.step(dim) for branch in plus for tensor in branch.tensors.values() if tensor.name in names))
