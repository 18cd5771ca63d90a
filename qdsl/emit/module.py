"""A generated module: reference, kernels and description of a format, in one file or, where bits differ, in a package.

Parameters that change the text get a file per value; all others are arguments or types of tensors.  The text depends on the
spec and the compiler alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import qdsl
from qdsl.emit.axes import axis_text, field_axes, field_kinds, tensor_axes
from qdsl.emit.bits import bits_texts
from qdsl.emit.decode import Decode, decode
from qdsl.emit.formula import constant, tables
from qdsl.emit.kernel import tile
from qdsl.emit.kernels import kernels
from qdsl.emit.lanes import Plan, plan
from qdsl.emit.lines import WIDTH, folded, indent, wrapped
from qdsl.emit.pack import pack_body
from qdsl.emit.tables import constants
from qdsl.emit.tensors import Unsupported, is_plain, tensor_dtype
from qdsl.emit.unpack import unpack_body
from qdsl.ir import index as ix
from qdsl.ir.program import Field, Placement, Program, Stream, Tensor
from qdsl.numbers import FLOATS
from qdsl.passes.check_claims import bits_text
from qdsl.passes.derive_planar import order_name
from qdsl.passes.samples import size_axis
from qdsl.passes.schemes import SCHEMES
from qdsl.passes.streams import STREAMS
from qdsl.spec import model
from qdsl.spec.model import Data, Spec
from qdsl.spec.source import Problem, SpecError

RULE = "-" * 118
RUNTIME = ("Field", "Format", "Kernels", "Lanes", "Narrow", "Storage", "Stored", "Stream", "Table", "Variant", "as_float",
           "as_type", "base3", "cdiv", "codebook", "device", "empty", "integer", "lanes", "many", "narrow", "pad", "records",
           "spread", "trit", "workspace")


@dataclass(frozen=True, slots=True)
class Part:
    """The programs of one choice of the parameters that change the text, and that text."""

    params: Mapping[str, int | str]
    programs: tuple[Program, ...]
    body: tuple[str, ...]
    decode: Decode


def module(programs: Sequence[Program]) -> dict[str, str]:
    """Files of a format by path below the folder of generated modules: 'q4_0.py', or 'int_group/bits_4.py' and so on.

    Raises SpecError for a layout that is legal but cannot be said in views and shifts.
    """
    try:
        by, parts = _parts(programs)
    except Unsupported as error:
        raise SpecError([Problem(f"not supported: {error}", programs[0].spec.span)]) from None
    name = programs[0].spec.name.value
    if not by:
        part = parts[0]
        body = [*part.body, "", *_format(parts, by, programs)]
        lines = [*_header(part.programs), *_imports(body), "", "", *body]
        return {f"{name}.py": _finish(lines)}
    files = {}
    for part in parts:
        title = ", ".join(f"{key} = {part.params[key]}" for key in by)
        lines = [*_header(part.programs, title), *_imports(part.body), "", "", *part.body]
        files[f"{name}/{_part_name(by, part)}.py"] = _finish(lines)
    names = ", ".join(_part_name(by, part) for part in parts)
    different = [part.params for part in parts]
    header = _header([program for program in programs if program.params in different])
    lines = [*header, "from qdsl.runtime import Format", "", f"from . import {names}", "",
             *_format(parts, by, programs)]
    files[f"{name}/__init__.py"] = _finish(lines)
    return files


def _part_name(by: Sequence[str], part: Part) -> str:
    return "_".join(f"{key}_{part.params[key]}" for key in by)


def _finish(lines: Sequence[str]) -> str:
    text = "\n".join(row.rstrip() for line in lines for row in folded(line)) + "\n"
    ast.parse(text)                                              # a generator that writes no Python has a bug
    return text


# -- variants ---------------------------------------------------------------------------------------------------------


def _parts(programs: Sequence[Program]) -> tuple[tuple[str, ...], list[Part]]:
    """The parameters that change the text, and a part for each of their values."""
    choices: list[tuple[Mapping[str, int | str], list[Program]]] = []
    for program in programs:
        group = next((group for params, group in choices if params == program.params), None)
        if group is None:
            choices.append((program.params, [program]))
        else:
            group.append(program)
    made = [Part(params, tuple(group), tuple(_body(group)), decode(group)) for params, group in choices]
    by = tuple(key for key in programs[0].params if any(
        a.body != b.body for a in made for b in made
        if all(a.params[other] == b.params[other] for other in a.params if other != key)))
    parts: dict[tuple[int | str, ...], Part] = {}
    for part in made:
        parts.setdefault(tuple(part.params[key] for key in by), part)
    return by, list(parts.values())


def _body(programs: Sequence[Program]) -> list[str]:
    """Everything of a variant but its header and imports."""
    decoded = decode(programs)
    lines = [f"# -- reference {RULE[:103]}", ""]
    for line in constants(programs[0]):
        lines += ["", *line, ""]
    for program in programs:
        lines += ["", *_unpack(program), "", "", *_pack(program), ""]
    lines += ["", *_decode(programs, decoded), ""]
    if programs[0].encode is not None:
        lines += ["", *_encode(programs[0], decoded), ""]
    lines += ["", f"# -- kernels {RULE[:105]}", ""]
    for program in programs:
        lines += ["", *kernels(program), ""]
    return [*lines, "", f"# -- format {RULE[:106]}", "", *_variant(programs, decoded)]


# -- functions --------------------------------------------------------------------------------------------------------


def _unpack(program: Program) -> list[str]:
    optional = {tensor.name for tensor in program.tensors if tensor.optional}
    arguments = [f"{t.name}: Tensor{' | None' if t.name in optional else ''}" for t in program.tensors]
    if needs_shape(program):
        arguments += ["*", "N: int", "K: int"]
    stored = "; ".join(f"{t.name} {t.kind if t.kind in program.params else tensor_dtype(t)} [{', '.join(tensor_axes(t))}]"
                       for t in program.tensors)
    return [*wrapped(f"def unpack_{program.storage}(", arguments, ") -> dict[str, Tensor]:"),
            *indent([*_doc(f"Fields of {stored}."), *unpack_body(program)])]


def _pack(program: Program) -> list[str]:
    stored = [f for f in program.fields if f.name not in program.where]
    optional = set(program.defaults)
    arguments = [f"{f.name}: Tensor{' | None' if f.name in optional else ''}" for f in stored]
    extents = pack_extents(program)
    arguments += ["*", *(f"{word}: int" for word in extents)] if extents else []
    names = ", ".join(tensor.name for tensor in program.tensors)
    return [*wrapped(f"def pack_{program.storage}(", arguments, ") -> dict[str, Tensor]:"),
            *indent([*_doc(f"{names} of the fields; the inverse of unpack_{program.storage}."), *pack_body(program)])]


def pack_extents(program: Program) -> list[str]:
    """Which of N, K and the sizes pack must be told, because the fields' shapes do not say where digits of a coordinate end."""
    read = {node.id for node in ast.walk(ast.parse("\n".join(["def pack():", *indent(pack_body(program))])))
            if isinstance(node, ast.Name)}
    return [word for word in ("N", "K", *program.sizes) if word in read]


