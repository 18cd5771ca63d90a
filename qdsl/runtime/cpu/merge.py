"""Merges values that are computed alike, such as scales of low and high nibbles, into one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qdsl.runtime.cpu.trace import INTEGERS, Index, Node, Pointer, Unsupported

SMALL = {"uint8", "int8", "uint16", "int16", "int32"}            # computed as int32, with bounds


def merged(nodes: Sequence[Node], lanes: Sequence[int]) -> Node:
    """A vector whose lane i is lane `lanes[i]` of nodes[i].  Raises Unsupported if nodes differ in more than constants."""
    first, different = nodes[0], set(nodes)
    if len(different) == 1 and not first.has_lanes:
        return first
    for op in ("&", ">>"):
        if (alike := next((node for node in different if node.op == op), None)) is not None:
            nodes = [node if node.op == op else _unchanged(node, alike) for node in nodes]
            first, different = nodes[0], set(nodes)
    bounds = min(node.bounds[0] for node in different), max(node.bounds[1] for node in different)
    if {node.op for node in different} <= {"lanes", "number"}:
        if any(node.dtype not in INTEGERS for node in different):
            raise Unsupported("floats that differ by lane")
        numbers = _chosen([node.args for node in nodes], lanes)
        op, dtype = ("number", first.dtype) if len(numbers) == 1 else ("lanes", "int32")
        return first.trace.node(op, numbers, dtype, (min(numbers), max(numbers)), has_lanes=op == "lanes")
    dtypes = {node.dtype for node in different}
    if len({(node.op, len(node.args)) for node in different}) > 1 \
            or (len(dtypes) > 1 and (first.op == "load" or dtypes - SMALL)) or not all(node.has_32_bits for node in different):
        raise Unsupported("values that are not computed alike")
    args = [_argument(own, lanes) for own in zip(*(node.args for node in nodes), strict=True)]
    differs = any(isinstance(arg, Pointer) and arg.has_lanes for arg in args)
    return first.trace.node(first.op, tuple(args), first.dtype if len(dtypes) == 1 else "int32", bounds, differs)


def parts(nodes: Sequence[Node]) -> Node:
    """A vector of equal parts, each from the first lanes of one node.  Raises Unsupported."""
    length = nodes[0].trace.width // len(nodes)
    return merged([node for node in nodes for _ in range(length)], [*range(length)] * len(nodes))


def coarse(node: Node) -> Node:
    """Every fourth lane of a vector.  Raises Unsupported if the lanes between differ from it."""
    if are_alike(node, 4):
        return _every(node, 4, 0)
    raise Unsupported("neighbours that differ")


def are_alike(node: Node, count: int) -> bool:
    """Whether all runs of `count` adjacent lanes have equal values."""
    return len({_every(node, count, first) for first in range(count)}) == 1


def _every(node: Node, count: int, first: int) -> Node:
    lanes = range(first, node.trace.width, count)
    return merged([node] * len(lanes), lanes)


def _unchanged(node: Node, other: Node) -> Node:
    """The same value computed by another node's operation: shifted by 0, or masked with all its bits."""
    number = 0 if other.op == ">>" else other.args[1].args[0] if other.args[1].op == "number" else -1
    if other.op == "&" and not (node.bounds[0] >= 0 and node.bounds[1] <= number and not number & number + 1):
        return node
    return node.trace.node(other.op, (node, node.trace.value(number)), node.dtype, node.bounds)


def _argument(own: Sequence[Any], lanes: Sequence[int]) -> Any:
    """One argument of nodes, merged."""
    if all(isinstance(one, Node) for one in own):
        return merged(own, lanes)
    if all(isinstance(one, Pointer) for one in own):
        return _pointer(own, lanes)
    if any(isinstance(one, Node | Pointer) or one != own[0] for one in own):
        raise Unsupported("values that are not computed alike")
    return own[0]


def _pointer(own: Sequence[Pointer], lanes: Sequence[int]) -> Pointer:
    first = own[0]
    if len({(one.name, one.dtype, one.at.terms, one.node is None) for one in own}) > 1:
        raise Unsupported("places that differ in more than lanes")
    node = None if first.node is None else _argument([one.node for one in own], lanes)
    return replace(first, at=Index(first.at.trace, first.at.terms, _chosen([one.at.lanes for one in own], lanes)), node=node)


def _chosen(own: Sequence[Sequence[int]], lanes: Sequence[int]) -> tuple[int, ...]:
    """For each lane a number from its sequence, repeated if it is short; one number if all are equal."""
    numbers = tuple(one[lane % len(one)] for one, lane in zip(own, lanes, strict=True))
    return numbers[:1] if len(set(numbers)) == 1 else numbers
