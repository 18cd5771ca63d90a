"""Mutants of qdsl's own code, with one mistake each: a test must fail for every one.  (tests/mutants.py mutates specs.)

`python -m tests.code_mutants [PATH ...]` prints every mutant and the test that caught it; exit code 1 where one survived.
Nothing is written: a forked process gives the module's functions the code with the mistake, and runs the tests that execute
its line.
"""

from __future__ import annotations

import ast
import builtins
import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from itertools import islice
from pathlib import Path
from select import select
from types import CodeType, FunctionType
from typing import Any

from tests.support.paths import ROOT

PER_MODULE = 10
PER_KIND = 3
# Core modules, and the test files that matter for each.
TESTS: dict[str, tuple[str, ...]] = {
    "qdsl/core/layout.py": ("test_layout", "test_program"),
    "qdsl/core/numbers.py": ("test_numbers",),
    "qdsl/core/stored.py": ("test_stored_tables", "test_detect", "test_wrap"),
    "qdsl/compiler/ir/index.py": ("test_index", "test_program"),
    "qdsl/compiler/spec/grammar.py": ("test_bad_specs", "test_program"),
    "qdsl/compiler/passes/read_records.py": ("test_records", "test_bad_specs", "test_program"),
    "qdsl/compiler/passes/record_lines.py": ("test_records", "test_bad_specs", "test_program"),
    "qdsl/encode/absmax.py": ("test_goldens", "test_encode"),
    "qdsl/host/c_functions.py": ("test_c_functions",),
    "qdsl/checkpoint/files/safetensors.py": ("test_safetensors", "test_hostile_safetensors", "test_jobs"),
    "qdsl/checkpoint/files/gguf.py": ("test_gguf", "test_hostile_gguf", "test_verify_gguf"),
    "qdsl/jobs/engine/stage.py": ("test_jobs", "test_disks"),
    "qdsl/codecs/huffman_windows/reference.py": ("test_entropy", "test_streams"),
    "qdsl/runtime/weight/convert.py": ("test_runtime", "test_quantize_weight", "test_convert", "test_residues"),
    "qdsl/runtime/weight/fields.py": ("test_runtime", "test_quantize_weight", "test_robust_arguments"),
    "qdsl/runtime/weight/wrap.py": ("test_runtime", "test_quantize_weight", "test_wrap", "test_robust_arguments"),
    "qdsl/runtime/torch/decode.py": ("test_runtime", "test_quantize_weight"),
}
# Mutants that are tried besides those that are drawn: both once survived.
NAMED: dict[str, tuple[str, ...]] = {
    "qdsl/core/layout.py": ("split_at_words: stride * period -> stride + period",),
    "qdsl/runtime/torch/decode.py": ("_decode_in_order: stop - start -> stop + start",),
}
# Mutants that do what the code does, and why: path -> name -> proof.
EQUAL: dict[str, dict[str, str]] = {
    "qdsl/core/layout.py": {"_ranges: 0 -> 1": "an element without coordinates is the only one of its field: no line follows"},
    "qdsl/encode/absmax.py": {"signmax: -low > high -> -low >= high": "where both are equal, the next statements choose"},
    "qdsl/runtime/weight/convert.py": {
        "_StorageChange: done -= {field for name in self.wanted if name not in moved for field in stored[name].fields}"
        " -> pass": "move_by_words notices tensors on meta and makes all of them from fields, which takes longer"},
    "qdsl/compiler/passes/record_lines.py": {"RecordReader.read_item: 0 -> 1": "the width of a gap that fits is never 0"},
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult}
SILENT = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.AnnAssign)   # messages and types are left alone
Edit = Callable[[Any], None]
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}       # a forked process has none of the threads that others wait for