def needs_shape(program: Program) -> bool:
    """Whether unpack must be told N and K: the last record may be padded, or rows lie one after the other."""
    return any(placement.flat for tensor in program.tensors for placement in tensor.placements) or \
        any(not var.exact for tensor in program.tensors for var in tensor.vars)


def _decode(programs: Sequence[Program], decoded: Decode) -> list[str]:
    fields = sorted(decoded.fields, key=lambda f: f.name in decoded.optional)
    arguments = [f"{f.name}: Tensor{' | None = None' if f.name in decoded.optional else ''}" for f in fields]
    arguments.append("out: Tensor | None = None")
    shapes = ", ".join(f"{f.name} [{', '.join(field_axes(programs, f))}]" for f in fields)
    doc = f"Weights [N, K], float32 rounded after each operation: w = {programs[0].spec.decode_text}.  {shapes}."
    return [*wrapped("def decode(", arguments, ") -> Tensor:"), *indent([*_doc(doc), *decoded.lines])]


def _encode(program: Program, decoded: Decode) -> list[str]:
    encode = program.encode
    assert encode is not None
    scheme = SCHEMES[encode.scheme]
    sizes = list(program.sizes)
    types = [key for key, value in program.params.items() if isinstance(value, str)]
    flat = [atom for role in encode.roles.values() for i in program.field(role).index if (atom := ix.flat_of(i)) is not None]
    by = min((atom.args[1] for atom in flat), key=lambda size: size.const or size.terms[0][1], default=None)
    apart = flat[:1] and flat[0].op == "mod"                     # a group's weights are a column of the matrix [group, -1]
    if apart and by is not None:
        by = by.terms[0][0].args[1]
    fixed = ["weight" if by is None else f"weight.reshape({by}, -1).t()" if apart else "weight.reshape(1, -1)"]
    for role, field in encode.roles.items():
        kind = program.field(field).kind
        fixed.append(f"{role}={kind}" if kind in program.params else f'{role}="{kind}"')
    if "scale" in encode.roles:
        scale = program.field(encode.roles["scale"])
        across = [f"rows={_block(program, scale, 'n')}", f"axes={len(scale.index)}"] if scheme.across else []
        if by is not None:
            across = ["rows=1", "axes=2"]
        fixed += [*across[:1], f"columns={by or _block(program, scale, 'k')}", *across[1:]]
        fixed += [f"{word}_columns={_block(program, program.field(encode.roles[role]), 'k')}"
                  for word, role in (("super", "super_scale"), ("shift", "shift")) if role in encode.roles
                  and (flat or not scheme.across)]
        fixed += [f"sums_columns={_block(program, program.field(encode.roles['sums']), 'k')}"] if "sums" in encode.roles else []
    fixed += [f"{key}={_literal(value)}" for key, value in encode.options.items() if key not in encode.open]
    fixed += [f"{key}={constant(value) if isinstance(value, str) else value}" for key, value in encode.constants.items() if value]
    given = [f'"{key}": {_literal(value)}' for key, value in encode.options.items() if key in encode.open]
    call = [*fixed, f"**{{{', '.join(given)}, **options}}" if given else "**options"]
    named = [*(f"{size}: int" for size in sizes), *(f"{key}: str" for key in types)]
    if encode.importance:
        named.append("importance: Tensor | None = None")
        call.insert(-1, "importance=importance")
    head = ["weight: Tensor", *(["*", *named] if named else []), "**options: Any"]
    order = [encode.roles[role] for role in scheme.roles if role in encode.roles]
    doc = f"Fields for a float weight [N, K]: {scheme.summary}."
    if encode.importance:
        doc += "  importance: float32 [K]."
    if encode.open:
        doc += f"  options: {', '.join(encode.open)}."
    else:
        head.remove("**options: Any")
        call.remove("**options")
    made = {name: name for name in order}
    if by is not None:                                           # back from one row, or from a row for each group
        made = {name: f"{name}{'.t()' if apart else ''}.reshape(weight.shape)" if len(program.field(name).index) == 2 else
                f"{name}.flatten()" if program.field(name).index else name for name in order}
    return [*wrapped("def encode(", head, ") -> dict[str, Tensor]:"),
            *indent([*_doc(doc), *wrapped(f"{', '.join(order)} = {encode.scheme}(", call, ")", level=1),
                     f"return {{{', '.join(f'{_quoted(name)}: {made[name]}' for name in order)}}}"])]


