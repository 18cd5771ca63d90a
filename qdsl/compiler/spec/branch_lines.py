"""Reads the side branches of a spec: `plus`, kinds and their tensors, as the author wrote them."""

from __future__ import annotations

from collections.abc import Callable

from qdsl.compiler.spec.marked import Node
from qdsl.compiler.spec.model import Branch, Tensor
from qdsl.compiler.spec.source import Problems, Text, did_you_mean
from qdsl.core.branches import BRANCHES

KEYS = ("tensor", "record", "aliases", "seen", "ordered")        # keys of a branch's tensor

Items = Callable[[Node | None, str], list[tuple[Text, Node]]]


def read_branches(node: Node | None, named: Items, tensor: Callable[[Text, Node], Tensor],
                  problems: Problems) -> tuple[Branch, ...]:
    """The branches of `plus`, in order; adds a problem for each unknown kind.

    named: returns the items of a mapping whose keys are names.  tensor: reads one tensor.
    """
    read: list[Branch] = []
    for kind, body in named(node, "plus"):
        if kind.value not in BRANCHES:
            problems.add(kind.span, f"unknown branch '{kind}'{did_you_mean(kind.value, BRANCHES)}",
                         f"there are {', '.join(BRANCHES)}")
            continue
        read.append(Branch(kind, tuple(tensor(name, part) for name, part in named(body, "tensor"))))
    return tuple(read)
