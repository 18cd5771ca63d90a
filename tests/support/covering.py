"""A few formats that stand for all: between them their functions have every line that there is, whatever is named there.

Tests that are dear run over these, and over every format where QDSL_TEST_ALL is set (`make test-all`); a format that is not
among them has no line of its own, and is tested over less.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from types import FunctionType, ModuleType
from typing import Any

from tests.support.formats import Case

ALL = bool(os.environ.get("QDSL_TEST_ALL"))


def kernels(case: Case, *kinds: str) -> list[Any]:
    """Of a case's storage, the kernels of some kinds that it has."""
    held = case.module.FORMAT.variant(case.choice).storages[case.storage].kernels
    return [kernel for kind in kinds for kernel in (getattr(held, kind, None) or getattr(held.lanes, kind, None),) if kernel]


def covering(cases: Sequence[Case], functions: Callable[[Case], Sequence[Any]]) -> list[Case]:
    """Cases, most lines first, whose functions have between them all lines that the functions of all cases have."""
    if ALL:
        return list(cases)
    lines = {case: {line for function in functions(case) for line in lines_of(function)} for case in cases}
    left = set().union(*lines.values())
    found: list[Case] = []
    while left:
        found.append(max(cases, key=lambda case: len(lines[case] & left)))
        left -= lines[found[-1]]
    return found


def lines_of(function: Any) -> Iterator[str]:
    """Lines of a function, and of those of its module that it calls, with names in order of appearance and 0 for numbers."""
    plain: FunctionType = getattr(function, "fn", function)
    scope = plain.__globals__

    def word(match: re.Match[str]) -> str:
        text = match[0]
        if text[0].isdigit():
            return "0"
        return text if iskeyword(text) or isinstance(scope.get(text), ModuleType) else names.setdefault(text, f"v{len(names)}")

    for line in inspect.getsource(plain).split('"""')[-1].splitlines():
        names: dict[str, str] = {}
        yield re.sub(r"(?<![\w.])\w+", word, line.strip())
    for name in plain.__code__.co_names:
        if hasattr(scope.get(name), "fn"):
            yield from lines_of(scope[name])