def _literal(value: str | int | float) -> str:
    if value in ("true", "false"):
        return str(value == "true")
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(word: str) -> str:
    return f'"{word}"'


def _block(program: Program, field: Field, axis: str) -> str:
    """How many rows or columns share a value of the field, as text."""
    index = next((i for i in field.index if axis in i.names()), None)
    if index is None and axis == "k" and len(field.index) == 2:     # a gather: the block is that of the groups in order
        known = program.defaults.get(str(field.index[1])) or program.where.get(str(field.index[1]))
        index = known
    if index is None:
        return f"weight.shape[{'nk'.index(axis)}]"
    return "1" if index.terms[0][0].op == "name" else str(index.terms[0][0].args[1])


# -- description ------------------------------------------------------------------------------------------------------


def _variant(programs: Sequence[Program], decoded: Decode) -> list[str]:
    first = programs[0]
    lines = ["VARIANT = Variant(", "    fields={"]
    for field in first.fields:
        groups = f', groups="{axis_text(field.groups)}"' if field.groups is not None else ""
        axes = "".join(f', "{axis}"' for axis in field_axes(programs, field))
        lines.append(f'        "{field.name}": Field("{field.kind}"{axes}{groups}),')
    lines += ["    },", "    storages={"]
    defaults = _defaults(programs)
    for program in programs:
        always = [name for name in defaults if name not in {**program.defaults, **program.where}]
        lines += indent(_storage(program, len(programs) > 1, always), 2)
    lines.append("    },")
    tail = ["decode=decode"] + (["encode=encode"] if first.encode is not None else [])
    if first.encode is not None:
        scheme = SCHEMES[first.encode.scheme]
        code = first.field(first.encode.roles["code"]).number
        assert code is not None
        words = {option: [_literal(word) for word in scheme.words(option, code)] for option in first.encode.open}
        options = ", ".join(f"{_quoted(option)}: ({', '.join(allowed)})" for option, allowed in words.items())
        tail += ["importance=True"] if first.encode.importance else []
        tail += [f"options={{{options}}}"] if options else []
    if defaults:
        tail.append("defaults={" + ", ".join(f'"{name}": {value}' for name, value in defaults.items()) + "}")
    if [str(cut) for cut in decoded.cuts] != ["1", "1"] or decoded.scattered:
        shown = [dim if str(cut) == "1" else axis_text(cut) if "K" in cut.names() else f"ceil({dim}/{cut})"
                 for dim, cut in zip("NK", decoded.cuts, strict=True)] if not decoded.scattered else ["1", "1"]
        tail.append(f'cuts=("{shown[0]}", "{shown[1]}")')
    if decoded.copies:
        tail.append(f'copies="{decoded.copies}"')
    return [*lines, *indent(wrapped("", tail, ",", level=1)), ")"]


