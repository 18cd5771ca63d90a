"""Stored tensors and fields in torch: dtypes, axes and their order, for unpack and pack."""

from __future__ import annotations

from qdsl.compiler.emit.digits import SliceCut, cut
from qdsl.compiler.emit.views import BYTES, Chain, Label
from qdsl.compiler.ir.program import Field, Placement, Program, Tensor
from qdsl.core import stored
from qdsl.core.layout import FieldSlice
from qdsl.core.numbers import TORCH_FLOATS


class Unsupported(Exception):
    """Views and shifts cannot express this layout."""


def field_dtype(field: Field) -> str:
    """The torch dtype of a field; int32 for an index."""
    return stored.field_dtype(field.number.name if field.number else "index")


def is_read_by_dtype(program: Program, field: Field) -> bool:
    """Whether one text reads a scale in every type of its parameter, including E8M0, because decoding goes by the dtype."""
    listed = next((param.values for param in program.spec.params if param.name.value == field.kind), ())
    return "e8m0" in listed and set(listed) <= {"f32", "f16", "bf16", "e8m0"}


def is_stored_as_field(field: Field, cuts: SliceCut) -> bool:
    """Whether a slice stores the bytes of the field's torch tensor: whole values, and no i16 that is int32 in torch."""
    held_bits = 32 if field_dtype(field) == "int32" else field.bits
    return cuts.whole and cuts.part.width == field.bits == held_bits


def tensor_dtype(tensor: Tensor) -> str:
    number = tensor.element
    return TORCH_FLOATS.get(number.name, "uint8") if number.is_float else f"{'u' * (number.kind == 'unsigned')}int{number.bits}"


def type_text(field: Field, tensor: Tensor, source: str, default: str) -> str:
    """A torch dtype as text: `default`, or `source`.dtype if a parameter decides the type of both field and tensor."""
    return f"{source}.dtype" if tensor.kind == field.kind != tensor.element.name else f"torch.{default}"


def is_signed(field: Field) -> bool:
    return field.number is not None and field.number.kind == "signed"


def is_plain(program: Program, tensor: Tensor) -> bool:
    """Whether elements of the tensor are elements of its one field, so that no bytes need to be split."""
    if len(tensor.placements) != 1 or tensor.words != 1:
        return False
    placement = tensor.placements[0]
    return not placement.flat and all(extent == 1 for extent in placement.extents) \
        and [part.width for part in placement.slices] == [tensor.element.bits] == [program.field(placement.field).bits]


