"""Prints a variant's description in its module: types and axes of its fields, and its storages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from qdsl.compiler.emit.axes import axis_text, field_axes, stored_axes
from qdsl.compiler.emit.branches import branch_lines
from qdsl.compiler.emit.c.rows import row_loops
from qdsl.compiler.emit.formula import constant, tables
from qdsl.compiler.emit.lines import indent, wrapped
from qdsl.compiler.emit.literals import literal, quoted, tupled
from qdsl.compiler.emit.module.bits import bits_texts
from qdsl.compiler.emit.tensors import is_plain
from qdsl.compiler.emit.torch.decode import Decode
from qdsl.compiler.emit.torch.reference import Reference
from qdsl.compiler.emit.triton.arrangement import arrangement
from qdsl.compiler.emit.triton.kernel import tile
from qdsl.compiler.emit.triton.matrix_unit import constants
from qdsl.compiler.emit.triton.pairs import paired
from qdsl.compiler.emit.triton.plan import matrix_unit_plan
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Encode, Placement, Program, Stream, Tensor
from qdsl.compiler.passes.derive_planar import order_name
from qdsl.compiler.spec.tables import is_number
from qdsl.core.codecs import CODECS
from qdsl.core.schemes import SCHEMES


def variant(programs: Sequence[Program], decoded: Decode, references: Sequence[Reference]) -> list[str]:
    """Lines of `VARIANT = Variant(...)`: fields, storages, and the calls of decode and encode."""
    first = programs[0]
    shown: list[str] = []
    for field in first.fields:
        groups = f', groups="{axis_text(field.groups)}"' if field.groups is not None else ""
        axes = "".join(f', "{axis}"' for axis in field_axes(programs, field))
        shown.append(f'"{field.name}": Field("{field.kind}"{axes}{groups})')
    lines = ["VARIANT = Variant(", *indent(wrapped("fields={", shown, "},", level=1)), "    storages={"]
    defaults = _defaults(programs)
    moves = len(programs) > 1 or (first.encode is not None and SCHEMES[first.encode.scheme].kernel
                                  and "sums" not in first.encode.roles)
    for program, reference in zip(programs, references, strict=True):
        always = [name for name in defaults if name not in program.unstored]
        lines += indent(_storage(program, reference, moves, always), 2)
    lines.append("    },")
    arguments = ["decode=decode", *(_encode(first) if first.encode is not None else [])]
    if defaults:
        arguments.append("defaults={" + ", ".join(f'"{name}": {value}' for name, value in defaults.items()) + "}")
    if decoded.scattered:
        arguments.append('cuts=("1", "1")')
    elif [str(cut) for cut in decoded.cuts] != ["1", "1"]:
        cuts = [dim if str(cut) == "1" else axis_text(cut) if "K" in cut.names() else f"ceil({dim}/{cut})"
                 for dim, cut in zip("NK", decoded.cuts, strict=True)]
        arguments.append(f"cuts={tupled(cuts)}")
    arguments += row_loops(programs)
    if first.encode is not None and first.appended:
        arguments.append(f"appended={tupled(first.appended)}")
    if decoded.copies:
        arguments.append(f'copies="{decoded.copies}"')
    return [*lines, *indent([*wrapped("", arguments, ",", level=1), *branch_lines(first)]), ")"]


def _encode(program: Program) -> list[str]:
    """The encoder, and the options that a caller may choose."""
    encode = program.encode
    assert encode is not None
    code = program.field(encode.roles["code"]).number
    assert code is not None
    words = {option: map(literal, SCHEMES[encode.scheme].words(option, code)) for option in encode.open}
    options = ", ".join(f"{quoted(option)}: ({', '.join(allowed)})" for option, allowed in words.items())
    arguments = ["encode=encode", "importance=True" if encode.importance else "", f"options={{{options}}}" if options else "",
                 *(_scheme(encode) if SCHEMES[encode.scheme].kernel else [])]
    return [argument for argument in arguments if argument]


def _scheme(encode: Encode) -> list[str]:
    """The scheme as data, for kernels that encode."""
    settings = {key: literal(value) for key, value in encode.options.items()}
    settings |= {key: constant(value) if isinstance(value, str) else str(value)
                 for key, value in encode.constants.items() if value}
    shown = [", ".join(f"{quoted(key)}: {value}" for key, value in pairs.items())
             for pairs in ({role: quoted(field) for role, field in encode.roles.items()}, settings)]
    return [f'scheme="{encode.scheme}"', f"roles={{{shown[0]}}}", f"settings={{{shown[1]}}}" if shown[1] else ""]


def _defaults(programs: Sequence[Program]) -> dict[str, str]:
    """Optional fields: an integer as default, or None for an index in order."""
    defaults: dict[str, str] = {}
    for program in programs:
        for name, value in program.unstored.items():
            defaults[name] = "None" if program.field(name).number is None else str(value)
    return defaults


def _storage(program: Program, reference: Reference, moves: bool, always: Sequence[str]) -> list[str]:
    """Describes a storage.  moves: storages exchange bits, or a kernel of caches writes them.

    always: fields that other storages may omit but this one holds.
    """
    name = program.storage
    arguments = [f"unpack=unpack_{name}", f"pack=pack_{name}", *_more_arguments(program, reference, always), "tensors={"]
    lines = wrapped(f'"{name}": Storage(', arguments, "", level=2)
    for name_in_files, tensors in program.stored.items():
        stream = tensors[0].stream
        lines += _coded(stream) if stream else [f'    "{name_in_files}": {_stored(program, tensors, moves)},']
    order, shape = order_name(program), program.authored.shape
    kind, _, within = program.authored.order_type.partition(" in ")
    within = f', within="{within}"' if within else ""
    lines += [f'    "{order}": Stored("{kind}", "K", optional="{order}"{within}),'] if order else []
    lines += [f'    "{shape}": Stored("shape", "2"),'] if shape else []
    return [*lines, *wrapped("}, kernels=Kernels(", _kernels(program), ")),", level=2)]


def _stored(program: Program, tensors: Sequence[Tensor], moves: bool) -> str:
    """Describes a tensor.  tensors: the tensor, or its sections."""
    tensor = tensors[0]
    kind, axes = _typed(program, tensors)
    arguments = [quoted(kind), *map(quoted, axes)]
    arguments += [f"aliases={tupled(tensor.aliases)}"] if tensor.aliases else []
    arguments += [f'optional="{tensor.placements[0].field}"'] if tensor.optional else []
    arguments += [f"seen={tupled([axis.value for axis in tensor.seen])}"] if tensor.seen else []
    arguments += [f'within="{tensor.within}"'] if tensor.within else []
    bits = bits_texts(program, tensors) if moves else []
    arguments += [f"bits={tupled(bits)}"] if bits else []
    change = tensor.stored
    adds = change.amount if moves and change is not None and change.field is None and change.op == "+" else 0
    arguments += [f"adds={adds:#x}"] if adds else []
    return f"Stored({', '.join(arguments)})"


def _typed(program: Program, tensors: Sequence[Tensor]) -> tuple[str, list[str]]:
    """A tensor's type, 'index' if it holds group numbers, and its axes.  tensors: the tensor, or its sections."""
    tensor = tensors[0]
    index = is_plain(program, tensor) and program.field(tensor.placements[0].field).number is None
    return "index" if index else tensor.kind, stored_axes(tensors)


