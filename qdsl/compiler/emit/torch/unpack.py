"""Prints `unpack` of the torch reference, from stored tensors to fields.

Fields are torch tensors: uint8 for codes up to 8 bits, int8 for signed ones, int32 for wider ones, and the float's own dtype if
torch has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qdsl.compiler.emit import tensors as ts
from qdsl.compiler.emit.digits import Digit, Lane, SliceCut
from qdsl.compiler.emit.lines import assign_text, indent, mapping
from qdsl.compiler.emit.row_codes import field_entry
from qdsl.compiler.emit.torch.sections import cut_lines
from qdsl.compiler.emit.views import BYTES, Chain, Label, view_bytes
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Field, Placement, Program, Tensor
from qdsl.core.layout import FieldSlice


def unpack_body(program: Program) -> list[str]:
    """Statements that build the dict of fields from the stored tensors; an optional field that equals its tensor may be None."""
    lines = cut_lines(program)
    inside: dict[str, list[str]] = {}                            # of optional tensors
    parts: dict[str, list[tuple[int, str]]] = {}
    for tensor in sorted(program.tensors, key=lambda tensor: tensor.optional):
        before = len(lines)
        for name, lo, text in _unpack_fields(program, tensor, lines):
            parts.setdefault(name, []).append((lo, text))
        if tensor.optional:
            inside[tensor.name] = lines[before:]
    lines = lines[:len(lines) - sum(map(len, inside.values()))]
    optional = {tensor.placements[0].field: tensor.name for tensor in program.tensors if tensor.optional}
    optional = {field: name for field, name in optional.items() if parts[field] != [(0, name)]}
    stored = [field for field in program.fields if field.name in parts]
    entries = [field_entry(program, f.name, _join_parts(f, parts[f.name])) for f in stored if f.name not in optional]
    if len(optional) == 0:
        return [*lines, *mapping("return ", entries)]
    lines += mapping("fields = ", entries)
    for field in stored:
        if field.name in optional:
            lines += [f"if {optional[field.name]} is not None:", *indent(inside.get(optional[field.name], [])),
                      f'    fields["{field.name}"] = {_join_parts(field, parts[field.name])}']
    return [*lines, "return fields"]


def _unpack_fields(program: Program, tensor: Tensor, lines: list[str]) -> Iterator[tuple[str, int, str]]:
    """(field, its lowest bit here, text of those bits) for all fields of a tensor; appends the statements that they need."""
    taken = ts.arguments(program)
    if ts.is_plain(program, tensor):
        field = program.field(tensor.placements[0].field)
        yield field.name, 0, _unpack_plain(tensor, tensor.placements[0], field, ts.digits_in_order(tensor))
        return
    if placements := ts.element_placements(program, tensor):
        for place, placement in enumerate(placements):
            yield placement.field, 0, _element(program, tensor, placement, place)
        return
    records = _view_records(tensor)
    if records.text != tensor.name:
        text = assign_text(lines, ts.records_name(program, tensor), ts.strip_parens(records.text), taken)
        records = Chain(text, records.labels)
    for placement in tensor.placements:
        field = program.field(placement.field)
        for ranges in placement.cuts:
            text = _unpack_slices(field, tensor, placement, ranges, records, lines, taken)
            if ranges[0].width < field.bits:
                text = assign_text(lines, f"{field.name}_{'high' if ranges[0].lo else 'low'}", ts.strip_parens(text), taken)
            yield field.name, ranges[0].lo, text


def _element(program: Program, tensor: Tensor, placement: Placement, place: int) -> str:
    chain = Chain(tensor.name, (*(axis.digits[0] for axis in tensor.axes[:-1]), BYTES)).pick({BYTES: str(place)})
    return _unpack_plain(tensor, placement, program.field(placement.field), chain.permute(ts.axis_labels(tensor)))


def _unpack_plain(tensor: Tensor, placement: Placement, field: Field, chain: Chain) -> str:
    for axis, digits in enumerate(placement.digits):
        chain = chain.flatten(axis, sum(map(bool, digits)), f"axis {axis}")
    text = _cropped_text(tensor, placement, field, chain.text)
    if ts.tensor_dtype(tensor) == "int16" and ts.field_dtype(field) == "int32":
        text = f"({text}.to(torch.int32) & 65535)"
    elif ts.tensor_dtype(tensor) != ts.field_dtype(field):
        text = _viewed(text, ts.field_dtype(field))
    return ts.field_shifted(tensor, field, text, -1)


def _view_records(tensor: Tensor) -> Chain:
    """The tensor as bytes, one record along the last axis; a record of one byte needs no axis."""
    chain = ts.digits_in_order(tensor)
    order = ts.axis_labels(tensor)
    if _is_transposed(tensor):
        text = f"as_type({ts.strip_parens(ts.shifted(tensor, tensor.name, -1))}, torch.uint8).t().contiguous()"
        return Chain(f"{text}.unflatten(0, (-1, {tensor.record_bits // 8}))", (order[0], BYTES, order[1]))
    if tensor.record_bits == 8:
        return chain if ts.tensor_dtype(tensor) == "uint8" else chain.call("view(torch.uint8)")
    text = chain.text
    if not chain.labels:
        return Chain(f"as_type({ts.strip_parens(text)}.unsqueeze(-1), torch.uint8)", (BYTES,))
    if ts.tensor_dtype(tensor) != "uint8":
        text = f"as_type({ts.strip_parens(text)}, torch.uint8)"
    if BYTES not in chain.labels:
        text = f"{text}.unflatten(-1, (-1, {tensor.record_bits // 8}))"
    return Chain(text, (*order, BYTES))


def _is_transposed(tensor: Tensor) -> bool:
    """Whether a record's elements lie along the tensor's last axis, which is not the field's last axis.

    Then the bytes are transposed as a matrix, and extracted parts already lie along the field's last axis.
    """
    placement, part = tensor.placements[0], tensor.placements[0].slices[0]
    alone = len(tensor.placements) == len(placement.slices) == tensor.words == 1 and part.filled == tensor.record_bits > 8
    across = [axis.digits[:1] for axis in tensor.axes] == [(name,) for name in reversed(ts.axis_labels(tensor))]
    inside_byte = part.width in (1, 2, 4) and not part.places
    return alone and placement.plain and len(tensor.axes) == 2 and across and inside_byte and part.extents[-1] == 1


def _unpack_slices(field: Field, tensor: Tensor, placement: Placement, ranges: Sequence[FieldSlice], records: Chain,
                   lines: list[str],
                   taken: set[str]) -> str:
    """The same bits of all elements, in the field's shape."""
    alone = len(ranges) == 1
    chains = [_unpack_slice(field, tensor, placement, part, records, lines, taken, alone) for part in ranges]
    chain = chains[0]
    if not alone:
        texts = [assign_text(lines, f"{field.name}_{part.start}", ts.strip_parens(part_chain.text), taken)
                 for part, part_chain in zip(ranges, chains, strict=True)]
        chain = Chain(f"torch.cat([{', '.join(texts)}], -1)", chain.labels)
        last = len(placement.digits) - 1
        chain = chain.flatten(last, len(chain.labels) - last, f"axis {last}")
    return ts.field_shifted(tensor, field, _cropped_text(tensor, placement, field, chain.text), -1)


