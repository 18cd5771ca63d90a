"""C functions that take arrays: a prototype states what every pointer needs, and each call is validated against it.

`const float *values /* elements * blocks */` takes a contiguous array of float32 with at least that many elements.  The
expression has integers, names of integer parameters, + - * /, and max(name): the largest number of an array.
"""

from __future__ import annotations

import ast
import ctypes
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SCALARS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
DTYPES = {"float": "float32", "double": "float64",
          **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}}
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
PARAMETER = re.compile(r"(?P<const>const )?(?P<type>\w+) (?P<pointer>\*?)(?P<name>\w+)(?: /\* (?P<least>.+) \*/)?")


class UnfitArray(ValueError):
    """An array that a C function would read or write beyond its end, or as numbers of another type."""


def address(array: Any, dtype: str, count: int, is_written: bool = False) -> int:
    """The address of a numpy array or a CPU tensor that is contiguous and has at least `count` elements of a dtype.

    Raises UnfitArray for another one, and for a read-only array that C would write.
    """
    if hasattr(array, "data_ptr"):
        fits = array.device.type == "cpu" and array.is_contiguous()
        size, place = array.numel(), array.data_ptr()
    else:
        fits = array.flags.c_contiguous and not (is_written and not array.flags.writeable)
        size, place = array.size, array.ctypes.data
    if not fits or size < count or str(array.dtype).removeprefix("torch.") != dtype:
        raise UnfitArray(f"a C function takes {count} contiguous {'writable ' * is_written}{dtype} on the CPU, "
                         f"not {array.dtype} {list(array.shape)}")
    return int(place)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a C function.  least: the number of elements that a pointer needs; None for a number."""

    name: str
    type: str
    is_written: bool
    least: ast.expr | None

    def argument(self, value: Any, values: Mapping[str, Any]) -> Any:
        """What ctypes takes for a value.  values: all arguments, by name.  Raises UnfitArray."""
        if self.least is None:
            return SCALARS[self.type](value)
        return ctypes.c_void_p(address(value, DTYPES[self.type], evaluate(self.least, values), self.is_written))


class CFunctions:
    """The functions of a library as methods, with the parameters that their prototypes in the source state."""

    def __init__(self, library: ctypes.CDLL, source: str) -> None:
        self._library, self._source = library, source

    def __getattr__(self, name: str) -> Callable[..., int]:
        declared, function = parameters(self._source, name), getattr(self._library, name)

        def call(*arguments: Any) -> int:
            values = {parameter.name: value for parameter, value in zip(declared, arguments, strict=True)}
            return int(function(*(parameter.argument(values[parameter.name], values) for parameter in declared)))

        setattr(self, name, call)
        return call


def parameters(source: str, name: str) -> tuple[Parameter, ...]:
    """The parameters of a function, from its prototype.  Raises ValueError for a pointer without a number of elements."""
    prototype = re.search(rf"^(?:void|int) {name}\((.*?)\)\s*\{{", source, re.MULTILINE | re.DOTALL)
    if prototype is None:
        raise AttributeError(f"the C source has no function {name}")
    declared = []
    for text in prototype[1].split(","):
        match = PARAMETER.fullmatch(" ".join(text.split()))
        if match is None or bool(match["pointer"]) != bool(match["least"]):
            raise ValueError(f"{name}: '{text.strip()}' does not state a type and, for a pointer, its number of elements")
        least = ast.parse(match["least"], mode="eval").body if match["least"] else None
        declared.append(Parameter(match["name"], match["type"], bool(match["pointer"]) and not match["const"], least))
    return tuple(declared)


def evaluate(node: ast.expr, values: Mapping[str, Any]) -> int:
    """The number that an expression of a prototype has for these arguments."""
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.Name(name):
            return int(values[name])
        case ast.Call(ast.Name("max"), [ast.Name(name)], []):
            return int(values[name].max(initial=0))
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](evaluate(left, values), evaluate(right, values))
    raise ValueError(f"a prototype has no expression like '{ast.unparse(node)}'")