def _defaults(programs: Sequence[Program]) -> dict[str, str]:
    """Fields that may be missing: an integer, or None for an index in order."""
    found: dict[str, str] = {}
    for program in programs:
        for name, value in {**program.defaults, **program.where}.items():
            found[name] = "None" if program.field(name).number is None else str(value)
    return found


def _storage(program: Program, several: bool, always: Sequence[str]) -> list[str]:
    """several: the format has other storages too, between which bits move.  always: fields that other storages may leave out,
    and this one holds.
    """
    lines = [f'"{program.storage}": Storage(', "    tensors={"]
    streams = []
    for tensor in program.tensors:
        kind = "index" if is_plain(program, tensor) and program.field(tensor.placements[0].field).number is None else tensor.kind
        axes = "".join(f', "{axis}"' for axis in tensor_axes(tensor))
        if tensor.stream is not None:
            lines += _coded(tensor.stream)
            named = "".join(f', {role}="{each}"' for role, each in tensor.stream.tensors.items())
            streams.append(f'"{tensor.name}": Stream("{tensor.stream.coding}", Stored("{kind}"{axes}){named})')
            continue
        aliases = "".join(f'"{alias}", ' for alias in tensor.aliases)
        more = (f", aliases=({aliases.rstrip(' ') if len(tensor.aliases) == 1 else aliases[:-2]})" if aliases else "") + \
            (f', optional="{tensor.placements[0].field}"' if tensor.optional else "")
        bits = bits_texts(program, tensor) if several else []
        more += f", bits=({', '.join(map(_quoted, bits))}{',' if len(bits) == 1 else ''})" if bits else ""
        adds = tensor.stored.amount if several and tensor.stored is not None and tensor.stored.field is None else 0
        more += f", adds={adds:#x}" if adds else ""
        lines.append(f'        "{tensor.name}": Stored("{kind}"{axes}{more}),')
    order, shape = order_name(program), _authored(program).shape
    lines += [f'        "{order}": Stored("i32", "K", optional="{order}"),'] if order else []
    lines += [f'        "{shape}": Stored("shape", "2*1"),'] if shape else []
    lines.append("    },")
    at = tile(program)
    sums = 1
    for lane in at.lanes:
        sums *= lane.extent if lane.axis == "n" else 1
    kernel = [f"_dequantize_{program.storage}", f"_linear_{program.storage}", f'rows="{axis_text(at.row_count)}"',
              f'units="{axis_text(at.unit_count)}"', f'last="{at.last}"', *([f"sums={sums}"] if sums > 1 else [])]
    kernel += [f"tables=({', '.join(map(constant, tables(program)))},)"] if tables(program) else []
    made = plan(program)
    if made is not None:
        few = f"_few_{program.storage}" if made.has_few else "None"
        row = f", row=_row_{program.storage}" if made.has_row else ""
        many = f", many=_many_{program.storage}" if made.has_many else ""
        blocks = _tuple(list(dict.fromkeys(made.blocks))) if made.blocks else "()"
        least = f", least={made.least}" if made.stored else ""
        least += ", double=True" if made.integer and made.code.bits == 8 else ""
        least += ", tall=True" if made.has_many and made.tall else ""
        special = f', codes="{made.stored or made.affine.code}", special={made.special}' if made.special else ""
        narrow = f", narrow={_narrow(program, made)}" if made.narrow else ""
        records = f', records="{made.record.tensor}"' if made.record else ""
        kernel.append(f"lanes=Lanes({few}{row}{many}, blocks={blocks}{least}{special}{narrow}{records})")
    tail = [f"unpack=unpack_{program.storage}", f"pack=pack_{program.storage}"]
    if program.where:
        tail.append("where=(" + ", ".join(f'"{name}"' for name in program.where) + ("," if len(program.where) == 1 else "") + ")")
    if always:
        tail.append(f"always={_tuple(always)}")
    omitted = [tensor.placements[0].field for tensor in program.tensors if tensor.omitted]
    if omitted:
        tail.append(f"omits={_tuple(omitted)}")
    fewest = [f"{_quoted(axis_text(program.dims[key.value]))}: {extent}" for key, extent in _authored(program).least]
    if fewest:
        tail.append(f"least={{{', '.join(fewest)}}}")
    given = {key.value: _literal(word.value) for key, word in _authored(program).options}
    if given:
        tail.append(f"options={{{', '.join(f'{_quoted(key)}: {word}' for key, word in given.items())}}}")
    if needs_shape(program):
        tail.append("needs_shape=True")
    if extents := pack_extents(program):
        tail.append(f"extents={_tuple(extents)}")
    everywhere = [atom for field in program.fields for index in field.index if (atom := ix.flat_of(index)) and atom.op == "mod"]
    if everywhere or not all(placement.plain or _by_rows(tensor, placement)
                             for tensor in program.tensors for placement in tensor.placements):
        tail.append("whole=True")
    if order:
        tail.append(f'order="{order}"')
    if streams:
        tail.append(f"streams={{{', '.join(streams)}}}")
    if shape:
        tail.append(f'shape="{shape}"')
    return [*lines, "    " + ", ".join(tail) + ",", *indent(wrapped("kernels=Kernels(", kernel, "),", level=1)), "),"]


