"""A few formats that represent all: together their functions contain every line of any format's functions, up to names.

Slow tests run over these formats, or over all if QDSL_TEST_ALL is set (`make test-all`).  Every other format has no line of its
own, and gets fewer tests.  For tests of shapes alone, only the lines that depend on shapes count (WALK).
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import import_module
from keyword import iskeyword
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from qdsl.runtime.gpu.families import BY_NAME
from qdsl.runtime.gpu.kernels.dequantize import dequantize
from qdsl.runtime.gpu.kernels.matvec import matvec
from tests.support.formats import Case

T = TypeVar("T")
U = TypeVar("U")
ALL = bool(os.environ.get("QDSL_TEST_ALL"))
TURN = int(os.environ.get("QDSL_TEST_TURN", "0"))                # tests/conftest.py sets it to the number of commits
# Lines that say which weights a program takes, which of them there are, and where results go: any but those that read a weight.
WALK = re.compile(r"^(?!.*(tl\.load|device\.(?!store_sums)))"
                  r".*(tl\.(store|arange|program_id|zeros|sum)\b|store_sums|\bfor\b|<|cdiv)")
PLAIN = {"dequantize": dequantize, "matvec": matvec}
EVERY = re.compile("")
BRANCHES = ("ONES", "IN_ORDER", "SIGNED")                        # constants by which a family does something more for a format


def kernels(case: Case, *kinds: str) -> list[Any]:
    """The families of some kinds that serve a case's storage, and the functions that complete them."""
    completes = case.module.FORMAT.variant(case.choice).storages[case.storage].kernels
    plain = [part for kind in kinds if kind in PLAIN for part in (PLAIN[kind], completes.decode)]
    matrix_unit = completes.matrix_unit
    served = {**matrix_unit.families, **({"w8a8": {}} if matrix_unit.eight else {})} if matrix_unit else {}
    return [*plain, *(part for kind in kinds if kind in served for part in (
        _kernel("gemv_records" if kind == "gemv" and matrix_unit.records else kind), *parts_of(case, matrix_unit, kind)))]


def _kernel(name: str) -> Any:
    return getattr(import_module(f"qdsl.runtime.gpu.kernels.{name}"), name)


def parts_of(case: Case, lanes: Any, kind: str) -> list[Any]:
    """The functions that complete a kernel of a family, and names of the branches that it takes."""
    sizes = {size: case.choice[size] for size in case.module.FORMAT.size_axes}
    tensors = case.module.FORMAT.variant(case.choice).storages[case.storage].coded
    constants = lanes.scaled(sizes, tensors) if kind == "w8a8" else BY_NAME[kind].constants(lanes, True, sizes, tensors)
    return [value if hasattr(value, "fn") else name for name, value in constants.items()
            if hasattr(value, "fn") or (name in BRANCHES and value)]


def covering(cases: Sequence[T], functions: Callable[[T], Sequence[Any]], which: re.Pattern[str] = EVERY) -> list[T]:
    """Cases, most lines first, whose functions have between them all lines (or `which`) that the functions of all cases have."""
    if ALL:
        return list(cases)
    lines = {case: {line for function in functions(case) for line in lines_of(function) if which.search(line)} for case in cases}
    left = set().union(*lines.values())
    chosen: list[T] = []
    while left:
        chosen.append(max(cases, key=lambda case: len(lines[case] & left)))
        left -= lines[chosen[-1]]
    return chosen


def quarter_of(cases: Sequence[T], always: Collection[T] = ()) -> list[T]:
    """A quarter of the cases of a slow test, the others after the next commits; all in `make test-all`.  always: in each run."""
    return [case for number, case in enumerate(cases) if ALL or case in always or number % 4 == TURN % 4]


def by_turns(cases: Sequence[T], choices: Sequence[U]) -> list[tuple[T, U]]:
    """Every case with every choice in `make test-all`; else with one, so that each choice meets many cases."""
    return [(case, choice) for number, case in enumerate(cases) for choice in
            (choices if ALL else choices[number % len(choices):][:1])]


@cache
def lines_of(function: Any) -> tuple[str, ...]:
    """Lines of a function, and of those of its module that it calls, with names in order of appearance and 0 for numbers.

    A line stands for itself.
    """
    if isinstance(function, str):
        return (function,)
    plain: FunctionType = getattr(function, "fn", function)
    scope = plain.__globals__

    def word(match: re.Match[str]) -> str:
        text = match[0]
        if text[0].isdigit():
            return "0"
        return text if iskeyword(text) or isinstance(scope.get(text), ModuleType) else names.setdefault(text, f"v{len(names)}")

    lines: list[str] = []
    for line in inspect.getsource(plain).split('"""')[-1].splitlines():
        names: dict[str, str] = {}
        lines.append(re.sub(r"(?<![\w.])\w+", word, line.strip()))
    for name in plain.__code__.co_names:
        if hasattr(scope.get(name), "fn"):
            lines += lines_of(scope[name])
    return tuple(lines)