@dataclass(frozen=True)
class CodeMutant:
    """One mistake in a module.  name: the function, what stood there and what stands there now; line: of the statement."""

    name: str
    kind: str
    line: int
    position: int
    edit: Edit

    def tree(self, source: str) -> ast.Module:
        """The module with the mistake."""
        tree = ast.parse(source)
        self.edit(next(islice((node for node, _, _ in _code_nodes(tree)), self.position, None)))
        return ast.fix_missing_locations(tree)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def mutants(source: str) -> list[CodeMutant]:
    """All mutants of a module's text, names unique."""
    names: Counter[str] = Counter()
    result = []
    for position, (node, scope, line) in enumerate(_code_nodes(ast.parse(source))):
        for kind, place, before, after, edit in _edits(node):
            name = f"{scope}: {before} -> {after}"
            names[name] += 1
            unique = name if names[name] == 1 else f"{name} ({names[name]})"
            result.append(CodeMutant(unique, kind, place or line, position, edit))
    return result


def _code_nodes(node: ast.AST, scope: str = "", line: int = 0) -> Iterator[tuple[ast.AST, str, int]]:
    """Nodes that can hold a mistake, in order: with the function that they stand in, and the line of their statement."""
    if isinstance(node, SILENT):
        return
    yield node, scope or "module", line
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope, children = f"{scope}.{node.name}".lstrip("."), list(node.body)
    for child in children:
        yield from _code_nodes(child, scope, child.lineno if isinstance(child, ast.stmt) else line)


def _edits(node: ast.AST) -> Iterator[tuple[str, int, str, str, Edit]]:
    """Mistakes of one node: (kind, line if it is not the statement's, text before, text after, change of an equal node)."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        text = ast.unparse(node.test)
        yield "condition", 0, f"if {text}", f"if not ({text})", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        for index, child in enumerate(statements if isinstance(statements, list) else ()):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break) and not is_text:
                yield ("statement", child.lineno, ast.unparse(child), "pass",
                       lambda n, block=block, index=index: getattr(n, block).__setitem__(index, ast.Pass()))
    for kind, edit in _expression_edits(node):
        changed = deepcopy(node)
        edit(changed)
        yield kind, 0, ast.unparse(node), ast.unparse(changed), edit


def _expression_edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            other = COMPARISONS[type(operator)]
            yield "comparison", lambda n: setattr(n, "ops", [other()])
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC and not _is_text(node):
            sign = ARITHMETIC[type(operator)]
            yield "arithmetic", lambda n: setattr(n, "op", sign())
        case ast.BoolOp(op=operator):
            word = ast.Or if isinstance(operator, ast.And) else ast.And
            yield "logic", lambda n: setattr(n, "op", word())
        case ast.Constant(value=bool(value)):
            yield "constant", lambda n: setattr(n, "value", not value)
        case ast.Constant(value=int(value)):
            yield "constant", lambda n: setattr(n, "value", value + 1)


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str))
               for child in ast.walk(node))


def drawn(candidates: Sequence[CodeMutant], executed: Collection[int], named: Collection[str] = ()) -> list[CodeMutant]:
    """The same mutants of executed lines at every run, at most PER_KIND of a kind and one of a line, and those that are named.

    Their order is that of a hash of their names, so that other edits of the module leave the choice as it is.
    """
    kinds: Counter[str] = Counter()
    lines: set[int] = set()
    result = []
    for mutant in sorted(candidates, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest()):
        if mutant.line in executed and mutant.line not in lines and kinds[mutant.kind] < PER_KIND and len(result) < PER_MODULE:
            result.append(mutant)
            kinds[mutant.kind] += 1
            lines.add(mutant.line)
    return result + [mutant for mutant in candidates if mutant.name in named and mutant not in result]


# -- runs of tests ----------------------------------------------------------------------------------------------------


class Trace(ast.NodeTransformer):
    """Every statement of a function first notes its line in `builtins.executed_lines`."""

    def __init__(self) -> None:
        self.is_inside = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        outer, self.is_inside = self.is_inside, self.is_inside or isinstance(node, ast.FunctionDef)
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody") if self.is_inside else ():
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                setattr(node, block, [note for child in statements for note in (_note(child.lineno), child)])
        self.is_inside = outer
        return node


def _note(line: int) -> ast.stmt:
    return ast.parse(f"executed_lines.add({line})").body[0]


def replace_functions(path: Path, tree: ast.Module) -> None:
    """Give all functions of a module, those that others hold too, the code of a tree; forget what is cached."""
    code = {(own.co_qualname, own.co_firstlineno): own for own in _nested(compile(tree, path, "exec"))}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == str(path):
            new = code.get((thing.__code__.co_qualname, thing.__code__.co_firstlineno))
            if new is not None and new.co_freevars == thing.__code__.co_freevars:
                thing.__code__ = new
        elif type(thing) is _lru_cache_wrapper:
            thing.cache_clear()


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@dataclass
class Record:
    """A plug-in of pytest: the seconds and the executed lines of tests, and the first that failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    failed: str = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logstart(self) -> None:
        executed().clear()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.lines[nodeid] = set(executed())


