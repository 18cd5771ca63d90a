"""`qdsl analyze` and what it says of real kernels, compiled without a GPU in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import qdsl
from qdsl.analyze import launches
from qdsl.cli import app
from tests.support import compiling
from tests.support.formats import ROOT

# -- real kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def surveyed() -> dict[str, Any]:
    done = compiling.run("tests.kernels.analyze_kernels")
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_loads_of_real_kernels(surveyed: dict[str, Any], arch: str) -> None:
    """Every byte of a trip is loaded once; as wide as what is known of pointers and integers allows."""
    reports = surveyed["reports"][arch]
    sizes = {"f16": 2, "i8": 1, "odd": 2, "offset": 2, "spilling": 2, "copy": 2, "product": 2 * (64 + 16) / 64}
    assert {name: row["hot_bytes"] / row["hot_weights"] for name, row in reports.items()} == sizes
    assert {name: set(row["load_widths"]) for name, row in reports.items()} == {
        "f16": {"128"}, "i8": {"128"}, "odd": {"16"}, "offset": {"16"}, "spilling": {"128"}, "copy": {"128"}, "product": {"128"}}
    assert {name for name, row in reports.items() if not row["has_loop"]} == {"copy"}
    assert {name for name, row in reports.items() if row["copied"]} == {"product"}


@pytest.mark.parametrize(("arch", "matrix"), [("sm_80", "HMMA"), ("sm_100", "UTCHMMA")])
def test_resources_of_real_kernels(surveyed: dict[str, Any], arch: str, matrix: str) -> None:
    reports = surveyed["reports"][arch]
    assert reports["f16"]["spills"] == 0 and reports["f16"]["stack"] == 0 and reports["copy"]["shared_bytes"] == 0
    assert reports["spilling"]["registers"] <= 24 and reports["spilling"]["spills"] > 100 and reports["spilling"]["stack"] > 100
    assert {opcode.split(".")[0] for opcode in reports["product"]["tensor"]} == {matrix}
    assert reports["product"]["shared_bytes"] >= 2 * 64 * (64 + 16) * 2
    assert not any(row["tensor"] for name, row in reports.items() if name != "product")
    for row in reports.values():
        assert row["hot"] == pytest.approx(sum(row["hot_pipes"].values()))
        assert row["whole"] == pytest.approx(sum(row["whole_pipes"].values())) == pytest.approx(row["cycles"]["issue"])
        assert 0.3 < row["hot"] < 12


def test_a_kernel_for_consumer_blackwell(surveyed: dict[str, Any]) -> None:
    """sm_120 has the matrix instructions of a warp, no others."""
    kernel = surveyed["sm_120"]
    assert kernel["arch"] == "sm_120" and {opcode.split(".")[0] for opcode in kernel["tensor"]} == {"HMMA"} and kernel["copied"]
    assert kernel["loaded"] >= 0.9 * 4096 * 4096 * 2 and kernel["hot_chain"]["cycles"] > 0


def test_functions_of_a_format_are_part_of_the_key(surveyed: dict[str, Any]) -> None:
    """Kernels of one family that other functions complete are other kernels."""
    keys, again, others = surveyed["keys"]
    assert keys == again and len({*keys, *others}) == 4


def test_arguments_are_specialised_as_the_launcher_does_it(surveyed: dict[str, Any]) -> None:
    assert len(surveyed["specialised"]) > 10 and all(surveyed["specialised"])


def test_what_cannot_be_examined_is_refused_in_one_line(surveyed: dict[str, Any]) -> None:
    assert surveyed["refused"] == {
        "static_assert": "refused does not compile for sm_90: this kernel never compiles",
        "weights": "the launch of copy does not say how many weights a program takes",
        "argument": "copy is launched without its argument 'out'",
        "dtype": "argument 'w' is complex64, which no kernel takes"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_block_and_a_table(surveyed: dict[str, Any]) -> None:
    lines = surveyed["text"].splitlines()
    assert lines[0].startswith("linear of q4_0.gguf [4096, 4096], 1 row of x in bf16, sm_90: matvec")
    for label in ("resources", "hot loop", "kernel", "loads", "tensor"):
        assert sum(line.startswith(f"  {label} ") for line in lines) == 1, label
    assert re.search(r"^/\*[0-9a-f]{4}\*/ .*LDG", surveyed["text"], re.MULTILINE)
    rows = [line for line in lines if re.search(r" sm_90 +\d+\.\d +\d+% ", line)]
    assert [line.split("  ")[0] for line in rows] == ["H100 SXM", "H200 SXM"]
    assert any(line.startswith("predicted for") for line in lines) and "Predicted, not measured." in lines


def test_the_json_of_the_command(surveyed: dict[str, Any]) -> None:
    rows = json.loads(surveyed["json"])["kernels"]
    assert [(row["what"], row["arch"]) for row in rows] == [
        ("linear of int_group.gptq_v1 [256, 512], 3 rows of x in f16", "sm_90"),
        ("dequantize of int_group.gptq_v1 [256, 512] to f16", "sm_90")]
    for row in rows:
        assert [estimate["gpu"] for estimate in row["predicted"]] == ["h200"] and "listing" not in row
        assert 0 < row["predicted"][0]["share"] <= 0.9 and row["weights"] * row["programs"] >= 256 * 512
    weight = 256 * 512 + 256 * 512 // 32 * 2 + 256 * 512 // 32                             # codes, scales, zero points
    assert [row["traffic"] for row in rows] == [weight + 3 * (256 + 512) * 2, weight + 256 * 512 * 2]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["analyze", *arguments], catch_exceptions=False)
    assert not done.stdout
    return done.exit_code, done.stderr.strip()


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("q40",), 2, "did you mean q4_0"),
    (("q4_0", "--arch", "sm_70"), 2, "error: no architecture 'sm_70': expected one of sm_75, sm_80, sm_89, sm_90, sm_100, "
     "sm_120, gfx942, gfx950, gfx1201"),
    (("q4_0", "--gpu", "v100"), 2, "error: no GPU 'v100': expected one of t4, a100, rtx4090, h100, h200, b200, rtx5090, mi300x, "
     "mi355x, rx9070xt"),
    (("q4_0", "--kernel", "gemm"), 2, "error: no 'gemm': expected one of linear, dequantize"),
    (("q4_0", "--x", "f32"), 2, "error: no 'f32': expected one of bf16, f16"),
    (("int_group", "--param", "bits"), 2, "error: --param is key=value, not 'bits'"),
    (("int_group", "--param", "bits=9"), 2, "error: int_group: bits is one of 4, 2, 3, 5, 6, 7, 8, not 9"),
    (("int_group", "--param", "bit=4"), 2, "error: int_group has no parameter 'bit'"),
    (("int_group", "--storage", "exllama"), 2, "error: int_group has no storage 'exllama'"),
    (("q4_0", "--shape", "64", "100"), 2, "error: q4_0.gguf: K = 100 must be a multiple of 32"),
])
def test_what_the_command_refuses(arguments: tuple[str, ...], code: int, message: str) -> None:
    exit_code, printed = run(*arguments)
    assert exit_code == code and message in printed and "\n" not in printed


def test_kernels_that_are_interpreted_are_refused() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", "qdsl", "analyze", "q4_0"], cwd=ROOT, capture_output=True, text=True,
                          env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: kernels that Triton interprets cannot be compiled: unset TRITON_INTERPRET\n"


def test_a_spec_of_ones_own_is_examined_by_its_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built into the cache; this test makes the launch and does not compile it."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("format: q4_0", "format: mine"))
    packed = launches.meta_weight(qdsl.load(str(path)), (64, 64), None, {})
    assert packed.format.name == "mine" and packed.nbytes == 64 * 64 * 4.5 / 8
