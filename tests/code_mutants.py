"""Mutants of qdsl's own code, with one mistake each: a test must fail for every one.  (tests/mutants.py mutates specs.)

`python -m tests.code_mutants [PATH ...]` prints every mutant and the test that caught it; exit code 1 where one survived.
Nothing is written: a mutant is compiled in a forked process in place of its module, with the tests that execute its line.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import islice
from pathlib import Path
from select import select
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
PER_MODULE = 10
PER_KIND = 3
# Core modules, and the test files that matter for each.
TESTS: dict[str, tuple[str, ...]] = {
    "qdsl/layout.py": ("test_layout", "test_program"),
    "qdsl/numbers.py": ("test_numbers",),
    "qdsl/stored.py": ("test_stored_tables", "test_detect", "test_wrap"),
    "qdsl/ir/index.py": ("test_index", "test_program"),
    "qdsl/spec/grammar.py": ("test_bad_specs", "test_generated", "test_program"),
    "qdsl/passes/read_records.py": ("test_records", "test_bad_specs", "test_program"),
    "qdsl/encode/absmax.py": ("test_goldens", "test_encode"),
    "qdsl/checkpoint/safetensors.py": ("test_safetensors", "test_jobs"),
    "qdsl/checkpoint/gguf.py": ("test_gguf", "test_verify_gguf"),
    "qdsl/rewrite/stage.py": ("test_jobs", "test_disks"),
    "qdsl/entropy/huffman_windows.py": ("test_entropy", "test_streams"),
    "qdsl/runtime/convert.py": ("test_runtime", "test_convert"),
    "qdsl/runtime/format.py": ("test_runtime", "test_wrap", "test_robust_arguments"),
}
# Mutants that are tried besides those that are drawn: both once survived.
NAMED: dict[str, tuple[str, ...]] = {
    "qdsl/layout.py": ("split: stride * period -> stride + period",),
    "qdsl/runtime/format.py": ("Format._dequantized_in_order: stop - start -> stop + start",),
}
# Mutants that do what the code does, and why: path -> name -> proof.
EQUAL: dict[str, dict[str, str]] = {}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult}
KINDS = ("comparison", "arithmetic", "constant", "condition", "logic", "statement")
TOOLS = ("torch", "triton", "numpy", "safetensors", "yaml", "jinja2", "pytest")   # imported once, before processes are forked
SILENT = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.AnnAssign)  # messages and types are not mutated
Edit = Callable[[Any], None]


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
            result.append(CodeMutant(name if names[name] == 1 else f"{name} ({names[name]})", kind, place or line, position, edit))
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
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        for index, child in enumerate(statements if isinstance(statements, list) else ()):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break) and not is_text:
                yield ("statement", child.lineno, ast.unparse(child), "pass",
                       lambda n, field=field, index=index: getattr(n, field).__setitem__(index, ast.Pass()))
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
    return any(isinstance(child, ast.JoinedStr) or isinstance(child, ast.Constant) and isinstance(child.value, str)
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
        for field in ("body", "orelse", "finalbody") if self.is_inside else ():
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [note for child in statements for note in (_note(child.lineno), child)])
        self.is_inside = outer
        return node


def _note(line: int) -> ast.stmt:
    return ast.parse(f"executed_lines.add({line})").body[0]


class Replaced(SourceFileLoader, MetaPathFinder):
    """Imports one module from a tree in place of its text."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        super().__init__(".".join(path.relative_to(ROOT).with_suffix("").parts), str(path))
        self.tree = tree

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.tree, self.path, "exec")
        return code


class Record:
    """A plug-in of pytest: the seconds, the lines and the failure of every test; `wanted` alone, in that order."""

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        self.wanted = wanted
        self.seconds: dict[str, float] = defaultdict(float)
        self.lines: dict[str, set[int]] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        order = {name: index for index, name in enumerate(self.wanted)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]) if order else items

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} cannot be imported"

    def pytest_runtest_logstart(self) -> None:
        executed().clear()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.lines[nodeid] = set(executed())


