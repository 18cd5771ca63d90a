"""Every call that makes a tensor states dtype and device, in qdsl and in generated modules: torch's defaults are the caller's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from torch.utils._device import _device_constructors

from tests.support.paths import ROOT

FACTORIES = frozenset(factory.__name__ for factory in _device_constructors())        # all that a default device changes
INTEGERS = frozenset({"arange", "randint", "randperm"})          # int64 of integers, whatever the default dtype is
MODULES = [path for folder in ("qdsl", "generated") for path in sorted((ROOT / folder).rglob("*.py"))]


def is_factory(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FACTORIES and ast.unparse(node.value) == "torch"


def makes_floats(call: ast.Call) -> bool:
    """Whether the default dtype may decide: of all factories but those of integers, and of those with a float literal."""
    inside = [node for argument in call.args for node in ast.walk(argument)]
    floats = any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in inside)
    return floats or ast.unparse(call.func).rpartition(".")[2] not in INTEGERS


def unstated(source: str) -> Iterator[str]:
    """Calls of factories that leave dtype or device to torch's defaults, and other uses that hide such a call."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and is_factory(node.func)]
    for call in calls:
        named = {keyword.arg for keyword in call.keywords}
        if missing := {"device", *(["dtype"] if makes_floats(call) else [])} - named:
            yield f"line {call.lineno}: {ast.unparse(call)} does not state {' and '.join(sorted(missing))}"
    called = {id(call.func) for call in calls}
    yield from (f"line {node.lineno}: {ast.unparse(node)} is no call" for node in nodes
                if isinstance(node, ast.Attribute) and is_factory(node) and id(node) not in called)
    yield from (f"line {node.lineno}: {alias.name} of torch" for node in nodes
                if isinstance(node, ast.ImportFrom) and node.module == "torch" for alias in node.names if alias.name in FACTORIES)


def test_calls_that_make_tensors_state_dtype_and_device() -> None:
    assert {str(path.relative_to(ROOT)): wrong for path in MODULES if (wrong := list(unstated(path.read_text())))} == {}


@pytest.mark.parametrize(("line", "count"), [
    ("torch.empty(3)", 1), ("torch.empty(3, dtype=torch.uint8)", 1), ("torch.zeros(3, device='cpu')", 1),
    ("torch.arange(3)", 1), ("torch.arange(3, device='cpu')", 0), ("torch.arange(0, 1.5, device='cpu')", 1),
    ("torch.tensor(x, dtype=torch.uint8, device='cpu')", 0), ("make = torch.empty", 1), ("from torch import full", 1),
    ("x.new_empty(3)", 0), ("torch.from_numpy(x)", 0),
])
def test_a_default_is_noticed(line: str, count: int) -> None:
    assert len(list(unstated(line))) == count
