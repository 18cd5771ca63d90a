"""Identifiers are the field's terms: words that say nothing of what a thing is are banned from code (prose may use them).

CONTRIBUTING.md and docs/glossary.md say which terms there are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BANNED = {"beside", "damage", "each", "facts", "found", "given", "held", "known", "look", "lost", "made", "meant", "misfit",
          "opened", "rest", "said", "spilled", "stated", "there", "these", "told", "turned"}
# Options of encode schemes, which specs name.
ALLOWED = {("encode", "lost")}
FILES = sorted(path for folder in ("qdsl", "bench", "tests") for path in (ROOT / folder).rglob("*.py"))


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a node defines: variables, attributes, arguments, functions, classes, imports and captures."""
    match node:
        case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()) | ast.arg(name):
            yield name
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.alias(_, str(name)) | ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
            yield name


@cache
def banned(path: Path) -> list[str]:
    """FILE:LINE: NAME of every banned identifier."""
    part = path.relative_to(ROOT).parts[1]
    return [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}" for node in ast.walk(ast.parse(path.read_text()))
            for name in identifiers(node) if name.strip("_").lower() in BANNED and (part, name) not in ALLOWED]


def test_names_say_what_they_are() -> None:
    assert [line for path in FILES for line in banned(path)] == []


@pytest.mark.parametrize("code", ["found = 1", "x.told = 1", "def f(given): pass", "def f(*, rest=0): pass", "class Held: pass",
                                  "def _turned(): pass", "[1 for each in x]", "import a as known", "(there := 1)",
                                  "try:\n pass\nexcept E as said:\n pass", "match x:\n case [*rest]:\n  pass"])
def test_every_kind_of_definition_is_read(code: str) -> None:
    names = [name for node in ast.walk(ast.parse(code)) for name in identifiers(node)]
    assert any(name.strip("_").lower() in BANNED for name in names)
