"""Prints a format's description as JSON, `qdsl.core.stored.Description`, for readers of checkpoints that do not import torch.

It describes the storages and parameters that files may have: neither the storage that the compiler derives, nor storages that are
made when a weight is loaded.  Its `summary`, for `qdsl list`, has all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from struct import pack, unpack
from typing import Any

from qdsl.compiler.emit.axes import field_axes, stored_axes
from qdsl.compiler.emit.branches import branch_shapes
from qdsl.compiler.emit.show.page import summary
from qdsl.compiler.emit.tensors import is_plain
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Program, Stream, Tensor
from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.compiler.passes.samples import size_axis
from qdsl.compiler.spec.model import Spec
from qdsl.core.codecs import CODECS
from qdsl.core.layout import walk

Params = Mapping[str, int | str]
Storages = dict[str, dict[str, Any]]


def description(programs: Sequence[Program]) -> str:
    """The JSON text, with one tensor, parameter or rule per line."""
    first = programs[0]
    by, variants = _variants(programs)
    return indented({
        "format": first.spec.name.value,
        "summary": summary(programs),
        "params": {param.name.value: list(param.written) for param in first.spec.params},
        "sizes": {size: size_axis(first, size) for size in first.sizes},
        "by": by,
        **({"fixed": dict(first.spec.fixed)} if first.spec.fixed else {}),
        "variants": [_variant(programs, by, params, storages) for params, storages in variants],
        "detect": first.spec.detect,
        **_tables(first.spec),
    }) + "\n"


def _variant(programs: Sequence[Program], by: Sequence[str], params: Params, storages: Storages) -> dict[str, Any]:
    """The tensors of the storages for one choice of the parameters named in `by`, and the axes of the fields."""
    same = [program for program in programs if program.params == params]
    return {"key": [params[name] for name in by], **_fields(same), "storages": storages}


def _tables(spec: Spec) -> dict[str, Any]:
    """The tables that `detect` compares with small tensors of a checkpoint, in float32."""
    rules: Any = spec.detect.get("tensors", {})
    named = [table for table in spec.tables if table.name.value in [rule for rule in rules.values() if isinstance(rule, str)]]
    tables = {table.name.value: [unpack("<f", pack("<f", value))[0] for value in table.values] for table in named}
    return {"tables": tables} if tables else {}


def _variants(programs: Sequence[Program]) -> tuple[list[str], list[tuple[Params, Storages]]]:
    """The parameters that change which tensors exist, and the programs for each of their values."""
    variants: list[tuple[Params, Storages]] = []
    for program in programs:
        if program.storage == PLANAR or program.authored.transient:
            continue
        storages = next((storages for params, storages in variants if params == program.params), None)
        if storages is None:
            storages = {}
            variants.append((program.params, storages))
        storages[program.storage] = {"tensors": _tensors(program)}
    by = [key for key in programs[0].params if any(
        a != b and all(one[name] == other[name] for name in one if name != key) for one, a in variants for other, b in variants)]
    kept: dict[tuple[int | str, ...], tuple[Params, Storages]] = {}
    for params, storages in variants:
        kept.setdefault(tuple(params[name] for name in by), (params, storages))
    return by, list(kept.values())


def _fields(programs: Sequence[Program]) -> dict[str, Any]:
    """The axes of fields, except those with blocks all over the matrix; and whether there is a storage `planar`."""
    first = programs[0]
    atoms = [ix.flat_of(index) for field in first.fields for index in field.index]
    axes = {} if any(atom and atom.op == "mod" for atom in atoms) else {
        "fields": {field.name: field_axes(programs, field) for field in first.fields}}
    return axes | ({"planar": True} if any(program.storage == PLANAR for program in programs) else {})


def _tensors(program: Program) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for name, sections in program.stored.items():
        stream = sections[0].stream
        tensors |= _coded(stream) if stream else {name: _tensor(program, sections)}
    if order := program.authored.order:
        kind, _, within = program.authored.order_type.partition(" in ")
        tensors[order.value] = {"dtype": kind, "axes": ["K"], "optional": order.value, **({"within": within} if within else {})}
    tensors |= dict(branch_shapes(program))
    shape = program.authored.shape
    return tensors if shape is None else {**tensors, shape.value: {"dtype": "shape", "axes": ["2"]}}


def _tensor(program: Program, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Describes a tensor.  tensors: the tensor, or its sections."""
    tensor = tensors[0]
    field = tensor.placements[0].field
    is_index = is_plain(program, tensor) and program.field(field).number is None
    return {"dtype": "index" if is_index else tensor.kind, "axes": stored_axes(tensors),
            **({"aliases": list(tensor.aliases)} if tensor.aliases else {}), **({"optional": field} if tensor.optional else {}),
            **({"padding": padding} if (padding := _padding(tensor)) else {}),
            **({"seen": [extent.value for extent in tensor.seen]} if tensor.seen else {}),
            **({"within": tensor.within} if tensor.within else {})}


def _padding(tensor: Tensor) -> int:
    """The padding bits of every element, if an element is a record."""
    pieces = list(walk(tensor.lines))
    if tensor.words > 1 or tensor.stored or tensor.section or any(piece.place is not None for piece in pieces):
        return 0
    used = sum((1 << piece.width) - 1 << piece.at for piece in pieces if piece.field or piece.again)
    return (1 << tensor.record_bits) - 1 - used


def _coded(stream: Stream) -> dict[str, dict[str, Any]]:
    """The tensors of an entropy code."""
    return {stream.tensors[role]: {"dtype": kind, "axes": list(axes)}
            for role, (kind, axes) in CODECS[stream.coding].tensors.items()}


def indented(value: object, level: int = 0) -> str:
    """JSON text, with mappings and lists broken into lines if they do not fit one."""
    line = json.dumps(value)
    numbers = isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    if len(line) + 2 * level <= 100 or numbers or not isinstance(value, Mapping | list):
        return line
    inner = "  " * (level + 1)
    if isinstance(value, Mapping):
        items = [f"{inner}{json.dumps(key)}: {indented(item, level + 1)}" for key, item in value.items()]
    else:
        items = [inner + indented(item, level + 1) for item in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    return f"{opening}\n" + ",\n".join(items) + f"\n{'  ' * level}{closing}"
