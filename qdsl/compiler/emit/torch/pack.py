"""Prints `pack` of the torch reference, from fields to stored tensors: the inverse of unpack."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from qdsl.compiler.emit import tensors as ts
from qdsl.compiler.emit.digits import Digit, Lane, SliceCut
from qdsl.compiler.emit.lines import assign_text, indent, mapping
from qdsl.compiler.emit.row_codes import row_codes_lines
from qdsl.compiler.emit.torch.sections import join_sections
from qdsl.compiler.emit.views import BYTES, Chain, Label, view_bytes
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Field, Placement, Program, Tensor
from qdsl.core.layout import FieldSlice


def pack_body(program: Program) -> list[str]:
    """Statements that build the dict of stored tensors from fields; an optional tensor that equals its field may be None."""
    lines = row_codes_lines(program)
    entries: dict[str, list[str]] = {}
    optional: list[str] = []
    for tensor in sorted(program.tensors, key=lambda tensor: tensor.optional):
        before = len(lines)
        chain = _pack_plain(program, tensor, tensor.placements[0]) if ts.is_plain(program, tensor) else \
            _stack_planes(program, tensor) if ts.element_placements(program, tensor) else _pack_records(program, tensor, lines)
        text = ts.restore_axes_text(tensor, chain)
        if tensor.optional and text != tensor.placements[0].field:
            optional += [f"if {tensor.placements[0].field} is not None:", *indent(lines[before:]),
                         f'    tensors["{tensor.name}"] = {text}']
            del lines[before:]
        else:
            entries.setdefault(tensor.stored_name, []).append(text)
    shown = [f'"{name}": {join_sections(program.stored[name], texts)},' for name, texts in entries.items()]
    if not optional:
        return [*lines, *mapping("return ", shown)]
    return [*lines, *mapping("tensors = ", shown), *optional, "return tensors"]


def _stack_planes(program: Program, tensor: Tensor) -> Chain:
    """Elements of several fields, stacked."""
    order: list[Label] = [axis.digits[0] for axis in tensor.axes[:-1]]
    texts = [_pack_plain(program, tensor, placement).permute(order).text for placement in ts.element_placements(program, tensor)]
    return Chain(f"torch.stack([{', '.join(texts)}], -1)", (*order, BYTES))


def _pack_plain(program: Program, tensor: Tensor, placement: Placement) -> Chain:
    field = program.field(placement.field)
    text = ts.field_shifted(tensor, field, field.name, +1)
    if ts.field_dtype(field) != ts.tensor_dtype(tensor):
        cast = "to" if (ts.field_dtype(field), ts.tensor_dtype(tensor)) == ("int32", "int16") else "view"
        text += f".{cast}(torch.{ts.tensor_dtype(tensor)})"
    if any(var.spare for var in tensor.vars):
        text = _padded_text(tensor, placement, field, text)
    chain = Chain(text, tuple(f"axis {axis}" for axis in range(len(placement.digits))))
    for axis in reversed(range(len(placement.digits))):
        names = [name for name in placement.digits[axis] if name]
        chain = chain.unflatten(axis, names, _label_sizes(tensor, names))
    return chain


def _label_sizes(tensor: Tensor, labels: Sequence[Label]) -> list[int | str]:
    """Extents of digits and variables; 0 for bytes and for an only variable, which torch infers."""
    several = sum(isinstance(label, str) and label != BYTES for label in labels) > 1
    return [label.extent if isinstance(label, Digit) else
            ix.text(tensor.var(label).extent) if several and label != BYTES else 0 for label in labels]


def _pack_records(program: Program, tensor: Tensor, lines: list[str]) -> Chain:
    """Records as elements of the tensor, words last."""
    size = tensor.record_bits // 8
    parts = [(placement, part) for placement in tensor.placements for part in (*placement.slices, *placement.copies)]
    order = ts.axis_labels(tensor)
    if len(parts) == 1 and parts[0][1].filled == tensor.record_bits:
        placement, part = parts[0]
        field = program.field(placement.field)
        cuts = ts.cut_slice(tensor, placement, part)
        split = _split_field(program, tensor, placement, cuts, lines)
        if split.labels[-1] == order[-1] and size == tensor.element.bits // 8 == 4:
            return _pack_words(program, tensor, cuts, split, lines)
        value = _slice_value(program, field, cuts, cuts.skips[0], split, [*order, *cuts.bytes_], lines)
        if size > 1:
            value = value.flatten(len(order), len(value.labels) - len(order), BYTES)
        text = assign_text(lines, ts.records_name(program, tensor), ts.strip_parens(value.text), ts.arguments(program))
        chain = Chain(text, value.labels)
    else:
        chain = Chain(ts.records_name(program, tensor), (*order, BYTES))
        start = len(lines)
        shared = [_store_slice(program, tensor, placement, part, chain, lines) for placement, part in parts]
        filled = sum(part.filled for _, part in parts) == tensor.record_bits
        lines.insert(start, _allocation_line(tensor, chain.text, size, filled and not any(shared)))
    if ts.tensor_dtype(tensor) != "uint8":
        field = program.field(tensor.placements[0].field)
        chain = Chain(f"as_type({chain.text}, {ts.type_text(field, tensor, field.name, ts.tensor_dtype(tensor))})", chain.labels)
    return Chain(f"{chain.text}.squeeze(-1)", chain.labels[:-1]) if tensor.words == 1 and BYTES in chain.labels else chain


def _pack_words(program: Program, tensor: Tensor, cuts: SliceCut, split: Chain, lines: list[str]) -> Chain:
    """Words whose bytes are rows apart in the field: joined by shifts, which is faster than moving single bytes."""
    *outer, inner = ts.axis_labels(tensor)
    field = program.field(tensor.placements[0].field)
    value = _slice_value(program, field, cuts, cuts.skips[0], split, [*outer, *cuts.bytes_, inner], lines)
    value = value.flatten(len(outer), len(value.labels) - len(outer) - 1, BYTES)
    text = assign_text(lines, ts.records_name(program, tensor), ts.strip_parens(value.text), ts.arguments(program))
    return Chain(f"integer({text}.transpose(-1, -2), torch.int32)", (*outer, inner))


def _allocation_line(tensor: Tensor, name: str, size: int, filled: bool) -> str:
    """Allocates records for every value of the tensor's variables, zeroed unless every byte is assigned."""
    lengths: dict[str, str] = {}
    for placement in sorted(tensor.placements, key=lambda placement: prod(placement.extents)):
        for axis, digits in enumerate(placement.digits):
            if len(digits) > 2 or not placement.plain or any(tensor.var(var).spare for var in digits if var):
                lengths.update({var: ix.text(tensor.var(var).extent) for var in digits if var})
                continue
            var, tile = placement.tiles[axis]
            length = f"{placement.field}.numel()" if placement.flat else f"{placement.field}.shape[{axis}]"
            exact = not var or tensor.var(var).exact
            lengths.setdefault(var, length if tile == 1 else f"{length} // {tile}" if exact else f"cdiv({length}, {tile})")
    shown = ", ".join([*(lengths[str(var)] for var in ts.axis_labels(tensor)), str(size)])
    device = f"{tensor.placements[0].field}.device"
    return f"{name} = empty(({shown}), torch.uint8, {device})" if filled else \
        f"{name} = torch.zeros({shown}, dtype=torch.uint8, device={device})"


