"""The program of a format as data: what the literal `PROGRAM` of its module says (core/program.py)."""

from __future__ import annotations

import hashlib
from ast import literal_eval
from collections.abc import Mapping, Sequence
from struct import pack, unpack
from typing import Any

from qdsl.compiler.emit.axes import axis_text, field_axes, stored_axes
from qdsl.compiler.emit.branch_description import branch_data
from qdsl.compiler.emit.literals import not_empty
from qdsl.compiler.emit.module.slices import stored_arguments
from qdsl.compiler.emit.show.page import bits_per_weight
from qdsl.compiler.emit.tensors import is_plain
from qdsl.compiler.emit.torch.decode import DecodeBody
from qdsl.compiler.emit.triton.matrix_unit_layout import matrix_unit_plan
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Encode, Placement, Program, Stream, Tensor
from qdsl.compiler.passes.derive_planar import order_name
from qdsl.compiler.passes.samples import size_axis
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.tables import is_number
from qdsl.core.codecs import CODECS
from qdsl.core.layout import record_pieces
from qdsl.core.schemes import SCHEMES

Data = dict[str, Any]


def format_data(programs: Sequence[Program], by: Sequence[str],
                variants: Mapping[tuple[int | str, ...], Mapping[str, Any]]) -> Data:
    first = programs[0]
    spec = first.spec
    return {"name": spec.name.value, "title": spec.title, "source": spec.origin, "formula": spec.decode_text,
            "bits": bits_per_weight(programs), "digest": digest_of(spec),
            **not_empty(params={param.name.value: tuple(param.written) for param in spec.params},
                        sizes={size: size_axis(first, size) for size in first.sizes}, by=tuple(by), fixed=dict(spec.fixed),
                        detect=spec.detect, tables=_tables(spec)), "variants": variants}


def digest_of(spec: Spec) -> str:
    """The first 16 digits of the SHA-256 of a spec's text; they tell formats of one name apart."""
    return hashlib.sha256(spec.source.text.encode()).hexdigest()[:16]


def variant_data(programs: Sequence[Program], decoded: DecodeBody) -> Data:
    first = programs[0]
    fields = {field.name: (field.kind, *field_axes(programs, field), *options(groups=field.groups and axis_text(field.groups)))
              for field in first.fields}
    storages = {program.storage: {"tensors": _tensors(program), **_storage_properties(program)} for program in programs}
    cuts = _border_axes(decoded)
    return {"fields": fields, **({} if cuts == ("N", "K") else {"cuts": cuts}), "storages": storages,
            **({"only_read": True} if first.encode is None else not_empty(options=_quantizer_options(first, first.encode))),
            **not_empty(codes=_code_offsets(first), defaults=_defaults(programs), plus=branch_data(first),
                        appended=first.appended if first.encode is not None else (), copies=decoded.copies)}


def _quantizer_options(program: Program, encode: Encode) -> Data:
    """The options of the encode scheme that a caller may choose, with their values."""
    code = program.field(encode.roles["code"]).number
    assert code is not None
    return {option: tuple(map(_option, SCHEMES[encode.scheme].words(option, code))) for option in encode.open}


def options(**values: object) -> tuple[Data, ...]:
    """The last item of a tuple of arguments: those with names; nothing if all are empty."""
    named = not_empty(**values)
    return (named,) if named else ()


def _tables(spec: Spec) -> Data:
    """The tables that `detect` compares with small tensors of a checkpoint, in float32."""
    rules: Any = spec.detect.get("tensors", {})
    named = [table for table in spec.tables if table.name.value in [rule for rule in rules.values() if isinstance(rule, str)]]
    return {table.name.value: tuple(unpack("<f", pack("<f", value))[0] for value in table.values) for table in named}


def _border_axes(decoded: DecodeBody) -> tuple[str, str]:
    """The axes whose steps are legal borders of a slice."""
    if decoded.scattered:
        return "1", "1"
    n, k = (dim if str(cut) == "1" else axis_text(cut) if "K" in cut.names() else f"ceil({dim}/{cut})"
            for dim, cut in zip("NK", decoded.cuts, strict=True))
    return n, k


def _code_offsets(program: Program) -> Data:
    """The fields that decode adds to a multiple of the code, and the code at which it returns them: q = 8 for (q - 8) * s + z."""
    affine = program.affine
    if affine is None or affine.table or affine.columns:
        return {}
    codes: Data = {}
    for code in range(1 << min(8, program.field(affine.code).bits)):
        sums: dict[tuple[str, ...], float] = {}
        zeros = (*affine.zero, (float(code), ()))
        terms = [*((a * b, x + y) for a, x in affine.scale for b, y in zeros), *affine.offset]
        for coefficient, product in terms:
            sums[product] = sums.get(product, 0.0) + coefficient
        left = [product for product, coefficient in sums.items() if coefficient]
        if len(left) == 1 and (1.0, left[0]) in affine.offset and len(left[0]) == 1:
            codes.setdefault(left[0][0], code)
    return codes


