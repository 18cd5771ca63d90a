"""The functions of the torch reference: head and docstring around the bodies that other files print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from qdsl.compiler.emit.axes import field_axes, stored_axes
from qdsl.compiler.emit.formula import constant
from qdsl.compiler.emit.lines import indent, names_read, wrap_items
from qdsl.compiler.emit.literals import literal, quoted
from qdsl.compiler.emit.tensors import tensor_dtype
from qdsl.compiler.emit.torch.decode import DecodeBody
from qdsl.compiler.emit.torch.pack import pack_body
from qdsl.compiler.emit.torch.unpack import unpack_body
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Encode, Field, Program
from qdsl.core.schemes import SCHEMES


def reference_functions(program: Program) -> tuple[list[str], list[str]]:
    """Lines of `unpack_STORAGE`, from stored tensors to fields, and of its inverse `pack_STORAGE`.

    Both have keyword arguments for the extents that they need: N, K or sizes that shapes do not determine.
    """
    unpacked, packed = unpack_body(program), pack_body(program)
    return (_unpack_function(program, unpacked, _extents(program, unpacked)),
            _pack_function(program, packed, _extents(program, packed)))


def _extents(program: Program, body: list[str]) -> list[str]:
    read = names_read(body)
    return [word for word in ("N", "K", *program.sizes) if word in read]


def _unpack_function(program: Program, body: list[str], extents: list[str]) -> list[str]:
    optional = {tensor.name for tensor in program.tensors if tensor.optional}
    arguments = [f"{name}: Tensor{' | None' if name in optional else ''}" for name in program.stored]
    arguments += ["*", *(f"{word}: int" for word in extents)] if extents else []
    stored = "; ".join(f"{name} {t.kind if t.kind in program.params else tensor_dtype(t)} [{', '.join(stored_axes(tensors))}]"
                       for name, tensors in program.stored.items() for t in tensors[:1])
    return [*wrap_items(f"def unpack_{program.storage}(", arguments, f") -> {_dict_type(body, optional)}:"),
            *indent([*_docstring_lines(f"Fields of {stored}."), *body])]


def _pack_function(program: Program, body: list[str], extents: list[str]) -> list[str]:
    stored = [f.name for f in program.fields if f.name not in program.where]
    if program.row_codes is not None:
        stored.remove(program.row_codes.code)
        stored += [factor.field for factor in program.row_codes.factors]
    optional = set(program.defaults)
    arguments = [f"{field}: Tensor{' | None' if field in optional else ''}" for field in stored]
    arguments += ["*", *(f"{word}: int" for word in extents)] if extents else []
    names = ", ".join(program.stored)
    return [*wrap_items(f"def pack_{program.storage}(", arguments, f") -> {_dict_type(body, optional)}:"),
            *indent([*_docstring_lines(f"{names} of the fields; the inverse of unpack_{program.storage}."), *body])]


def _dict_type(body: Sequence[str], optional: Iterable[str]) -> str:
    """The type of the dict that a body returns, with None for optional entries."""
    entry = re.compile(rf'": ({"|".join(optional)})\b(?![.(\[])') if optional else None
    return f"dict[str, Tensor{' | None' if entry and entry.search(' '.join(body)) else ''}]"


def decode_function(programs: Sequence[Program], decoded: DecodeBody) -> list[str]:
    """Lines of `decode`, from fields to weights."""
    fields = sorted(decoded.fields, key=lambda f: f.name in decoded.optional)
    arguments = [f"{f.name}: Tensor{' | None = None' if f.name in decoded.optional else ''}" for f in fields]
    arguments.append("out: Tensor | None = None")
    shapes = ", ".join(f"{f.name} [{', '.join(field_axes(programs, f))}]" for f in fields)
    doc = f"Weights [N, K], float32 rounded after each operation: w = {programs[0].spec.decode_text}.  {shapes}."
    return [*wrap_items("def decode(", arguments, ") -> Tensor:"), *indent([*_docstring_lines(doc), *decoded.lines])]


def encode_function(program: Program) -> list[str]:
    """Lines of `encode`, from weights to fields by the spec's scheme."""
    encode = program.encode
    assert encode is not None
    scheme = SCHEMES[encode.scheme]
    run, apart = _flat_block_size(program, encode)
    sizes = [f"{size}: int" for size in program.sizes]
    types = [f"{key}: str" for key, value in program.params.items() if isinstance(value, str)]
    named = [*sizes, *types, *(["importance: Tensor | None = None"] if encode.importance else [])]
    head = ["weight: Tensor", *(["*", *named] if named else []), *(["**options: Any"] if encode.open else [])]
    doc = f"Fields for a float weight [N, K]: {scheme.summary}."
    doc += "  importance: float32 [K]." if encode.importance else ""
    doc += f"  options: {', '.join(encode.open)}." if encode.open else ""
    weight = "weight" if run is None else f"weight.reshape({run}, -1).t()" if apart else "weight.reshape(1, -1)"
    call = [weight, *_types(program, encode), *_column_arguments(program, encode, run), *_option_arguments(encode)]
    order = [encode.roles[role] for role in scheme.roles if role in encode.roles]
    texts = {name: name for name in order}
    if run is not None:                                          # back from one row, or from a row per group
        texts = {name: f"{name}{'.t()' if apart else ''}.reshape(weight.shape)" if len(program.field(name).index) == 2 else
                f"{name}.flatten()" if program.field(name).index else name for name in order}
    return [*wrap_items("def encode(", head, ") -> dict[str, Tensor]:"),
            *indent([*_docstring_lines(doc), *wrap_items(f"{', '.join(order)} = {encode.scheme}(", call, ")", level=1),
                     f"return {{{', '.join(f'{quoted(name)}: {texts[name]}' for name in order)}}}"])]


