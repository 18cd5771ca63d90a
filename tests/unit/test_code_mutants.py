"""The tool that tries mutants of code: what it makes of a module, and that what it is told is true of the modules."""

from __future__ import annotations

import ast

import pytest

from tests.code_mutants import EQUAL, NAMED, PER_MODULE, ROOT, TESTS, Trace, drawn, executed, mutants

SOURCE = '''def first(x: int = 3) -> int:
    """Text 1 + 1."""
    if x < 2 and x:
        raise ValueError(f"{x + 1}")
    print(x)
    return x * 4
'''


def test_mistakes_of_a_function() -> None:
    """Not in messages, types, defaults and docstrings."""
    trees = {mutant.name: ast.unparse(mutant.tree(SOURCE)) for mutant in mutants(SOURCE)}
    assert set(trees) == {
        "first: if x < 2 and x -> if not (x < 2 and x)", "module: print(x) -> pass",
        "first: raise ValueError(f'{x + 1}') -> pass", "first: x < 2 and x -> x < 2 or x", "first: x < 2 -> x <= 2",
        "first: 2 -> 3", "first: x * 4 -> x + 4", "first: 4 -> 5"}
    assert "return x + 4" in trees["first: x * 4 -> x + 4"] and "return x * 5" in trees["first: 4 -> 5"]
    assert len({ast.unparse(ast.parse(SOURCE)), *trees.values()}) == len(trees) + 1


def test_mutants_are_drawn_among_executed_lines() -> None:
    candidates = mutants(SOURCE)
    assert {mutant.line for mutant in drawn(candidates, {5, 6})} == {5, 6}
    assert drawn(candidates, {5, 6}) == drawn(candidates[::-1], {5, 6})
    assert [mutant.name for mutant in drawn(candidates, (), ["first: 4 -> 5"])] == ["first: 4 -> 5"]


def test_executed_lines_are_noted() -> None:
    space: dict[str, object] = {"executed_lines": executed(), "print": lambda x: None}
    executed().clear()
    exec(compile(ast.fix_missing_locations(Trace().visit(ast.parse(SOURCE))), "x", "exec"), space)  # noqa: S102
    assert callable(first := space["first"]) and first(3) == 12
    assert executed() == {2, 3, 5, 6}


@pytest.mark.parametrize("name", TESTS)
def test_what_is_said_of_mutants_is_said_of_mutants_that_exist(name: str) -> None:
    names = {mutant.name for mutant in mutants((ROOT / name).read_text())}
    assert {*EQUAL.get(name, {}), *NAMED.get(name, ())} <= names and len(names) > PER_MODULE
    assert all(len(list((ROOT / "tests").glob(f"*/{test}.py"))) == 1 for test in TESTS[name])


def test_the_tables_are_of_the_modules_that_are_tried() -> None:
    assert len(TESTS) == 17 and {*EQUAL, *NAMED} <= TESTS.keys()
