"""Describes the side branches of a format in its module and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qdsl.compiler.emit.axes import axis_text
from qdsl.compiler.emit.lines import wrapped
from qdsl.compiler.emit.literals import quoted, tupled
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import BranchTensor, Program
from qdsl.core.branches import ENTRIES, OPTIONAL, RANK
from qdsl.core.codecs import UNKNOWN


def branch_lines(program: Program) -> list[str]:
    """The argument `plus` of a variant's description; nothing without branches."""
    lines: list[str] = []
    for branch in program.plus:
        parts = [f"{tensor.role}=BranchTensor({_arguments(tensor)})" for tensor in branch.tensors]
        parts += ["ordered=True"] if branch.ordered else []
        lines += wrapped(f"Branch({quoted(branch.kind)}, ", parts, "),", level=2)
    return ["plus=(", *(f"    {line}" for line in lines), "),"] if lines else []


def _arguments(tensor: BranchTensor) -> str:
    arguments = [quoted(tensor.name), quoted(tensor.kind), *(quoted(_axis(extent)) for extent in tensor.axes)]
    if not tensor.is_plain:
        orders = ", ".join(tupled(places) for places in tensor.order)
        arguments += [f"digits={tupled([_axis(extent) for extent in tensor.digits])}", f"order=({orders})"]
    arguments += [f"aliases={tupled(tensor.aliases)}"] if tensor.aliases else []
    arguments += [f"half={quoted(tensor.half)}"] if tensor.half else []
    return ", ".join(arguments)


def _axis(extent: Index) -> str:
    """An extent; '?' if only a tensor's shape determines it, as for lists."""
    is_open = not extent.is_const and bool(extent.const or extent.names() & {RANK, ENTRIES})
    return UNKNOWN if is_open else axis_text(extent)


def branch_shapes(program: Program) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of branches for readers of checkpoints; each may be missing."""
    for branch in program.plus:
        for tensor in branch.tensors:
            yield tensor.name, {"dtype": tensor.kind, "axes": [_axis(extent) for extent in tensor.axes],
                                **({"aliases": list(tensor.aliases)} if tensor.aliases else {}), "optional": OPTIONAL}


def branch_texts(program: Program) -> Iterator[str]:
    """The branches for people: the fields in each tensor."""
    for branch in program.plus:
        yield f"  plus {branch.kind}"
        for tensor in branch.tensors:
            yield f"    {tensor.name} {tensor.half or tensor.kind} [{', '.join(map(_axis, tensor.axes))}]: {tensor.role}"