def _by_rows(tensor: Tensor, placement: Placement) -> bool:
    """Whether the slowest digit of the first coordinate is also that of the tensor, so that runs of rows lie together."""
    first = next((digit for axis in tensor.axes for digit in axis.digits), "")
    return placement.digits[0][0] == first != "" and all(digits[1:] in ((), ("",)) for digits in placement.digits[1:])


def _coded(stream: Stream) -> list[str]:
    """The tensors of an entropy code."""
    found = []
    for role, (kind, axes) in STREAMS[stream.coding].tensors.items():
        shown = "".join(f', "{axis}"' for axis in axes)
        found.append(f'        "{stream.tensors[role]}": Stored("{kind}"{shown}),')
    return found


def _authored(program: Program) -> model.Storage:
    """The storage in the spec."""
    return next(storage for storage in program.spec.storages if storage.name.value == program.storage)


def _narrow(program: Program, made: Plan) -> str:
    more = (", groups=True" if not made.late else "") + (", sums=True" if made.takes_sums else "")
    return f'Narrow(_narrow_{program.storage}, "{made.narrow}", "{made.stored}"{more})'


def _format(parts: Sequence[Part], by: Sequence[str], programs: Sequence[Program]) -> list[str]:
    spec = programs[0].spec
    lines = ["FORMAT = Format(", f'    name="{spec.name}", title="{spec.title}",',
             *indent(wrapped("", [f'source="{spec.origin}"', f'formula="{spec.decode_text}"'], ",", level=1))]
    if by:
        lines.append(f'    by=({", ".join(_quoted(key) for key in by)},),')
        lines.append("    variants={")
        for part in parts:
            key = ", ".join(repr(part.params[word]) for word in by)
            lines.append(f"        ({key},): {_part_name(by, part)}.VARIANT,".replace("'", '"'))
        lines.append("    },")
    else:
        lines.append("    variants={(): VARIANT},")
    if spec.params:
        shown = [f'"{p.name}": {_tuple(p.values)}' for p in spec.params]
        lines += indent(wrapped("params={", shown, "},", level=1))
    if programs[0].sizes:
        shown = [f'"{size}": "{size_axis(programs[0], size)}"' for size in programs[0].sizes]
        lines += indent(wrapped("sizes={", shown, "},", level=1))
    if spec.detect:
        lines.append(f"    detect={_data(dict(spec.detect))},")
    lines.append(f'    digest="{_digest(spec)}",')
    surface = ["wrap", "quantize", "dequantize", "pack", "unpack", "convert", "requantize", "planar", "linear", "grouped_linear",
               "Linear"]
    return [*lines, ")", "SPEC = FORMAT.spec", *(f"{name} = FORMAT.{name}" for name in surface)]


