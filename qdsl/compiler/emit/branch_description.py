"""Describes the side branches of a format in its module and on its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qdsl.compiler.emit.axes import axis_text
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import BranchTensor, Program
from qdsl.core.branches import ENTRIES, OPTIONAL, RANK
from qdsl.core.codecs import UNKNOWN


def branch_data(program: Program) -> tuple[Any, ...]:
    """The branches of a variant as data: kind, arguments of `BranchTensor` by role, and whether tensors have an order."""
    return tuple((branch.kind, {tensor.role: _arguments(tensor) for tensor in branch.tensors}, branch.ordered)
                 for branch in program.plus)


def _arguments(tensor: BranchTensor) -> tuple[Any, ...]:
    digits = {} if tensor.is_plain else {"digits": tuple(map(_axis, tensor.digits)), "order": tensor.order}
    named = {**digits, **{key: value for key, value in (("aliases", tensor.aliases), ("half", tensor.half)) if value}}
    return tensor.name, tensor.kind, *map(_axis, tensor.axes), *([named] if named else [])


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
            yield f"    {tensor.name} {tensor.stored_kind} [{', '.join(map(_axis, tensor.axes))}]: {tensor.role}"