def element_placements(program: Program, tensor: Tensor) -> list[Placement]:
    """The fields of a record with one element of each field, stored along a last axis; else none."""
    by_place: dict[int, Placement] = {}
    for placement in tensor.placements:
        field = program.field(placement.field)
        if placement.flat or any(extent > 1 for extent in placement.extents) or len(placement.slices) > 1 or placement.copies \
                or {*placement.vars} != {*axis_labels(tensor)} or not all(tensor.var(name).exact for name in placement.vars) \
                or (field.kind, field.bits) != (tensor.kind, placement.slices[0].width):
            return []
        by_place[placement.slices[0].offset // tensor.element.bits] = placement
    whole = len(by_place) == tensor.words > 1 and not any(tensor.axes[-1].digits) and tensor.stored is None
    return [by_place[place] for place in sorted(by_place)] if whole else []


def records_name(program: Program, tensor: Tensor) -> str:
    """The variable for the bytes of a tensor's records: r if only one tensor needs it."""
    alone = sum(not is_plain(program, t) and not element_placements(program, t) for t in program.tensors) == 1
    return "r" if alone and "r" not in arguments(program) else f"{tensor.name}_bytes"


def arguments(program: Program) -> set[str]:
    """The names of the arguments of unpack and pack."""
    return {tensor.name for tensor in program.tensors} | {field.name for field in program.fields}


def axis_labels(tensor: Tensor) -> list[Label]:
    """A tensor's variables in the order of their coordinates, rows first."""
    order: list[Label] = []
    for placement in sorted(tensor.placements, key=lambda p: -len(p.digits)):
        order += [name for name in placement.vars if name not in order]
    return order


def element_labels(placement: Placement, cuts: SliceCut) -> list[list[Label]]:
    """Per coordinate of a field: its variables, then its digits inside the record, slowest first."""
    inside = sorted([*cuts.bytes_, *cuts.bits], key=lambda digit: -digit.weight)
    return [[label for name in digits for label in ([name] if name else [digit for digit in inside if digit.axis == axis])]
            for axis, digits in enumerate(placement.digits)]


def sizes(labels: list[Label]) -> list[int]:
    """Extents of digits; 0 for variables and bytes, which torch infers."""
    return [0 if isinstance(label, str) else label.extent for label in labels]


def cut_slice(tensor: Tensor, placement: Placement, part: FieldSlice) -> SliceCut:
    """The containers of up to 8 bytes that extract a slice from a record.  Raises Unsupported if none do."""
    containers = cut(part)
    if containers is None:
        raise Unsupported(f"the bits of '{placement.field}' in '{tensor.name}' do not fit containers of up to 8 bytes")
    return containers


def digits_in_order(tensor: Tensor) -> Chain:
    """The stored tensor with its axes in the order of `axis_labels`; BYTES last if words have their own axis."""
    order = axis_labels(tensor)
    labels: list[Label] = [axis.digits[0] or BYTES if axis.digits else BYTES for axis in tensor.axes]
    text = shifted(tensor, _pad_text(tensor), -1)
    for i in reversed(range(len(labels))):
        if labels[i] == BYTES and (tensor.words == 1 or not tensor.axes[i].digits):
            text += f".squeeze({i})"
            del labels[i]
    chain = Chain(text, tuple(labels))
    if BYTES in labels:
        return chain.permute([*order, BYTES])
    mixed = [axis.digits[0] for axis in tensor.axes if len(axis.digits) == 2 and tensor.words > 1]
    if mixed and mixed[0] != order[-1]:
        return chain.unflatten(labels.index(mixed[0]), [mixed[0], BYTES], [0, tensor.words]).permute([*order, BYTES])
    return chain.permute(order)


def _pad_text(tensor: Tensor) -> str:
    """The stored tensor padded to whole records, if the last may be partial."""
    cut = next((place for place, axis in enumerate(tensor.axes) if axis.extent is not None), None)
    if cut is None:
        return tensor.name
    zeros = "0, 0, " * (len(tensor.axes) - 1 - cut)
    return f"pad({tensor.name}, ({zeros}0, -{tensor.name}.shape[{cut}] % {tensor.words}))"


def restore_axes_text(tensor: Tensor, chain: Chain) -> str:
    """The inverse of digits_in_order: from the order of `axis_labels`, words last, to the stored tensor's axes."""
    word: list[Label] = [BYTES] if tensor.words > 1 else []
    groups = [[digit or BYTES for digit in axis.digits if digit or word] for axis in tensor.axes]
    moved = chain.permute([label for group in groups for label in group])
    if moved.text != chain.text:
        moved = moved.call("contiguous()")
    for i, group in enumerate(groups):
        moved = moved.flatten(i, len(group), f"axis {i}")
    return strip_parens(shifted(tensor, _crop_text(tensor, moved.text), +1))


def _crop_text(tensor: Tensor, text: str) -> str:
    """Whole records without trailing words that may be unused."""
    cut = next((place for place, axis in enumerate(tensor.axes) if axis.extent is not None), None)
    if cut is None:
        return text
    placement = tensor.placements[0]
    var = tensor.axes[cut].digits[0]
    axis, tile = next((axis, tile) for axis, (name, tile) in enumerate(placement.tiles) if name == var)
    length = f"{placement.field}.numel()" if placement.flat else f"{placement.field}.shape[{axis}]"
    return f"{text}[{':, ' * cut}:cdiv({tensor.words} * {length}, {tile})].contiguous()"


def shifted(tensor: Tensor, text: str, sign: int) -> str:
    """The stored value for a packed value (sign 1) or the reverse (sign -1), if `stored` applies to words."""
    return text if tensor.stored is None or tensor.stored.field is not None else f"({tensor.stored.text(text, sign)})"


def field_shifted(tensor: Tensor, field: Field, text: str, sign: int) -> str:
    """The same if `stored` applies to one field."""
    if tensor.stored is None or tensor.stored.field != field.name:
        return text
    changed = tensor.stored.text(text, sign, field.bits)
    shifted_bits = f"({f'({changed})' if tensor.stored.op == '^' else changed} & {(1 << field.bits) - 1})"
    half = 1 << field.bits - 1
    return f"(({shifted_bits} ^ {half}) - {half})" if field.kind.startswith("i") and sign < 0 else shifted_bits


def strip_parens(text: str) -> str:
    """The text without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 else text
    return text
