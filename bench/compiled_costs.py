"""Costs of kernels as their compiler's instructions give them, kept in a file, because compiling one takes seconds.

A kernel's key is all that decides its instructions: the source of its functions and of those that they call, without comments,
the types and constants of the launch, the architecture, and Triton's version.  The file's name tells the source of what counts.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from qdsl.analyze import AnalyzeError, chains, counts, pipes, registers, report, sass, strides
from qdsl.analyze import compile as compiling
from qdsl.analyze.compile import specialised
from qdsl.analyze.predict import cost
from qdsl.host.files import cache_folder
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.costs import Candidate, Cost
from qdsl.runtime.gpu.triton import triton

X = torch.bfloat16
COUNTING = (compiling, sass, registers, strides, pipes, chains, counts, inspect.getmodule(cost))   # modules that decide a count
UNROLLED = 16                                                    # trips of a program up to which they bound how far it unrolls


class NotCounted(LookupError):
    """A kernel that the file lacks."""


class Counted(NamedTuple):
    """A compiled kernel's cost, and its instructions that move registers to or from local memory.  refused: why it has none."""

    cost: Cost | None
    spills: int = 0
    refused: str = ""


class CompiledCosts:
    """Costs of candidates' kernels, from a file or the compiler.

    compiles: whether kernels that the file lacks are compiled, and added to it.  fresh: how many that were.
    used: keys of kernels that were asked for.
    """

    def __init__(self, file: Path | None = None, compiles: bool = True) -> None:
        self.file = file or cache_folder() / f"dispatch-{_counting_source()[:8]}.jsonl"
        self.compiles, self.fresh = compiles, 0
        self.used: dict[str, None] = {}
        self._kernels = dict(_rows(self.file))

    def counted(self, packed: PackedWeight, candidate: Candidate, m: int, arch: str) -> Counted | None:
        """The kernel of a candidate for m rows of x; None where the launch does not say what its loops do, as DF11's.

        Where programs share K, it is the kernel of one whose programs do not: what is added up after the loop has a term of
        its own in the model.
        """
        call = _call(packed, candidate, m)
        if call is None:
            return None
        key = kernel_key(call, arch)
        if key not in self._kernels:
            if not self.compiles:
                raise NotCounted(key)
            self._kernels[key] = _counted(call, arch)
            self.fresh += 1
            self._append(key, self._kernels[key])
        self.used[key] = None
        kernel = self._kernels[key]
        if candidate.kind == "decode" and kernel.cost is not None and kernel.cost.trip:
            return kernel._replace(cost=replace(kernel.cost, rows=call.weights / packed.shape[1]))
        return kernel

    def _append(self, key: str, counted: Counted) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:     # a line at once, so that processes may share the file
            file.write(line(key, counted) + "\n")

    def lines(self) -> list[str]:
        """The kernels that were asked for, as the file holds them."""
        return [line(key, self._kernels[key]) for key in sorted(self.used)]


def line(key: str, counted: Counted) -> str:
    """A kernel as a file holds it, cycles rounded to hundredths."""
    values = None if counted.cost is None else [round(value, 2) for value in astuple(counted.cost)]
    return json.dumps([key, values, counted.spills, counted.refused], separators=(",", ":"))


def _rows(file: Path) -> Iterator[tuple[str, Counted]]:
    """What a file holds; a line that was cut off is left out."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            key, values, spills, refused = json.loads(line)
        except ValueError:
            continue
        yield key, Counted(None if values is None else Cost(*values), spills, refused)


def _call(packed: PackedWeight, candidate: Candidate, m: int) -> Call | None:
    """The launch of a candidate with one program for all of K; None where it is none, or does not say its weights."""
    n, k = packed.shape
    if candidate.kind == "decode":
        calls = list(launch.dequantize_calls(packed, torch.empty(n, k, dtype=X, device="meta")))
    else:
        whole = {name: 1 if name == "SPLIT" else value for name, value in candidate.config.items()}
        x, out = (torch.empty(m, size, dtype=X, device="meta") for size in (k, n))
        calls = list(launch.linear_calls(x, packed, None, out, candidate=replace(candidate, config=whole)))
    return calls[0] if len(calls) == 1 and calls[0].weights else None


def _counted(call: Call, arch: str) -> Counted:
    try:
        counted = report(call, arch)
    except AnalyzeError as error:
        return Counted(None, refused=str(error))
    return Counted(cost(counted), counted.spills)


# -- keys -------------------------------------------------------------------------------------------------------------


def kernel_key(call: Call, arch: str) -> str:
    """A digest of all that decides a kernel's counts.  Raises AnalyzeError where Triton interprets."""
    if not isinstance(call.kernel, triton.JITFunction):
        raise AnalyzeError("kernels that Triton interprets cannot be compiled: unset TRITON_INTERPRET")
    types, constants, hints = specialised(call)
    weights = call.weights if call.weights < UNROLLED * call.step else 0
    determining = (triton.__version__, arch, source_digest(call.kernel), types, _plain(constants), hints,
             sorted(call.options.items()), call.step, weights)
    return hashlib.sha256(repr(determining).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A constant as its repr tells it from others: of a function its source."""
    if isinstance(value, dict):
        return [(key, _plain(part)) for key, part in sorted(value.items())]
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return source_digest(value) if isinstance(value, triton.JITFunction) else repr(value)


@cache
def source_digest(function: Any) -> str:
    """A digest of a kernel's function and of all that it calls or reads, without comments and docstrings."""
    parts: list[str] = []
    _collect(function, parts, set())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _collect(function: Any, parts: list[str], seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    tree = ast.parse(textwrap.dedent(function.src)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    parts.append(ast.dump(tree))
    for node in ast.walk(tree):
        value = _resolved(node, function.fn.__globals__)
        if isinstance(value, triton.JITFunction):
            _collect(value, parts, seen)
        elif value is not None and not isinstance(value, ModuleType) and not callable(value):
            parts.append(repr(value))


def _resolved(node: ast.AST, scope: dict[str, Any]) -> Any:
    """The global that a name or an attribute of a module stands for; None where it is none."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(base := _resolved(node.value, scope), ModuleType):
        return getattr(base, node.attr, None)
    return None


@cache
def _counting_source() -> str:
    """A digest of the modules that read and count instructions."""
    return hashlib.sha256("".join(inspect.getsource(module) for module in COUNTING if module).encode()).hexdigest()
