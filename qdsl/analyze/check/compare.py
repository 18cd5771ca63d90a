"""Compares weights: how many differ, the first difference, the fields that cause it, and the line of the spec."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits
from qdsl.compiler.spec import grammar
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.source import Span
from qdsl.runtime import PackedWeight

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe_difference(got: Tensor, want: Tensor, packed: PackedWeight, spec: Spec) -> str:
    """A description of the weights [N, K] that differ in a bit from the wanted ones; '' if none do; NaN equals NaN.

    It has their number, the first [n, k], both values, the fields of that weight, and the line of the formula.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{_kind(got)} instead of {_kind(want)}"
    unlike = differing_mask(got, want)
    if not unlike.any():
        return ""
    n, k = (int(place) for place in unlike.nonzero()[0])
    fields = ", ".join(f"{name} = {value}" for name, value in weight_fields(packed, spec, n, k).items())
    return (f"{int(unlike.sum())} of {unlike.numel()} weights differ; first [{n}, {k}]: {shown(got[n, k])} instead of "
            f"{shown(want[n, k])}; {fields}; {line_of(spec.decode.span)}")


def differing_mask(got: Tensor, want: Tensor) -> Tensor:
    """A bool mask of the elements of two tensors that differ in a bit; NaN equals NaN."""
    integers = _INTEGERS[got.element_size()]
    unlike = got.contiguous().view(integers) != want.contiguous().view(integers)
    return unlike & ~(got.isnan() & want.isnan()) if got.is_floating_point() and got.element_size() > 1 else unlike


def weight_fields(packed: PackedWeight, spec: Spec, n: int, k: int) -> dict[str, str]:
    """The fields of weight [n, k], by name and subscripts: 'q[0, 5]'; without stored tables and tensors that are missing."""
    fields = packed.format.unpack(packed)
    env = {**spec_bits.size_environment(spec, *packed.shape, packed.params, packed.sizes), "n": n, "k": k}
    for name, field in packed.variant.fields.items():
        if field.groups is not None:
            env[name] = int(fields[name][k]) if name in fields else k // field.groups.by(packed.sizes)
    values: dict[str, str] = {}
    for declared in spec.fields:
        name = declared.name.value
        if name in fields and not spec_bits.table_extents(spec, declared):
            place = tuple(spec_bits.evaluate(expr, env) for expr in declared.typed.index)
            values[f"{name}{list(place)}"] = shown(fields[name][place])
    return values


def shown(value: Tensor) -> str:
    """A number as text: floats with all their digits."""
    return repr(float(value)) if value.is_floating_point() else str(int(value))


def line_of(span: Span) -> str:
    """A line of the spec as FILE:LINE: TEXT."""
    return f"{span.source.name}:{span.line}: {span.source.line(span.line).strip()}"


def field_spec_line(spec: Spec, storage: str, tensor: str, field: str) -> str:
    """The line of the spec that stores a field in a tensor; for a derived storage, the line of the format's name."""
    stored = [stored for declared in spec.storages if declared.name.value == storage for stored in declared.tensors
              if stored.name.value == tensor]
    items = [item for line in stored[0].record for item in _items(line)] if stored else []
    spans = [item.span for item in items if item.field is not None and item.field.name == field]
    return line_of(spans[0] if spans else spec.span)


def _items(line: grammar.RecordLine) -> list[grammar.RecordItem]:
    """The items of a record's line, those of groups too."""
    return [inner for item in line.items for inner in (_items(item.line) if isinstance(item, grammar.LineGroup) else [item])]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