def executed() -> set[int]:
    lines: set[int] = builtins.__dict__.setdefault("executed_lines", set())
    return lines


def tested(path: Path, tree: ast.Module, items: Sequence[Any], limit: float) -> Record | None:
    """Tests with a module as a tree, in a forked process, until the first fails; None for a crash or more seconds."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            record = Record()
            items[0].config.pluginmanager.register(record)
            executed()
            replace_functions(path, tree)
            for item, after in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if record.failed:
                    break
            with open(send, "wb") as pipe:
                pickle.dump((record.seconds, record.lines, record.failed), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(send)
    data, end = b"", time.monotonic() + limit
    while (left := end - time.monotonic()) > 0 and select([receive], [], [], left)[0] and (part := os.read(receive, 1 << 16)):
        data += part
    os.close(receive)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with suppress(EOFError, pickle.UnpicklingError):
        return Record(*pickle.loads(data))                       # noqa: S301 -- what the child has written
    return None


class Trial:
    """A plug-in of pytest that runs the tests which it collected: once as they are, then for every mutant of one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: Counter[str] = Counter()

    def pytest_collection(self) -> None:
        from hypothesis import settings

        settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: Any) -> bool:
        path = ROOT / self.name
        source = path.read_text()
        items = {item.nodeid: item for item in session.items}
        base = tested(path, ast.fix_missing_locations(Trace().visit(ast.parse(source))), list(items.values()), 1800)
        if base is None or base.failed:
            raise SystemExit(f"{self.name}: tests must pass first: {base and base.failed}")
        by_cost = sorted(base.seconds, key=lambda test: base.seconds[test])
        for mutant in drawn(mutants(source), set().union(*base.lines.values()), NAMED.get(self.name, ())):
            names = [test for test in by_cost if mutant.line in base.lines[test]]
            start = time.monotonic()
            limit = 60 + 3 * sum(base.seconds[name] for name in names)
            record = tested(path, mutant.tree(source), [items[name] for name in names], limit) if names else Record()
            catch = record.failed if record else "a crash, or more than three times the time"
            reason = EQUAL.get(self.name, {}).get(mutant.name)
            result = "killed" if catch else "equal" if reason else "SURVIVED"
            self.results[result] += 1
            print(f"{self.name}:{mutant.line} {mutant.kind}: {mutant.name}\n    {result}, {len(names)} tests, "
                  f"{time.monotonic() - start:.0f} s: {catch or reason or ''}", flush=True)
        return True


def run_module(name: str) -> int:
    """Try the mutants of one module in this process; 1 where one survived."""
    import pytest

    trial = Trial(name)
    options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-s", "-o", "addopts="]
    paths = [str(path) for test in TESTS[name] for path in (ROOT / "tests").glob(f"*/{test}.py")]
    code = pytest.main([*options, *paths], plugins=[trial])
    print(f"{name}: {trial.results.total()} mutants, "
          f"{', '.join(f'{count} {result}' for result, count in sorted(trial.results.items()))}", flush=True)
    return int(bool(code) or bool(trial.results["SURVIVED"]) or not trial.results)


def main(names: Sequence[str]) -> int:
    if len(names) == 1 and THREADS.items() <= os.environ.items():
        return run_module(names[0])
    environment = {**os.environ, **THREADS}
    return max(subprocess.run([sys.executable, "-m", "tests.code_mutants", name], cwd=ROOT, env=environment).returncode
               for name in names or TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