def _kernels(program: Program) -> list[str]:
    """The kernels of a storage, and their tiles of a weight."""
    at = tile(program)
    sums = prod(lane.extent for lane in at.lanes if lane.axis == "n")
    arguments = [f"_decode_{program.storage}", f'rows="{axis_text(at.row_count)}"',
             f'units="{axis_text(at.unit_count)}"', f'last="{at.last}"', *([f"sums={sums}"] if sums > 1 else [])]
    if (arranged := arrangement(program)) is not None:
        arguments += [f"{key}={tupled(part)}" for key, part in zip(("digits", "lanes", "order"), arranged, strict=True) if part]
    arguments += ["divides=True"] if _divides(program) else []
    arguments += [f"tables=({', '.join(map(constant, tables(program)))},)"] if tables(program) else []
    if (plan := matrix_unit_plan(program)) is not None:
        arguments.append(f"matrix_unit=MatrixUnitKernels({', '.join(constants(plan))})")
    if (two := paired(program)) is not None:
        arguments.append(f'pairs=Pairs(_pairs_{program.storage}, "{two.type}", "{two.stream}", {two.at}, "{two.uncoded}")')
    return arguments


def _divides(program: Program) -> bool:
    """Whether decode divides by stored numbers."""
    def is_stored(number: int) -> bool:
        value = program.values[number]
        return value.op != "const" if not value.args else any(map(is_stored, value.args))

    return any(value.op == "/" and is_stored(value.args[1]) for value in program.values)


def _more_arguments(program: Program, reference: Reference, always: Sequence[str]) -> list[str]:
    """The optional arguments of a storage's description."""
    authored, order = program.authored, order_name(program)
    omitted = [tensor.placements[0].field for tensor in program.tensors if tensor.omitted]
    fewest = [f"{quoted(axis_text(program.dims[key.value]))}: {extent}" for key, extent in authored.least]
    options = [f"{quoted(key.value)}: {word.value if is_number(word.value) else literal(word.value)}"
               for key, word in authored.options]
    unordered = [tensor.name.value for tensor in authored.tensors if tensor.ordered is False]
    reads, extents = reference.unpack_extents, reference.pack_extents
    streams = [f"{quoted(tensor.name)}: {_stream(program, tensor, tensor.stream)}" for tensor in program.tensors if tensor.stream]
    arguments = [f"where={tupled(list(program.where))}" if program.where else "",
            f"always={tupled(always)}" if always else "",
            f"omits={tupled(omitted)}" if omitted else "",
            f"least={{{', '.join(fewest)}}}" if fewest else "",
            f"fixed={dict(program.spec.fixed)}".replace("'", '"') if program.spec.fixed else "",
            f"options={{{', '.join(options)}}}" if options else "",
            f"reads={tupled(reads)}" if reads else "",
            f"extents={tupled(extents)}" if extents else "",
            "whole=True" if _is_whole(program) else "",
            f'order="{order}"' if order else "",
            f"unordered={tupled(unordered)}" if unordered else "",
            f"streams={{{', '.join(streams)}}}" if streams else "",
            f'shape="{authored.shape}"' if authored.shape else "",
            f'factor="{program.affine.columns}"' if program.affine is not None and program.affine.columns
            and matrix_unit_plan(program) is not None else ""]
    return [argument for argument in arguments if argument]


def _is_whole(program: Program) -> bool:
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


def _stream(program: Program, tensor: Tensor, stream: Stream) -> str:
    """The entropy code of a tensor, and the code's tensors by role."""
    kind, axes = _typed(program, [tensor])
    stored = ", ".join(map(quoted, (kind, *axes)))
    named = "".join(f', {role}="{name}"' for role, name in stream.tensors.items())
    return f'Stream("{stream.coding}", Stored({stored}){named})'


def _coded(stream: Stream) -> list[str]:
    """The tensors of an entropy code."""
    return [f'    "{stream.tensors[role]}": Stored({", ".join(map(quoted, (kind, *axes)))}),'
            for role, (kind, axes) in CODECS[stream.coding].tensors.items()]
