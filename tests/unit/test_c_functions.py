"""What is handed to C is what its prototypes state: every pointer of every function, with one fault after the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qdsl.host.c_functions import DTYPES, CFunctions, UnfitArray, address, evaluate, parameters
from tests.support.paths import ROOT

SOURCES = [path for path in sorted((ROOT / "qdsl").rglob("*.c")) if path.parent.name != "cpu"]      # loops pass a row of pointers
FUNCTIONS = [(path, name) for path in SOURCES for name in re.findall(r"^(?:void|int) (\w+)\(", path.read_text(), re.MULTILINE)]
SIZE = 3

Array = NDArray[Any]


class Recorder:
    """A library whose functions only note that they are called."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls += 1
            return 1

        return call


def arguments(source: str, name: str) -> list[Any]:
    """Arguments that fit to the element."""
    declared = parameters(source, name)
    values: dict[str, Any] = {parameter.name: SIZE for parameter in declared if parameter.least is None}
    pointers = [(ast.unparse(parameter.least), parameter) for parameter in declared if parameter.least is not None]
    for _, parameter in sorted(pointers, key=lambda pointer: "max(" in pointer[0]):
        if parameter.least is not None:
            values[parameter.name] = np.ones(evaluate(parameter.least, values), DTYPES[parameter.type])
    return [values[parameter.name] for parameter in declared]


def strided(array: Array) -> Array:
    return np.stack([array, array], 1)[:, 0]


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


FAULTS: dict[str, Callable[[Array], Any]] = {
    "dtype": lambda array: array.astype(np.float32 if array.dtype == np.float64 else np.float64),
    "length": lambda array: array[:-1], "strides": strided, "read-only": read_only}


def test_the_sources_have_functions() -> None:
    assert len(FUNCTIONS) >= 13


@pytest.mark.parametrize(("path", "name"), FUNCTIONS, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_a_pointer_that_does_not_fit_reaches_no_function(path: Path, name: str) -> None:
    source, library = path.read_text(), Recorder()
    function = getattr(CFunctions(cast(Any, library), source), name)
    function(*arguments(source, name))
    assert library.calls == 1
    for place, parameter in enumerate(parameters(source, name)):
        for fault, spoil in FAULTS.items() if parameter.least is not None else ():
            unfit = arguments(source, name)
            if len(unfit[place]) < {"strides": 2}.get(fault, 1) or (fault == "read-only" and not parameter.is_written):
                continue
            unfit[place] = spoil(unfit[place])
            with pytest.raises(UnfitArray):
                function(*unfit)
    assert library.calls == 1


@pytest.mark.parametrize("prototype", ["void f(const float *x, int64_t n) {", "void f(const float *x /* n */, size_t) {"])
def test_a_prototype_states_every_pointer(prototype: str) -> None:
    with pytest.raises(ValueError, match="does not state"):
        parameters(prototype, "f")


def test_an_address_is_that_of_the_first_element() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16, device="cpu")
    assert address(tensor, "bfloat16", 4) == tensor.data_ptr()
    assert address(tensor[1:], "bfloat16", 3) == tensor.data_ptr() + 2
    for unfit in (tensor.to("meta"), tensor.float(), tensor[1:], torch.stack([tensor, tensor], 1)[:, 0]):
        with pytest.raises(UnfitArray):
            address(unfit, "bfloat16", 4)


# Builtin functions that GCC, from 9 on, and clang have.
BUILTINS = {"bswap32", "bswap64", "convertvector", "inf", "inff", "isinf", "prefetch", "rintf"}


def test_c_sources_call_builtin_functions_of_both_compilers() -> None:
    """Others have to be in `#ifdef __clang__`, with what the other compiler takes."""
    count = 0
    for path in (path for suffix in ("c", "h") for path in (ROOT / "qdsl").rglob(f"*.{suffix}")):
        text = re.sub(r"^#ifdef __clang__$.*?^#else$.*?^#endif$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        names = set(re.findall(r"__builtin_(\w+)", text))
        assert names <= BUILTINS, path
        count += len(names)
    assert count >= len(BUILTINS)