def _unpack_slice(field: Field, tensor: Tensor, placement: Placement, part: FieldSlice, records: Chain, lines: list[str],
                  taken: set[str], alone: bool) -> Chain:
    """The bits of one slice with an axis per coordinate; if ranges follow, the last axis has its records apart."""
    cuts = ts.cut_slice(tensor, placement, part)
    if ts.is_stored_as_field(field, cuts):
        chain = _view_as_type(field, tensor, cuts, records)
    else:
        chain = _unpack_lanes(field, tensor, cuts, records, lines, taken)
    wanted = ts.element_labels(placement, cuts)
    chain = chain.in_rising_order().permute([label for group in wanted for label in group])
    if not alone and not placement.plain:
        raise ts.Unsupported(f"the elements of '{field.name}' in '{tensor.name}' lie in ranges, and records between them")
    if not alone and placement.tiles[-1][0]:
        wanted[-1:] = [wanted[-1][:1], wanted[-1][1:]]
    for axis, group in enumerate(wanted):
        chain = chain.flatten(axis, len(group), f"axis {axis}")
    return chain


def _record_region(tensor: Tensor, cuts: SliceCut, records: Chain, skip: int, size: int = 1) -> tuple[Chain, tuple[Digit, ...]]:
    """The bytes (or elements of `size` bytes) of a slice."""
    if BYTES not in records.labels:
        return records, ()
    view = view_bytes(records, cuts, skip, tensor.record_bits // 8 // size)
    if view is None:
        raise ts.Unsupported(f"the bytes of a field in '{tensor.name}' are too scattered for a view")
    return view


def _view_as_type(field: Field, tensor: Tensor, cuts: SliceCut, records: Chain) -> Chain:
    """Bytes as their elements; if they are aligned, the view covers all bytes of the record."""
    kind, size = ts.type_text(field, tensor, tensor.name, ts.field_dtype(field)), cuts.container
    steps = (cuts.first, tensor.record_bits // 8, *(digit.stride // 8 for digit in cuts.bytes_))
    if size > 1 and all(step % size == 0 for step in steps):
        wide = Chain(f"as_type({records.text}, {kind})", records.labels)
        moved = replace(cuts, first=cuts.first // size, container=1,
                        bytes_=tuple(replace(d, stride=d.stride // size) for d in cuts.bytes_))
        if not cuts.bytes_:
            return wide.pick({BYTES: str(moved.first)})
        chain, digits = _record_region(tensor, moved, wide, 0, size)
        wide_digits = _digits(chain, digits, ts.sizes(list(digits)))
        back: dict[Label, Label] = dict(zip(moved.bytes_, cuts.bytes_, strict=True))
        return Chain(wide_digits.text, tuple(back.get(label, label) for label in wide_digits.labels))
    chain, digits = _record_region(tensor, cuts, records, 0)
    if kind != "torch.uint8":
        chain = Chain(f"as_type({chain.text}, {kind})", chain.labels)
    return _digits(chain, digits, ts.sizes(list(digits)))


def _digits(chain: Chain, labels: tuple[Label, ...], shape: list[int]) -> Chain:
    """The bytes of a region, unflattened into their digits."""
    return chain.unflatten(chain.labels.index(BYTES), labels, shape) if BYTES in chain.labels else chain


def _unpack_lanes(field: Field, tensor: Tensor, cuts: SliceCut, records: Chain, lines: list[str], taken: set[str]) -> Chain:
    """Containers shifted and masked once per lane, stacked along a new axis where there are several lanes."""
    sources = {skip: _view_container(tensor, cuts, records, skip) for skip in cuts.skips}
    one = sources[cuts.skips[0]]
    is_transposed = BYTES in records.labels[:-1]
    if cuts.spread_arguments and not is_transposed and _new_axis_position(one.labels, cuts.bits[0]) == len(one.labels):
        neighbours = Chain(f"spread({one.text}, {cuts.spread_arguments})", (*one.labels, cuts.bits[0]))
        return neighbours if field.bits <= 8 else neighbours.call("to(torch.int32)")
    if len(cuts.lanes) > 1 and len(sources) == 1 and one.text != records.text:
        # Extracting runs of a few bytes is slow if they are apart; one copy joins them.
        apart = cuts.container == 1 and "[" in one.text
        name = assign_text(lines, f"{field.name}_{'bytes' if cuts.container == 1 else 'words'}",
                           f"{one.text}.contiguous()" if apart else one.text, taken)
        sources = {cuts.skips[0]: Chain(name, one.labels)}
    texts = [_extract_text(sources[lane.skip].text, lane, cuts) for lane in cuts.lanes]
    narrow = ".to(torch.uint8)" if cuts.container > 1 and field.bits <= 8 else \
        ".to(torch.int32)" if cuts.container > 3 and field.bits > 8 else ""       # `integer` returns int64 for more than 3 bytes
    if len(texts) == 1:
        return Chain(f"{'first_trit' if cuts.part.places else ''}({texts[0]}){narrow}", one.labels)
    place = _new_axis_position(one.labels[:-1] if is_transposed else one.labels, cuts.bits[0])
    listed = ", ".join(texts)
    text = sources[cuts.skips[0]].text
    if len(texts) > 2 and [lane.place for lane in cuts.lanes] == list(range(len(texts))) and len(sources) == 1:
        listed = f"{text} * 3 ** i for i in range({len(texts)})"
    elif len(texts) > 2 and len(cuts.bits) == 1 and len(sources) == 1 and not cuts.part.places:
        listed = f"{text} >> {cuts.shift} & {(1 << cuts.part.width) - 1} for i in range({len(texts)})"
    text = f"torch.stack([{listed}], {place - len(one.labels) - 1}){narrow}"
    stacked = Chain(f"first_trit({text})" if cuts.part.places else text, (*one.labels[:place], BYTES, *one.labels[place:]))
    return stacked.unflatten(place, cuts.bits, [d.extent for d in cuts.bits])


def _view_container(tensor: Tensor, cuts: SliceCut, records: Chain, skip: int) -> Chain:
    """The containers as integers, one axis per byte digit."""
    chain, digits = _record_region(tensor, cuts, records, skip)
    labels: tuple[Label, ...] = (*digits, BYTES) if cuts.container > 1 else digits
    shape = [*ts.sizes(list(digits)), cuts.container] if cuts.container > 1 else ts.sizes(list(digits))
    chain = _digits(chain, labels, shape)
    return Chain(f"integer({chain.text})", chain.labels[:-1]) if cuts.container > 1 else chain


def _new_axis_position(labels: tuple[Label, ...], lane: Digit) -> int:
    """The position of the new axis that keeps the digits of coordinates in order: before the first faster digit."""
    for place, label in enumerate(labels):
        if isinstance(label, Digit) and (label.axis, -label.weight) > (lane.axis, -lane.weight):
            return place
    return len(labels)


def _extract_text(text: str, lane: Lane, cuts: SliceCut) -> str:
    """`text >> shift & mask`, without parts that have no effect; or the bytes whose first digit is needed."""
    if cuts.part.places:
        return f"{text} * {3 ** lane.place}" if lane.place else text
    shown = f"{text} >> {lane.shift}" if lane.shift else text
    top = cuts.container == 1 and lane.shift + cuts.part.width == 8
    return shown if top else f"{shown} & {(1 << cuts.part.width) - 1}"


def _cropped_text(tensor: Tensor, placement: Placement, field: Field, text: str) -> str:
    """The text without the padding of the last record, if any; flat positions become rows again."""
    if placement.flat:
        return f"{text}[:N * K].unflatten(0, (N, K))"
    shown = [":" if all(tensor.var(name).exact for name in digits if name) else f":{ix.text(extent)}"
             for digits, extent in zip(placement.digits, field.extents, strict=True)]
    return text if set(shown) <= {":"} else f"{text}[{', '.join(shown)}]"


def _join_parts(field: Field, parts: list[tuple[int, str]]) -> str:
    """A field joined from its slices, low bits first, with its sign and type."""
    number = field.number
    typed = len(parts) == 1 and (number is None or not ts.is_signed(field) or number.bits == 8)
    if typed:
        return ts.strip_parens(parts[0][1])
    wide = ".to(torch.int32)" if field.bits > 8 else ""
    text = " | ".join(f"{text}{wide}" if lo == 0 else f"{text}{wide} << {lo}" for lo, text in sorted(parts))
    if ts.is_signed(field):
        half = 1 << field.bits - 1
        view = f"({text}).view(torch.int8)" if field.bits <= 8 else f"({text})"
        return view if field.bits in (8, 32) else f"({view} ^ {half}) - {half}"
    if number is not None and number.is_float and ts.field_dtype(field) != "uint8":
        short = ".to(torch.int16)" if number.bits == 16 else ".to(torch.uint8)" if number.bits == 8 else ""
        return _viewed(f"({text}){short}", ts.field_dtype(field))
    return text


def _viewed(text: str, dtype: str) -> str:
    """The same bits in another dtype; as_type leaves 8-bit floats as bytes on devices that lack them."""
    return f"as_type({ts.strip_parens(text)}, torch.{dtype})" if dtype.startswith("float8") else f"{text}.view(torch.{dtype})"
