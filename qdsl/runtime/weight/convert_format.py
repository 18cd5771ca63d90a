"""Converts a weight to another format with the same codes, if the numbers are equal too.

GGML's MXFP4 and OCP's are two formats because code 8 is +0 in one and -0 in the other, and scale 255 is 2^127 and NaN; all other
codes mean the same.  GPTQ's (q - z) * s is (q - 8) * s + (8 - z) * s, as torch's int4pack stores it, if floats hold these terms.
Every number is compared, and a weight is refused if one would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.core.numbers import find_number, number
from qdsl.core.shapes import values_text
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.weight import branch_pieces, convert
from qdsl.runtime.weight.assemble import assemble, check_shape
from qdsl.runtime.weight.defaults import default_field
from qdsl.runtime.weight.fields import pack, unpack
from qdsl.runtime.weight.layout import FLOATS, Field, Variant
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat

WIDEST = "f32"


@without_autocast
def converted_weight(format: WeightFormat, packed: PackedWeight, storage: str, params: Mapping[str, int | str]) -> PackedWeight:
    """The same numbers in a storage of a format.  Raises FormatError if it cannot hold them.

    params: those that the result must have.
    """
    format.complete(params)
    if packed.has_branch:
        branch_pieces.check_branch_kinds(format, packed)
        return branch_pieces.convert_with_branches(packed, converted_weight(format, packed.base, storage, params))
    is_own = packed.format is format and packed.params == {**packed.params, **params}
    if storage == packed.storage and is_own:
        return packed
    with _offering_requantize(format, storage):
        if not is_own:
            tensors, chosen = convert_format(format, packed, storage, params)
            return assemble(format, storage, tensors, packed.shape, chosen)
        format.storage(storage, packed.params)
    missing = {stored.optional for key, stored in packed.layout.tensors.items() if key not in packed.tensors}
    check_shape(format, storage, packed.variant.storages[storage].decoded, packed.shape, packed.sizes,
                packed.variant.fields.keys() - missing - {*packed.layout.where})
    with _offering_requantize(format, storage):
        return assemble(format, storage, convert.convert(packed, storage), packed.shape, packed.params)


@contextmanager
def _offering_requantize(format: WeightFormat, storage: str) -> Iterator[None]:
    """Adds a hint at `requantize` to errors of a conversion, if the format has the storage and quantizes."""
    try:
        yield
    except FormatError as error:
        helps = any(storage in variant.storages and variant.encode is not None for variant in format.variants.values())
        offer = "; requantize quantizes the decoded weight, and reports the error" if helps else ""
        raise FormatError(f"{error}{offer}") from None


def convert_format(format: WeightFormat, packed: PackedWeight, storage: str, wanted: Mapping[str, int | str],
          ) -> tuple[dict[str, Tensor], dict[str, int | str]]:
    """The tensors and parameters of `packed`, a weight of another format or of other parameters, in a storage of `format`.

    wanted: parameters that the result must have.  By default types of scales stay, or become float32.  Zeros may change their
    sign, nothing else changes.  Raises FormatError if fields differ in more than their types, with the place of the first number
    that would change, and if the storage cannot hold the weight.
    """
    failed: FormatError | None = None
    for params in _param_choices(format, packed, wanted):
        try:
            format.storage(storage, params)
            tensors = _Conversion(format, packed, storage, params).tensors()
            converted = PackedWeight(format, storage, tensors, packed.shape, params)
            left = convert.omitted_tensors(converted, converted.layout)
            return {name: tensor for name, tensor in tensors.items() if name not in left}, params
        except FormatError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _param_choices(format: WeightFormat, packed: PackedWeight, wanted: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    """Parameters to try: the wanted ones, else those of the weight, then the widest types first."""
    shared: dict[str, int | str] = {}
    for name, values in format.params.items():
        if name in wanted:
            shared[name] = wanted[name]
            continue
        value = packed.params.get(name)
        value = value if value in values or name not in packed.sizes else packed.sizes[name]      # -1, the whole axis
        if isinstance(value, int) and value not in values:
            raise FormatError(f"{packed.format.name} has {name} = {value}; {format.name} has {values_text(values)}")
        if value in values:
            shared[name] = value
    wide: dict[str, int | str] = {name: WIDEST for name, values in format.params.items() if WIDEST in values}
    first = format.complete({**wide, **shared})
    yield first
    if (widest := {**first, **wide, **wanted}) != first:
        yield widest


@dataclass(frozen=True, slots=True)
class _FieldChange:
    """How a field is converted: it keeps its bits, or its values, or becomes the value of the weight at a code.

    choices: the number of values of an integer field; the one is chosen that keeps the weight's value at the code.
    """

    dtype: torch.dtype
    bits: bool = False
    code: int | None = None
    choices: int = 0


class _Conversion:
    """A conversion of a weight to another format, field by field."""

    def __init__(self, format: WeightFormat, packed: PackedWeight, storage: str, params: Mapping[str, int | str]) -> None:
        self.packed = packed
        self.other = PackedWeight(format, storage, {}, packed.shape, params)
        has_index = any(stored.dtype == "index" for stored in self.other.layout.tensors.values())
        if (packed.moved_indices or packed.order is not None) and not self.other.layout.order and not has_index:
            raise FormatError(f"{format.name}.{storage} has columns in order; those of this weight belong to groups all over K "
                              "(act-order)")
        self.ways = self._field_changes()
        format.empty(packed.shape, storage, "meta", (), **params)  # raises for a shape that the storage cannot hold

    def tensors(self) -> dict[str, Tensor]:
        if self._blocks() is not None:
            code = str(_code_field(self.packed.variant))
            blocks = convert.unpack_needed_fields(self.packed, lambda stored_fields: stored_fields <= {code})
            if self._is_equal_at_all_codes(blocks):
                changed = convert.ChangedFields({name for name, way in self.ways.items() if way.bits},
                                        lambda fields: self._convert_fields(self.packed, {**blocks, code: fields[code]}))
                tensors = convert.move_by_words(self.packed, self.other, changed)
                if tensors:
                    return tensors
        return convert.convert_row_tiles(self.packed, self.other, self._convert_part)  # the weight may lack the codes that differ

    def _convert_part(self, part: PackedWeight, start: int) -> PackedWeight:
        fields = self._convert_fields(part, unpack(part))
        converted = pack(self.other.format, fields, self.other.storage, self.other.params)
        _check_equal(part, converted, start)
        return converted

    # -- fields -------------------------------------------------------------------------------------------------------

    def _field_changes(self) -> dict[str, _FieldChange]:
        own, other = _fields(self.other.variant), _fields(self.packed.variant)
        names = self.other.format.name, self.packed.format.name
        if own.keys() != other.keys():
            raise FormatError(f"{names[1]} has fields {', '.join(other)}; {names[0]} has {', '.join(own)}")
        ways: dict[str, _FieldChange] = {}
        for name, field in own.items():
            kinds = [str(weight.params.get(of.type, of.type)) for weight, of in ((self.other, field), (self.packed, other[name]))]
            dtype, alike = torch_dtype(kinds[0]), _axis_steps(field) == _axis_steps(other[name])
            floats = set(kinds) <= FLOATS.keys()
            if alike and (kinds[0] == kinds[1] or (not floats and _bits(kinds[0]) == _bits(kinds[1]))):
                ways[name] = _FieldChange(dtype, bits=True)
            elif alike and floats:
                ways[name] = _FieldChange(dtype)
            elif self._blocks() is not None and name in self.other.variant.codes:
                ways[name] = _FieldChange(dtype, code=self.other.variant.codes[name])
            elif self._blocks() is not None and (choices := _value_count(kinds[0])) and name in self.packed.variant.codes:
                ways[name] = _FieldChange(dtype, code=self.packed.variant.codes[name], choices=choices)
            else:
                raise FormatError(f"'{name}' is {kinds[1]} [{_text(other[name])}] in {names[1]} and {kinds[0]} [{_text(field)}] "
                                  f"in {names[0]}")
        return ways

    def _convert_fields(self, part: PackedWeight, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fields of the other format for rows of the weight."""
        converted: dict[str, Tensor] = {}
        for name, way in self.ways.items():
            if way.choices:
                continue
            if way.code is not None:
                converted[name] = _values_at_code(part, fields, way.code).to(way.dtype)
                continue
            default = part.variant.defaults.get(name)
            value = fields[name] if name in fields or default is None else \
                default_field(part.format.description, part.variant, name, part.shape, part.params, part.device)
            converted[name] = value.view(way.dtype) if way.bits else value.to(way.dtype)
        converted |= {name: self._solve_integers(way, name, converted, fields[name]) for name, way in self.ways.items()
                      if way.choices}
        index = {name: fields[name] for name, field in self.other.variant.fields.items() if field.groups and name in fields}
        return {**converted, **index}

    def _solve_integers(self, way: _FieldChange, name: str, converted: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
        """The integer field that makes the weight at a code `wanted`; the middle one if several or none do."""
        assert way.code is not None
        first = way.choices // 2
        solved = torch.full(wanted.shape, first, dtype=way.dtype, device=wanted.device)
        is_open = torch.ones(wanted.shape, dtype=torch.bool, device=wanted.device)
        for choice in sorted(range(way.choices), key=lambda choice: abs(choice - first)):
            trial = {**converted, name: torch.full_like(solved, choice)}
            fits = is_open & (_values_at_code(self.other, trial, way.code) == wanted)
            solved[fits] = choice
            is_open &= ~fits
            if not bool(is_open.any()):
                break
        return solved

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _blocks(self) -> list[tuple[str, tuple[int | str, ...]]] | None:
        """The axes that all fields but the code share in both formats, as blocks of K whose size is a parameter; else None."""
        axes = [_axis_steps(field) for weight in (self.packed, self.other) for name, field in _fields(weight.variant).items()
                if name != _code_field(weight.variant)]
        same = bool(axes) and all(steps == axes[0] for steps in axes) and None not in map(_code_field, (self.packed.variant,
                                                                                               self.other.variant))
        whole = same and [dim for dim, _ in axes[0]] == ["N", "K"] and not axes[0][0][1]
        return axes[0] if whole and any(isinstance(step, str) for step in axes[0][1][1]) else None

    def _is_equal_at_all_codes(self, fields: dict[str, Tensor]) -> bool:
        """Whether every code of every block is the same number in both formats; the codes field may have no numbers."""
        converted = self._convert_fields(self.packed, fields)
        sides = [(part, {name: _decodable(value) for name, value in values.items()})
                 for part, values in ((self.packed, fields), (self.other, converted))]
        for code in range(_count(self.packed.variant)):
            before, after = (_values_at_code(part, values, code) for part, values in sides)
            if not torch.equal(before, after) and bool(_wrong(before, after).any()):
                return False
        return True


def _fields(variant: Variant) -> dict[str, Field]:
    return {name: field for name, field in variant.fields.items() if field.groups is None}


def _code_field(variant: Variant) -> str | None:
    """The codes field, which has a value per weight; None if there is none."""
    codes = [name for name, field in _fields(variant).items() if _axis_steps(field) == [("N", ()), ("K", ())]]
    kind = find_number(variant.fields[codes[0]].type) if len(codes) == 1 else None
    return codes[0] if kind is not None and not kind.is_float and kind.kind == "unsigned" and kind.bits <= 8 else None


def _decodable(value: Tensor) -> Tensor:
    """A field in the dtype that decode converts it to, because it will be decoded often."""
    return value.float().contiguous() if value.dtype in FLOATS.values() else value.contiguous()


def _count(variant: Variant) -> int:
    return 1 << number(variant.fields[str(_code_field(variant))].type).bits


def _values_at_code(part: PackedWeight, fields: Mapping[str, Tensor], code: int) -> Tensor:
    """The values of weights with this code, float32 [N, blocks]."""
    name = str(_code_field(part.variant))
    blocks = {key: value for key, value in fields.items() if key in _fields(part.variant) and key != name}
    one = next(iter(blocks.values()))
    return part.variant.decode(**blocks, **{name: torch.full(one.shape, code, dtype=torch.uint8, device=one.device)})


def _value_count(kind: str) -> int:
    """The number of values of an unsigned integer type of up to 8 bits; 0 for other types."""
    scalar = find_number(kind)
    is_small = scalar is not None and not scalar.is_float and scalar.kind == "unsigned" and scalar.bits <= 8
    return 1 << scalar.bits if scalar is not None and is_small else 0


def _bits(kind: str) -> tuple[int, int]:
    """The bits of a type, and the bytes of the dtype that stores it."""
    scalar = find_number(kind)
    return 0 if scalar is None else scalar.bits, torch_dtype(kind).itemsize


def _axis_steps(field: Field) -> list[tuple[str, tuple[int | str, ...]]]:
    return [(axis.dim, axis.step) for axis in field.axes]


def _text(field: Field) -> str:
    return ", ".join(axis.text for axis in field.axes)


def _wrong(before: Tensor, after: Tensor) -> Tensor:
    """A mask of numbers that change; NaN stays NaN."""
    return ~((before == after) | (before.isnan() & after.isnan()))


def _check_equal(part: PackedWeight, converted: PackedWeight, start: int) -> None:
    """Raises FormatError for a number that would change."""
    before, after = (weight.format.dequantize(weight, torch.float32) for weight in (part, converted))
    wrong = _wrong(before, after)
    if bool(wrong.any()):
        n, k = (int(i) for i in torch.nonzero(wrong)[0])
        raise FormatError(f"{converted.format.name} cannot hold this weight of {part.format.name}: at row {start + n}, "
                          f"column {k} {_shown(before, n, k)} would become {_shown(after, n, k)}")


def _shown(weight: Tensor, n: int, k: int) -> str:
    return f"{float(weight[n, k]):.9g}"                         # enough digits to distinguish floats
