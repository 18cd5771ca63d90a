"""Finds layers whose weight another module's forward reads or changes itself, such as Mamba's `self.dt_proj.weight @ x`.

Such code needs the weight's numbers, which a packed layer does not hold.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

# What a packed layer's `weight` answers without numbers, and functions that only ask about it.
ANSWERED = frozenset({"dtype", "device", "shape", "size", "dim", "ndim", "numel", "is_meta", "requires_grad", "element_size"})
QUESTIONS = frozenset({"isinstance", "hasattr", "getattr", "id"})
ANY = "[^.]+"                                                    # a pattern for an element of a list of modules
OWN = ("torch.", "qdsl.")                                        # modules of these packages read their own weights alone

Read = tuple[str, tuple[str, ...], tuple[ast.expr, ...]]         # variable, attributes up to the layer, conditions around it


def weight_reads(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Layers whose weight a module around them needs as a plain tensor, and the reason to keep it one.

    modules: all modules of a model by name.  Only code that `forward` reaches counts, and in it no branch that the attributes
    of the module rule out at inference.
    """
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        kind: Any = type(module)
        for variable, chain, conditions in _reads(kind):
            if any(_is_false(condition, module) for condition in conditions):
                continue
            path = r"\.".join(ANY if own == ANY else re.escape(own) for own in chain)
            start = re.escape(f"{name}.") if name else ""
            place = re.compile(start + path if variable == "self" else rf"{start}(.*\.)?{path}")
            reason = f"{kind.__name__} uses its weight as a plain tensor"
            reasons |= {layer: reason for layer in modules if place.fullmatch(layer)}
    return reasons


@cache
def _reads(kind: Any) -> tuple[Read, ...]:
    """The weights of other modules that a class reads in its forward, or in methods that forward calls."""
    if f"{kind.__module__}.".startswith(OWN):
        return ()
    reads: list[Read] = []
    seen, waiting = {"weight"}, ["forward"]
    while waiting:
        method = waiting.pop()
        function = inspect.unwrap(getattr(kind, method, None) or object)
        if method in seen or not isinstance(function, FunctionType):
            continue
        seen.add(method)
        waiting += [name for name in function.__code__.co_names if isinstance(getattr(kind, name, None), FunctionType)
                    and not hasattr(nn.Module, name)]
        if "weight" in function.__code__.co_names:
            reads += _reads_in(_unaliased(_syntax(function)))
    return tuple(reads)


def _syntax(function: FunctionType) -> ast.AST:
    """The syntax tree of a function; an empty one where its source is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _unaliased(tree: ast.AST) -> ast.AST:
    """Code with attributes of `self` in place of the variables that are names for them, as in `layer = self.proj`."""
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else [
            (node.target, ast.Subscript(node.iter, ast.Constant(0)))] if isinstance(node, ast.For) else []
        names |= {target.id: value for target, value in pairs if isinstance(target, ast.Name) and _chain(value)[1]
                  and _chain(value)[0] == "self" and "weight" not in _chain(value)[1]}

    class Names(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return names.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    result: ast.AST = Names().visit(tree)
    return result


def _reads_in(node: ast.AST, conditions: tuple[ast.expr, ...] = ()) -> Iterator[Read]:
    """The weights that code reads, but for questions such as `layer.weight.dtype`."""
    if isinstance(node, ast.If | ast.IfExp):
        body, others = (node.body, node.orelse) if isinstance(node, ast.If) else ([node.body], [node.orelse])
        yield from _reads_in(node.test, conditions)
        for own in body:
            yield from _reads_in(own, (*conditions, node.test))
        for own in others:
            yield from _reads_in(own, conditions)
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and (
            node.attr in ANSWERED and node.value.attr == "weight"):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in QUESTIONS:
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        variable, chain = _chain(node.value)
        if chain:
            yield variable, chain, conditions
        return
    for part in ast.iter_child_nodes(node):
        yield from _reads_in(part, conditions)


def _chain(node: ast.expr) -> tuple[str, tuple[str, ...]]:
    """A variable and the attributes of `variable.first.second`, ANY for elements; '' for another expression in its place."""
    chain: tuple[str, ...] = ()
    while isinstance(node, ast.Attribute | ast.Subscript):
        chain, node = (ANY if isinstance(node, ast.Subscript) else node.attr, *chain), node.value
    return (node.id if isinstance(node, ast.Name) else ""), chain


def _is_false(condition: ast.expr, module: Any) -> bool:
    """Whether the attributes of a module at inference make a condition false: `self.training and ...` is."""
    if isinstance(condition, ast.BoolOp):
        values = [_is_false(value, module) for value in condition.values]
        return any(values) if isinstance(condition.op, ast.And) else all(values)
    variable, chain = _chain(condition)
    return variable == "self" and len(chain) == 1 and (chain[0] == "training" or getattr(module, chain[0], None) is False)
