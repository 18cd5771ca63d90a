"""A weight of another format that has the same codes: where the numbers are equal too, it is one of both.

GGML's MXFP4 and OCP's are two formats because code 8 is +0 in one and -0 in the other, and a scale of 255 is 2^127 and NaN; all
other codes mean the same.  What holds is looked at in every weight, number by number, and what does not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qdsl.numbers import number
from qdsl.runtime.convert import in_rows
from qdsl.runtime.layout import Field
from qdsl.runtime.match import torch_dtype
from qdsl.runtime.packed import FormatError, PackedWeight

if TYPE_CHECKING:
    from qdsl.runtime.format import Format


def adopt(format: Format, packed: PackedWeight, storage: str) -> tuple[dict[str, Tensor], dict[str, int | str]]:
    """The codes of `packed`, a weight of another format, as tensors of a storage of `format`, and its parameters.

    Zeros may change their sign, nothing else.  Raises FormatError where fields differ in more than their types, with the place
    of the first number that would change, and where the storage cannot hold the weight.
    """
    params = format.complete({key: value for key, value in packed.params.items() if value in format.params.get(key, ())})
    kinds = _kinds(format, packed, params)
    format.storage(storage, params)

    def make(part: PackedWeight, start: int) -> PackedWeight:
        fields = {name: field.view(kinds[name]) for name, field in packed.format.unpack(part).items()}
        made = format.pack(fields, storage=storage, **params)
        _check_equal(part, made, start)
        return made

    other = PackedWeight(format, storage, {}, packed.shape, params)
    return in_rows(packed, other, make), params


def _kinds(format: Format, packed: PackedWeight, params: Mapping[str, int | str]) -> dict[str, torch.dtype]:
    """The dtypes of the format's fields, where they are those of the weight but for what their bits mean."""
    own, other = format.variant(params).fields, packed.variant.fields
    if own.keys() != other.keys():
        raise FormatError(f"{packed.format.name} has fields {', '.join(other)}; {format.name} has {', '.join(own)}")
    kinds = {name: str(params.get(field.type, field.type)) for name, field in own.items()}
    for name, kind in kinds.items():
        given = str(packed.params.get(other[name].type, other[name].type))
        if _bits(kind) != _bits(given) or _blocks(own[name]) != _blocks(other[name]):
            raise FormatError(f"'{name}' is {given} [{_text(other[name])}] in {packed.format.name} and {kind} "
                              f"[{_text(own[name])}] in {format.name}")
    return {name: torch_dtype(kind) for name, kind in kinds.items()}


def _bits(kind: str) -> tuple[int, int]:
    """Of a type, and of the dtype in which it is held."""
    known = number(kind)
    return 0 if known is None else known.bits, torch_dtype(kind).itemsize


def _blocks(field: Field) -> list[tuple[str, tuple[int | str, ...]]]:
    """What its axes run along, and in which steps."""
    return [(each.dim, each.step) for each in field.axes]


def _text(field: Field) -> str:
    return ", ".join(each.text for each in field.axes)


def _check_equal(part: PackedWeight, made: PackedWeight, start: int) -> None:
    """Refuse a number that would change; NaN stays NaN."""
    before, after = (each.format.dequantize(each, torch.float32) for each in (part, made))
    wrong = ~((before == after) | (before.isnan() & after.isnan()))
    if bool(wrong.any()):
        n, k = (int(i) for i in torch.nonzero(wrong)[0])
        raise FormatError(f"{made.format.name} cannot hold this weight of {part.format.name}: at row {start + n}, column {k} "
                          f"{_told(before, n, k)} would become {_told(after, n, k)}")


def _told(weight: Tensor, n: int, k: int) -> str:
    return f"{float(weight[n, k]):g}"
