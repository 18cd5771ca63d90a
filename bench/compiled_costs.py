"""Costs of compiled kernels by their instructions, cached in a file because compiling one takes seconds.

A kernel's key covers everything that determines its instructions: the source of its functions and of their callees, without
comments, the types and constants of the launch, the architecture, and Triton's version.  The file's name is a digest of the
modules that count.
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
from qdsl.analyze.compile import specialize_arguments
from qdsl.analyze.predict import report_cost
from qdsl.host.files import cache_folder
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.costs import Candidate, Cost
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import triton

X = torch.bfloat16
COUNTING = (compiling, sass, registers, strides, pipes, chains, counts, inspect.getmodule(report_cost))    # they decide a count
UNROLLED = 16                                                    # iterations up to which their number limits unrolling


class NotCounted(LookupError):
    """The file lacks this kernel, and it may not be compiled."""


class Counted(NamedTuple):
    """A compiled kernel's cost, and its register spill instructions.  refused: why it has no cost."""

    cost: Cost | None
    spills: int = 0
    refused: str = ""


class CompiledCosts:
    """Costs of candidates' kernels, from the file or the compiler.

    compiles: whether to compile kernels that the file lacks, and add them to it.  fresh: the number of compiled ones.  used: keys
    of requested kernels.
    """

    def __init__(self, file: Path | None = None, compiles: bool = True) -> None:
        self.file = file or cache_folder() / f"dispatch-{_counting_source()[:8]}.jsonl"
        self.compiles, self.fresh = compiles, 0
        self.used: dict[str, None] = {}
        self._kernels = dict(_rows(self.file))
        self._seen: dict[tuple[Any, ...], tuple[PackedWeight, Counted | None]] = {}      # keeps weights alive: ids stay unique

    def counted(self, packed: PackedWeight, candidate: Candidate, m: int, arch: str) -> Counted | None:
        """The kernel of a candidate for m rows of x; None if the launch does not state its iterations, as for DF11.

        If programs share K, the kernel without split K is counted: the model has a separate term for adding partial sums.
        """
        config = tuple(sorted((name, value) for name, value in candidate.config.items() if name != "SPLIT"))
        key = id(packed), candidate.kind, config, arch           # of m only the grid depends
        if key not in self._seen:
            self._seen[key] = packed, self._compiled(packed, candidate, m, arch)
        return self._seen[key][1]

    def _compiled(self, packed: PackedWeight, candidate: Candidate, m: int, arch: str) -> Counted | None:
        call = _call(packed, candidate, m)
        if call is None:
            return None
        kernel = self.of_call(call, arch)
        if candidate.kind == "decode" and kernel.cost is not None and kernel.cost.trip:
            return kernel._replace(cost=replace(kernel.cost, rows=call.weights / packed.shape[1]))
        return kernel

    def of_call(self, call: Call, arch: str) -> Counted:
        """The kernel of a launch."""
        key = kernel_key(call, arch)
        if key not in self._kernels:
            if not self.compiles:
                raise NotCounted(key)
            self._kernels[key] = _counted(call, arch)
            self.fresh += 1
            self._append(key, self._kernels[key])
        self.used[key] = None
        return self._kernels[key]

    def _append(self, key: str, counted: Counted) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:     # a line at a time, so that processes may share the file
            file.write(line(key, counted) + "\n")

    def lines(self) -> list[str]:
        """The requested kernels, in the format of the file."""
        return [line(key, self._kernels[key]) for key in sorted(self.used)]


def line(key: str, counted: Counted) -> str:
    """A kernel as a line of the file, with cycles rounded to hundredths."""
    values = None if counted.cost is None else [round(value, 2) for value in astuple(counted.cost)]
    return json.dumps([key, values, counted.spills, counted.refused], separators=(",", ":"))


def _rows(file: Path) -> Iterator[tuple[str, Counted]]:
    """The kernels in a file; incomplete lines are skipped."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            key, values, spills, refused = json.loads(line)
        except ValueError:
            continue
        yield key, Counted(None if values is None else Cost(*values), spills, refused)


def _call(packed: PackedWeight, candidate: Candidate, m: int) -> Call | None:
    """The launch of a candidate without split K; None if it is not one launch, or does not state its weights."""
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
    return Counted(report_cost(counted), counted.spills)


# -- keys -------------------------------------------------------------------------------------------------------------


def kernel_key(call: Call, arch: str) -> str:
    """A digest of everything that determines a kernel's counts.  Raises AnalyzeError if Triton interprets."""
    if not isinstance(call.kernel, triton.JITFunction):
        raise AnalyzeError("kernels that Triton interprets cannot be compiled: unset TRITON_INTERPRET")
    types, constants, hints = specialize_arguments(call)
    weights = call.weights if call.weights < UNROLLED * call.step else 0
    determining = (triton.__version__, arch, source_digest(call.kernel), types, _plain(constants), hints,
             sorted(call.options.items()), call.step, weights)
    return hashlib.sha256(repr(determining).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A constant in a form whose repr identifies it; for a function a digest of its source."""
    if isinstance(value, dict):
        return [(key, _plain(part)) for key, part in sorted(value.items())]
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return source_digest(value) if isinstance(value, triton.JITFunction) else repr(value)


@cache
def source_digest(function: Any) -> str:
    """A digest of a kernel's function and of everything that it calls or reads, without comments and docstrings."""
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
    """The global that a name, or an attribute of a module, refers to; None if it is not one."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(base := _resolved(node.value, scope), ModuleType):
        return getattr(base, node.attr, None)
    return None


@cache
def _counting_source() -> str:
    """A digest of the modules that read and count instructions."""
    return hashlib.sha256("".join(inspect.getsource(module) for module in COUNTING if module).encode()).hexdigest()