def _store_slice(program: Program, tensor: Tensor, placement: Placement, part: FieldSlice, records: Chain,
                 lines: list[str]) -> bool:
    """Write one slice into the records: assign bytes of its own, or shared ones.  Returns whether it shares bytes."""
    field = program.field(placement.field)
    cuts = ts.cut_slice(tensor, placement, part)
    split = _split_field(program, tensor, placement, cuts, lines)
    others = [other for p in tensor.placements for other in (*p.slices, *p.copies) if other is not part]
    shared = any(_may_share(part, other) for other in others) or len(cuts.skips) > 1
    for skip in cuts.skips:
        view = view_bytes(records, cuts, skip, tensor.record_bits // 8)
        if view is None:
            raise ts.Unsupported(f"the bytes of '{field.name}' in '{tensor.name}' are too scattered for a view")
        target, digits = view
        value = _slice_value(program, field, cuts, skip, split, list(target.labels[:-1]) + list(digits), lines)
        keep = len(target.labels) - 1
        value = value.flatten(keep, len(value.labels) - keep, BYTES)
        left = target.text if target.text.endswith("]") else f"{target.text}[...]"
        lines.append(f"{left} {'|=' if shared else '='} {ts.strip_parens(value.text)}")
    return shared


def _may_share(a: FieldSlice, b: FieldSlice) -> bool:
    """Whether two slices may have a byte in common."""
    def ends(part: FieldSlice) -> tuple[int, int]:
        first = part.offset + sum(layout.first for layout in part.dims)
        last = part.offset + sum(layout.last for layout in part.dims) + part.room - 1
        return first // 8, last // 8
    (first, last), (low, high) = ends(a), ends(b)
    return first <= high and low <= last


def _split_field(program: Program, tensor: Tensor, placement: Placement, cuts: SliceCut, lines: list[str]) -> Chain:
    """The field with one axis per variable and digit, padded to whole records if the last may be partial."""
    field = program.field(placement.field)
    text = ts.field_shifted(tensor, field, field.name, +1)
    partial = not cuts.whole or cuts.part.width < field.bits
    if ts.is_signed(field) and field.bits <= 8 and partial:
        text += ".view(torch.uint8)"
    if field.number is not None and field.number.is_float and ts.field_dtype(field) != "uint8" and partial:
        text += f".view(torch.{'uint8' if field.bits == 8 else f'int{field.bits}'})"
    if placement.flat:
        text += ".flatten()"
    text = _padded_text(tensor, placement, field, text)
    wanted = ts.element_labels(placement, cuts)
    if placement.ranges > 1:
        var, tile = placement.tiles[-1]
        records = f"{text}.unflatten(-1, (-1, {tile}))" if var else text
        text = f"{records}[..., {cuts.part.start}:{cuts.part.start + cuts.part.extents[-1]}]"
        wanted[-1:] = [wanted[-1][:1], wanted[-1][1:]] if var else [wanted[-1]]
    chain = Chain(text, tuple(f"axis {axis}" for axis in range(len(wanted))))
    for axis in reversed(range(len(wanted))):
        chain = chain.unflatten(axis, wanted[axis], _label_sizes(tensor, wanted[axis]))
    chain = chain.in_rising_order()
    if len(cuts.lanes) == 1:
        return chain
    return Chain(assign_text(lines, f"{field.name}_split", chain.text, ts.arguments(program)), chain.labels)


def _padded_text(tensor: Tensor, placement: Placement, field: Field, text: str) -> str:
    tiles = [tile if any(not tensor.var(name).exact for name in digits if name) else 0
             for digits, tile in zip(placement.digits, placement.extents, strict=True)]
    if not any(tiles):
        return text
    if not placement.plain or any(tensor.var(name).spare for name in placement.vars):
        whole = [ix.text(_scale_extents([tensor.var(name).extent for name in digits if name], tile)) if tile else ""
                 for digits, tile in zip(placement.digits, tiles, strict=True)]
        amounts = [f"0, {total} - {'N * K' if placement.flat else ix.text(field.extents[axis])}" if total else "0, 0"
                   for axis, total in enumerate(whole)]
        return f"pad({text}, ({', '.join(reversed(amounts))}))"
    lengths = [f"{field.name}.numel()"] if placement.flat else [f"{field.name}.shape[{i}]" for i in range(len(tiles))]
    amounts = [f"0, -{length} % {tile}" if tile else "0, 0" for length, tile in zip(lengths, tiles, strict=True)]
    return f"pad({text}, ({', '.join(reversed(amounts))}))"


def _scale_extents(extents: list[Index], by: int) -> Index:
    total = Index(by)
    for extent in extents:
        total = total * extent
    return total


def _slice_value(program: Program, field: Field, cuts: SliceCut, skip: int, split: Chain, order: list[Label],
                 lines: list[str]) -> Chain:
    """The bytes that a slice's lanes at byte `skip` contribute: axes in `order`, then a container's bytes if several."""
    if ts.is_stored_as_field(field, cuts):
        chain = split.permute(order)
        if cuts.container == 1:
            return chain if ts.field_dtype(field) == "uint8" else chain.call("view(torch.uint8)")
        return Chain(f"as_type({chain.text}.unsqueeze(-1), torch.uint8)", (*order, BYTES))
    lanes = [lane for lane in cuts.lanes if lane.skip == skip]
    is_view = field.number is not None and field.number.is_float and field.bits > 8
    has_sign = is_view and any(lane.shift + cuts.part.width < 8 * cuts.container for lane in lanes)
    if cuts.part.places:
        return _shifted_digits(field, cuts, split, lanes).permute(order)
    if cuts.spread_arguments and field.bits <= 8 and split.labels[-1] == cuts.bits[0]:
        text = ts.strip_parens(_masked_text(field, cuts.part, split.text))
        return Chain(f"joined({text}, {cuts.spread_arguments}).squeeze(-1)", split.labels[:-1]).permute(order)
    wide = {1: "", 2: ".to(torch.int32)", 3: ".to(torch.int32)"}.get(cuts.container, ".to(torch.int64)")
    if len(lanes) > 2 and len(cuts.bits) == 1 and len(lanes) == len(cuts.lanes):
        lane = split.pick({cuts.bits[0]: "i"})
        text = f"sum({_masked_text(field, cuts.part, lane.text, wide, has_sign)} << {cuts.shift} for i in range({len(lanes)}))"
    else:
        texts: list[str] = []
        for own in lanes:
            lane = split.select(dict(zip(cuts.bits, own.values, strict=True)))
            texts.append(_masked_text(field, cuts.part, lane.text, wide, has_sign) + (f" << {own.shift}" if own.shift else ""))
        joined = " | ".join(texts)
        text = f"({joined})" if len(texts) > 1 or lanes[0].shift else joined
    value = Chain(text, lane.labels).permute(order)
    if not wide:
        return value.call("to(torch.uint8)") if field.bits > 8 else value
    words = assign_text(lines, f"{field.name}_packed", ts.strip_parens(value.text), ts.arguments(program))
    return Chain(f"{words}.unsqueeze(-1).view(torch.uint8)[..., :{cuts.container}]", (*order, BYTES))


def _shifted_digits(field: Field, cuts: SliceCut, split: Chain, lanes: list[Lane]) -> Chain:
    """The bytes of the base-3 digits in lanes."""
    lanes = sorted(lanes, key=lambda lane: lane.place)
    picked = [split.select(dict(zip(cuts.bits, lane.values, strict=True))) for lane in lanes]
    texts = ", ".join(lane.text for lane in picked)
    if len(picked) > 2 and len(cuts.bits) == 1 and [lane.values for lane in lanes] == [(i,) for i in range(len(lanes))]:
        texts = f"{split.pick({cuts.bits[0]: 'i'}).text} for i in range({len(lanes)})"
    return Chain(f'base3([{texts}], "{field.name}")', picked[0].labels)


def _masked_text(field: Field, part: FieldSlice, text: str, wide: str = "", has_sign: bool = False) -> str:
    """The slice's bits of an element, at bit 0, in dtype `wide`.  has_sign: mask a sign bit that would be extended."""
    if part.width == field.bits and not ts.is_signed(field):
        return f"({text}{wide} & {(1 << part.width) - 1})" if has_sign else text + wide
    shown = f"{text} >> {part.lo}" if part.lo else text
    keep = part.lo + part.width < field.bits or ts.is_signed(field) or has_sign
    return (f"({shown} & {(1 << part.width) - 1})" if keep else f"({shown})") + wide