def _defaults(programs: Sequence[Program]) -> Data:
    """Optional fields: an integer as default, or None for an index in order."""
    return {name: None if program.field(name).number is None else value.const
            for program in programs for name, value in program.unstored.items()}


def _tensors(program: Program) -> Data:
    """The tensors of a storage without those of branches: the arguments of `Stored`."""
    tensors: Data = {}
    for name, sections in program.stored.items():
        stream = sections[0].stream
        tensors |= {stream.tensors[role]: (kind, *axes) for role, (kind, axes) in CODECS[stream.coding].tensors.items()} \
            if stream else {name: _tensor(program, sections)}
    order, shape = order_name(program), program.authored.shape
    kind, _, within = program.authored.order_type.partition(" in ")
    tensors |= {order: (kind, "K", {"optional": order, **not_empty(within=within)})} if order else {}
    return tensors | ({shape.value: ("shape", "2")} if shape else {})


def _tensor(program: Program, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The arguments of `Stored` for a tensor.  tensors: the tensor, or its sections."""
    tensor = tensors[0]
    change = tensor.stored
    adds = change.amount if change is not None and change.field is None and change.op == "+" else 0
    return (*_type_and_axes(program, tensors), *options(
        aliases=tensor.aliases, optional=tensor.placements[0].field if tensor.optional else "", padding=_padding_bits(tensor),
        seen=tuple(axis.value for axis in tensor.seen), within=tensor.within, adds=adds, **stored_arguments(program, tensors)))


def _type_and_axes(program: Program, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """A tensor's type, 'index' if it holds group numbers, and its axes.  tensors: the tensor, or its sections."""
    tensor = tensors[0]
    index = is_plain(program, tensor) and program.field(tensor.placements[0].field).number is None
    return ("index" if index else tensor.kind, *stored_axes(tensors))


def _padding_bits(tensor: Tensor) -> int:
    """The padding bits of every element, if an element is a record."""
    pieces = list(record_pieces(tensor.lines))
    if tensor.words > 1 or tensor.stored or tensor.section or any(piece.place is not None for piece in pieces):
        return 0
    used = sum((1 << piece.width) - 1 << piece.at for piece in pieces if piece.field or piece.again)
    return (1 << tensor.record_bits) - 1 - used


def _storage_properties(program: Program) -> Data:
    """What a storage's description has beside its tensors."""
    authored, affine = program.authored, program.affine
    order = order_name(program)
    factor = affine.columns if affine is not None and affine.columns and matrix_unit_plan(program) is not None else ""
    return not_empty(
        omits=tuple(tensor.placements[0].field for tensor in program.tensors if tensor.omitted),
        least={axis_text(program.dims[key.value]): extent for key, extent in authored.least}, fixed=dict(program.spec.fixed),
        options={key.value: _option(word.value) for key, word in authored.options},
        whole=_are_rows_joined(program), order=order,
        unordered=tuple(tensor.name.value for tensor in authored.tensors if tensor.ordered is False),
        streams={tensor.name: _stream(program, tensor, tensor.stream) for tensor in program.tensors if tensor.stream},
        shape=authored.shape and authored.shape.value, factor=factor, transient=authored.transient)


def _option(word: str) -> Any:
    return literal_eval(word) if is_number(word) else word == "true" if word in ("true", "false") else word


def _are_rows_joined(program: Program) -> bool:
    """Whether rows cannot be separated: a tensor, or the groups of a field, span the whole weight."""
    groups = [atom for field in program.fields for index in field.index if (atom := ix.flat_of(index)) and atom.op == "mod"]
    sections = [tensor.section for tensor in program.tensors if tensor.section is not None]
    regions = any(not section.by_rows and not section.is_plane for section in sections)
    return bool(groups) or regions or not all(placement.plain or _by_rows(tensor, placement)
                                              for tensor in program.tensors for placement in tensor.placements)


def _by_rows(tensor: Tensor, placement: Placement) -> bool:
    """Whether the slowest digit of the first coordinate is also the tensor's, so that runs of rows are contiguous."""
    first = next((digit for axis in tensor.axes for digit in axis.digits), "")
    return placement.digits[0][0] == first != "" and all(digits[1:] in ((), ("",)) for digits in placement.digits[1:])


def _stream(program: Program, tensor: Tensor, stream: Stream) -> tuple[Any, ...]:
    """The entropy code of a tensor, the decoded tensor, and the code's tensors by role."""
    decoded = (*_type_and_axes(program, [tensor]), *options(**stored_arguments(program, [tensor])))
    return stream.coding, decoded, dict(stream.tensors)