def executed() -> set[int]:
    lines: set[int] = builtins.__dict__.setdefault("executed_lines", set())
    return lines


def run(path: Path, tree: ast.Module, files: Sequence[str], wanted: Sequence[str] = (), limit: float = 1200) -> Record | None:
    """Tests with a module as a tree, in a process of their own until the first fails; None for one that crashes or takes longer."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 1
        try:
            with open(os.environ.get("QDSL_MUTANTS_LOG", os.devnull), "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            with open(send, "wb") as pipe:
                pickle.dump(_tested(Replaced(path, tree), files, wanted), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    data, end = b"", time.monotonic() + limit
    while (left := end - time.monotonic()) > 0 and select([receive], [], [], left)[0] and (part := os.read(receive, 1 << 16)):
        data += part
    os.close(receive)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        record: Record = pickle.loads(data)                      # noqa: S301 -- what the child has written
    except (EOFError, pickle.UnpicklingError):
        return None
    return record


def _tested(loader: Replaced, files: Sequence[str], wanted: Sequence[str]) -> Record:
    import pytest

    executed()
    sys.meta_path.insert(0, loader)
    record = Record(wanted)
    options = ["-x", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
    code = pytest.main([*options, *(f"tests/{name}.py" for name in files)], plugins=[record])
    if code and not record.failed:
        record.failed = f"pytest ends with {code!r}"
    record.wanted = ()
    return record


# -- the table --------------------------------------------------------------------------------------------------------


def outcomes(name: str) -> Iterator[tuple[CodeMutant, str]]:
    """The mutants of a module, and what caught them: '' where nothing did."""
    path = ROOT / name
    source = path.read_text()
    base = run(path, ast.fix_missing_locations(Trace().visit(ast.parse(source))), TESTS[name])
    if base is None or base.failed:
        raise SystemExit(f"{name}: tests must pass first: {base and base.failed}")
    candidates = mutants(source)
    inside = {node.lineno for top in ast.walk(ast.parse(source)) if isinstance(top, ast.FunctionDef)
              for child in top.body for node in ast.walk(child) if isinstance(node, ast.stmt)}
    lines = set().union(*base.lines.values()) | ({mutant.line for mutant in candidates} - inside)
    by_cost = sorted(base.seconds, key=lambda test: base.seconds[test])
    for mutant in drawn(candidates, lines, NAMED.get(name, ())):
        first = [test for test in by_cost if mutant.line in base.lines[test]]
        yield mutant, _caught(path, mutant.tree(source), first, base) or _caught(path, mutant.tree(source), by_cost, base)


def _caught(path: Path, tree: ast.Module, tests: Sequence[str], base: Record) -> str:
    """The test that fails, or what else happens; '' for none."""
    files = list(dict.fromkeys(Path(test.partition("::")[0]).stem for test in tests))
    if not files:
        return ""
    limit = 60 + 4 * sum(base.seconds[test] for test in tests)
    record = run(path, tree, files, tests, limit)
    return "a crash, or more than four times the time" if record is None else record.failed


def main(names: Sequence[str]) -> int:
    os.chdir(ROOT)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for tool in TOOLS:
        importlib.import_module(tool)
    table: dict[str, Counter[str]] = {}
    for name in names or TESTS:
        table[name] = Counter()
        for mutant, catch in outcomes(name):
            reason = EQUAL.get(name, {}).get(mutant.name)
            result = "killed" if catch else "equal" if reason else "SURVIVED"
            table[name][result] += 1
            print(f"{name}:{mutant.line} {mutant.kind}: {mutant.name}\n    {result}: {catch or reason or ''}", flush=True)
    for name, counts in table.items():
        print(f"{name:40} {counts.total():3} mutants: {', '.join(f'{count} {result}' for result, count in sorted(counts.items()))}")
    return int(any(counts["SURVIVED"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
