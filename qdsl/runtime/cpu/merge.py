"""Vectors that hold lanes of several values which are computed alike, such as the scales of low and of high nibbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qdsl.runtime.cpu.trace import INTEGERS, Index, Node, Pointer, Unsupported

SMALL = {"uint8", "int8", "uint16", "int16", "int32"}            # computed as int32, with bounds


def merged(nodes: Sequence[Node]) -> Node:
    """A vector whose parts of equal length are lanes of nodes of one trace.  Raises Unsupported where these differ in more than
    places, numbers and lanes.
    """
    first = nodes[0]
    if all(node is first for node in nodes):
        return first
    if any(node.op == ">>" for node in nodes):
        nodes = [node if node.op == ">>" else _shifted_by_0(node) for node in nodes]
        first = nodes[0]
    bounds = min(node.bounds[0] for node in nodes), max(node.bounds[1] for node in nodes)
    if {node.op for node in nodes} <= {"lanes", "number"}:
        if any(node.dtype not in INTEGERS for node in nodes):
            raise Unsupported("floats that differ by lane")
        lanes = _parts([node.args for node in nodes], first.trace.width)
        return first.trace.node("lanes", lanes, "int32", bounds, has_lanes=True)
    dtypes = {node.dtype for node in nodes}
    if len({(node.op, len(node.args)) for node in nodes}) > 1 or "int64" in dtypes \
            or (len(dtypes) > 1 and (first.op == "load" or dtypes - SMALL)):
        raise Unsupported("values that are not computed alike")
    args = [_argument(own) for own in zip(*(node.args for node in nodes), strict=True)]
    return first.trace.node(first.op, tuple(args), first.dtype if len(dtypes) == 1 else "int32", bounds, has_lanes=True)


def _shifted_by_0(node: Node) -> Node:
    """The same value by a shift, as other values have one."""
    zero = node.trace.node("number", (0,), "int32", (0, 0))
    return node.trace.node(">>", (node, zero), node.dtype, node.bounds)


def _argument(own: Sequence[Any]) -> Any:
    """One argument of nodes, merged."""
    if all(isinstance(one, Node) for one in own):
        return merged(own)
    if all(isinstance(one, Pointer) for one in own):
        return _pointer(own)
    if any(isinstance(one, Node | Pointer) or one != own[0] for one in own):
        raise Unsupported("values that are not computed alike")
    return own[0]


def _pointer(own: Sequence[Pointer]) -> Pointer:
    """One place per lane."""
    first = own[0]
    if len({(one.name, one.dtype, one.at.terms) for one in own}) > 1 or any(one.node is not None for one in own):
        raise Unsupported("places that differ in more than lanes")
    return replace(first, at=Index(first.at.trace, first.at.terms, _parts([one.at.lanes for one in own], first.at.trace.width)))


def _parts(lanes: Sequence[Sequence[int]], width: int) -> tuple[int, ...]:
    """The lanes of the first sequence, then of the second, each from its own first lane on."""
    length = width // len(lanes)
    return tuple(own[i % len(own)] for own in lanes for i in range(length))