def _digest(spec: Spec) -> str:
    return hashlib.sha256(spec.source.text.encode()).hexdigest()[:16]


def _tuple(values: Sequence[int | str]) -> str:
    shown = ", ".join(_quoted(value) if isinstance(value, str) else str(value) for value in values)
    return f"({shown},)" if len(values) == 1 else f"({shown})"


def _data(value: Data) -> str:
    """Detection rules as literals."""
    if isinstance(value, list):
        return f"[{', '.join(map(_data, value))}]"
    if not isinstance(value, dict):
        return _quoted(value) if isinstance(value, str) else str(value)
    return "{" + ", ".join(f'"{key}": {_data(item)}' for key, item in value.items()) + "}"


# -- header -----------------------------------------------------------------------------------------------------------


def _header(programs: Sequence[Program], title: str = "") -> list[str]:
    spec = programs[0].spec
    lines = [f'"""{spec.name}{f" at {title}" if title else ""}: {spec.title}.' if spec.title else f'"""{spec.name}.', "",
             f"    w = {spec.decode_text}", "    float32, rounded after each operation", ""]
    kinds = field_kinds(programs)
    width = max(len(kind) for kind in kinds.values())
    for field in programs[0].fields:
        kind = f"index into {axis_text(field.groups)} groups" if field.groups is not None else kinds[field.name]
        lines.append(f"    {field.name:<6} {kind:<{width}} [{', '.join(field_axes(programs, field))}]")
    lines.append("")
    for program in programs:
        differ = [key for key, value in program.params.items() if any(p.params[key] != value for p in programs)]
        only = f" at {', '.join(f'{key} = {program.params[key]}' for key in differ)}" if differ else ""
        sizes = [f"{p.name} = {p.values[0]}" for p in spec.params if p.name.value in program.sizes]
        with_sizes = f" with {', '.join(sizes)}" if sizes else ""
        lines.append(f"    {program.storage}{only}: {bits_text(program)}{with_sizes}")
    return [*lines, "", f"Built from the spec {spec.name} (sha256 {_digest(spec)}) by qdsl {qdsl.__version__}.",
            "Do not edit: change the spec and run `qdsl build`.", '"""', ""]


def _imports(body: Sequence[str]) -> list[str]:
    """Imports of what the body reads."""
    read = {node.id for node in ast.walk(ast.parse("\n".join(body))) if isinstance(node, ast.Name)}
    lines = ["from typing import Any", ""] if "Any" in read else []
    plain = {"torch": "import torch", "triton": "import triton", "tl": "import triton.language as tl"}
    lines += [line for word, line in plain.items() if word in read]
    sources = {"torch": ("Tensor",), "": (), "qdsl.encode": tuple(SCHEMES), "qdsl.runtime": RUNTIME,
               "qdsl.runtime.numbers": tuple(FLOATS)}
    for source, offered in sources.items():
        words = sorted(read & set(offered), key=lambda word: (word.lower() == word, word))
        one = f"from {source} import {', '.join(words)}"
        imported = [one] if len(one) <= WIDTH else wrapped(f"from {source} import (", words, ")")
        lines += imported if words else [] if source else [""]
    return lines


def _doc(text: str) -> list[str]:
    """A docstring, broken between words at the width."""
    words = text.split(" ")
    rows = ['"""']
    for word in words:
        if len(rows[-1]) + len(word) > 112:
            rows.append("")
        rows[-1] += word if rows[-1] in ("", '"""') else f" {word}"
    if len(rows) == 1:
        return [rows[0] + '"""']
    return [*rows, '"""']