def _flat_block_size(program: Program, encode: Encode) -> tuple[Index | None, bool]:
    """How many weights share a value in blocks of the flat weight, or None; and whether those weights are apart.

    They are apart if they are a column of the matrix [group, -1].
    """
    flat = [atom for role in encode.roles.values() for i in program.field(role).index if (atom := ix.flat_of(i)) is not None]
    run = min((atom.args[1] for atom in flat), key=lambda size: size.const or size.terms[0][1], default=None)
    apart = bool(flat) and flat[0].op == "mod"
    return (run.terms[0][0].args[1] if apart and run is not None else run), apart


def _types(program: Program, encode: Encode) -> list[str]:
    kinds = {role: program.field(field).kind for role, field in encode.roles.items()}
    return [f"{role}={kind if kind in program.params else quoted(kind)}" for role, kind in kinds.items()]


def _column_arguments(program: Program, encode: Encode, run: Index | None) -> list[str]:
    """The numbers of rows and columns that share values of the fields."""
    roles = {role: program.field(name) for role, name in encode.roles.items()}
    if "levels" in roles and len(roles["levels"].table) > 1:     # of vectors
        return [f"{word}={_block_extent(program, roles['code'], axis)}" for word, axis in (("rows", "n"), ("columns", "k"))]
    scale, across = roles.get("scale") or roles.get("levels"), SCHEMES[encode.scheme].across
    if scale is None:
        return []
    rows, axes = ("1", 2) if run is not None else (_block_extent(program, scale, "n"), len(scale.index))
    around = across or run is not None
    arguments = [f"rows={rows}"] if around else []
    arguments += [f"columns={run or _block_extent(program, scale, 'k')}"]
    arguments += [f"axes={axes}"] if around else []
    more = {"super": "super_scale", "shift": "shift"} if run is not None or not across else {}
    more |= {"sums": "sums"}
    if SCHEMES[encode.scheme].of_rows:
        arguments.append(f"super_axes={len(roles['super_scale'].index)}")
    return [*arguments, *(f"{word}_columns={_block_extent(program, roles[role], 'k')}"
                          for word, role in more.items() if role in roles)]


def _option_arguments(encode: Encode) -> list[str]:
    """Options and constants of the scheme; options of the caller are passed on."""
    arguments = [f"{key}={literal(value)}" for key, value in encode.options.items() if key not in encode.open]
    arguments += [f"{key}={constant(value) if isinstance(value, str) else value}"
                  for key, value in encode.constants.items() if value]
    arguments += ["importance=importance"] if encode.importance else []
    defaults = ", ".join(f"{quoted(key)}: {literal(value)}" for key, value in encode.options.items() if key in encode.open)
    chosen = f"**{{{defaults}, **options}}" if defaults else "**options"
    return [*arguments, chosen] if encode.open else arguments


def _block_extent(program: Program, field: Field, axis: str) -> str:
    """How many rows or columns share a value of the field, as text."""
    index = next((i for i in field.index if axis in i.names()), None)
    if index is None and axis == "k" and len(field.index) == 2:     # a gather: the block of groups in order
        default = program.defaults.get(str(field.index[1])) or program.where.get(str(field.index[1]))
        index = default
    if index is None:
        return f"weight.shape[{'nk'.index(axis)}]"
    return "1" if index.terms[0][0].op == "name" else str(index.terms[0][0].args[1])


def _docstring_lines(text: str) -> list[str]:
    words = text.split(" ")
    rows = ['"""']
    for word in words:
        if len(rows[-1]) + len(word) > 122:
            rows.append("")
        rows[-1] += word if rows[-1] in ("", '"""') else f" {word}"
    return [rows[0] + '"""'] if len(rows) == 1 else [*rows, '"""']
