"""Prints extents as the short texts of shapes in generated modules: 'N', '18*K/32', 'ceil(K/group)'."""

from __future__ import annotations

from collections.abc import Sequence

from qdsl.compiler.emit.tensors import Unsupported
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index, name
from qdsl.compiler.ir.program import Field, Program, Tensor
from qdsl.compiler.passes.samples import axis_divisor


def axis_text(extent: Index, words: int = 1) -> str:
    """The text of one axis: words times a dim over a step."""
    head = f"{words}*" if words > 1 else ""
    if extent.is_const:
        return str(words * extent.const)
    atom, coefficient = extent.terms[0]
    if len(extent.terms) == 1 and not extent.const:
        if coefficient != 1:
            return axis_text(Index(0, ((atom, 1),)), words * coefficient)
        if atom.op == "name":                                    # N, K or a size
            return head + atom.name
        if atom.op == "mul" and set(atom.args) == {name("N"), name("K")}:
            return head + "N*K"
        if atom.op in ("exact", "ceil"):
            top, by = atom.args
            inner, times = top.terms[0] if len(top.terms) == 1 and not top.const else (None, 1)
            if inner is not None and inner.op == "exact":        # an exact quotient, rounded up again
                top, by = inner.args[0] * times, inner.args[1] * by
            elif inner is not None and inner.op == "ceil" and atom.op == "exact":
                return f"{axis_text(top, words)}/{str(by).replace(' ', '')}"
            whole = axis_text(top)
            if "/" in whole:
                raise Unsupported(f"the extent {extent} is a dim over two steps")
            body = f"{whole}/{str(by).replace(' ', '')}"
            return head + (f"ceil({body})" if atom.op == "ceil" else body)
    raise Unsupported(f"the extent {extent} is not a dim over a step")


def tensor_axes(tensor: Tensor) -> list[str]:
    texts: list[str] = []
    for axis in tensor.axes:
        variables = [digit for digit in axis.digits if digit]
        words = tensor.words if "" in axis.digits else 1
        extent = tensor.var(variables[0]).extent if variables else Index(1)
        texts.append(axis_text(extent, words) if axis.extent is None else axis_text(axis.extent))
    return texts


def stored_axes(tensors: Sequence[Tensor]) -> list[str]:
    """The axes of a tensor in files; several sections are added up."""
    section = tensors[0].section
    if section is None:
        return tensor_axes(tensors[0])
    rows = 1 if section.by_rows else 0
    if section.is_plane:
        own = tensor_axes(tensors[0])
        return [*own[:rows], str(len(tensors)), *own[rows:]]
    inner = [" x ".join(tensor_axes(tensor)[rows:]) or "1" for tensor in tensors]
    return [*tensor_axes(tensors[0])[:rows], " + ".join(inner)]


def field_axes(programs: Sequence[Program], field: Field) -> list[str]:
    """The axes of a field, exact if blocks are whole in every storage."""
    texts: list[str] = []
    for extent in field.extents:
        atom = extent.terms[0][0] if extent.terms else None
        if atom is not None and atom.op == "ceil" and atom.args[1].is_const and atom.args[0] in (name("N"), name("K")):
            dim = str(atom.args[0])
            if all(axis_divisor(dim, [v.extent for t in p.tensors for v in t.vars]) % atom.args[1].const == 0 for p in programs):
                extent = ix.exact(atom.args[0], atom.args[1])
        texts.append(axis_text(extent))
    return texts


def field_kinds(programs: Sequence[Program]) -> dict[str, str]:
    """The spec's type of each field whose type differs between programs: `u{bits}`."""
    kinds: dict[str, str] = {}
    for declared, field in zip(programs[0].spec.fields, programs[0].fields, strict=True):
        parameter = declared.typed.type.parameter
        same = len({other.kind for program in programs for other in program.fields if other.name == field.name}) == 1
        written = f"{declared.typed.type.name}{{{parameter.name}}}" if parameter else field.kind
        kinds[field.name] = field.kind if same else written
    return kinds
