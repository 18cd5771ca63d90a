"""tests/data/compatibility.yaml names tests that are there, and every live test is named."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.compatibility import KINDS, Pair, failures, outcomes, pairs
from tests.support.paths import ROOT

WHOLE_FILES = ("test_compressed_tensors.py", "test_bitsandbytes.py", "test_transformers.py")     # live, besides *_live.py
MARKS = re.compile(r"@live\b|@needs_mlx|make live")              # of live tests in other files
# Tests of an engine, and of what a loader does without a guard: of no artefact.
NO_PAIRS = ("test_tied_head", "test_torch_compile", "test_entry_point", "test_experts_are_refused", "test_the_guard_alone")


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file by their names."""
    return {node.name: node for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def live_tests() -> list[str]:
    """Tests that need other programs, as FILE::NAME: those of live files, and those that `live` marks elsewhere."""
    tests = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        is_live = (path.name.endswith("_live.py") and path.name != "test_live.py") or path.name in WHOLE_FILES
        if not is_live and not MARKS.search(path.read_text()):
            continue
        for name, node in functions(path).items():
            marks = " ".join(f"@{ast.unparse(mark)}" for mark in node.decorator_list)
            if (is_live or MARKS.search(marks)) and not name.startswith(NO_PAIRS):
                tests.append(f"{path.relative_to(ROOT)}::{name}")
    return tests


def test_pairs_name_tests() -> None:
    for pair in pairs():
        assert (pair.kind == "not run") == (not pair.test), pair
        if pair.test:
            path, _, name = pair.test.partition("::")
            node = functions(ROOT / path).get(name)
            assert node is not None, f"{pair.test} is not there"
            assert not pair.case or "parametrize" in " ".join(map(ast.unparse, node.decorator_list)), pair
        assert pair.kind == "exact" or pair.result.partition(": ")[2], f"{pair.program}, {pair.artefact}: without a reason"


def test_live_tests_are_named() -> None:
    live = live_tests()
    assert len(live) > 40 and set(live) - {pair.test for pair in pairs()} == set()


def test_pairs_are_many_and_different() -> None:
    keys = [(pair.program, pair.direction, pair.artefact) for pair in pairs()]
    assert len(keys) == len(set(keys)) >= 150 and {pair.kind for pair in pairs()} == set(KINDS)


def test_a_report_is_compared_with_the_pairs(tmp_path: Path) -> None:
    """A test that failed, was skipped or did not run is a failure of its pairs, and names its program."""
    report = tmp_path / "report.xml"
    name = 'classname="tests.live.test_mlx" name="test_mlx_reads_what_we_quantize'
    cases = "".join(f'<testcase {name}[{case}]">{inside}</testcase>'
                    for case, inside in (("mlx", ""), ("mlx bits=6 group=32", "<failure/>"), ("ocp_mxfp4.mlx", "<skipped/>")))
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    wrong = [line for line in failures("make live", outcomes([report])) if line.startswith("MLX") and "quantize[" in line]
    node = "tests/live/test_mlx.py::test_mlx_reads_what_we_quantize"
    assert wrong == [f"MLX 0.32, affine 6 bits: {node}[mlx bits=6 group=32] failed",
                     f"MLX 0.32, mxfp4: {node}[ocp_mxfp4.mlx] skipped",
                     f"MLX 0.32, mxfp8: {node}[ocp_mxfp8.mlx] was not run",
                     f"MLX 0.32, nvfp4: {node}[nvfp4_modelopt.mlx] was not run"]
    passed = {pair.node: "passed" for pair in pairs()}
    assert failures("make live", passed) == [] and isinstance(pairs()[0], Pair)
