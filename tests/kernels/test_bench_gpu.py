"""The benchmark of a GPU, as far as it goes without one: what it plans, judges, counts, keeps and says."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import answers, checks, clock, peers, plan, probes, report, times
from bench.gpu.ahead import Ahead
from bench.gpu.budget import SHARES, Budget
from bench.gpu.device import H200, launches_for, product
from bench.gpu.plan import Case, Check
from bench.gpu.weights import Weight, every, fits, format_of, large, normal, packed
from qdsl.runtime.gpu import configure, costs
from qdsl.runtime.libraries.call import Call
from tests.support import compiling
from tests.support.interpreter import INTERPRETED
from tests.support.paths import ROOT
from tests.support.tables import PREDICTED, speed_lines

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hopper() -> Iterator[None]:
    with launches_for(H200):
        yield


def one(name: str, grid: tuple[tuple[int, ...], tuple[int, ...]] = plan.WHOLE) -> Weight:
    weight = next(case for case in every() if f"{case.name}.{case.storage}" == name)
    shape = plan.shape_of(weight, grid)
    assert shape is not None
    return replace(weight, shape=shape)


def kernels(calls: Iterator[Call]) -> set[str]:
    return {call.family for call in calls}


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_every_storage_is_planned_on_every_kind_of_shape(quick: bool) -> None:
    planned = plan.cases(quick)
    out = plan.left_out()
    for weight in every():
        mine = [case.weight.shape for case in planned if (case.weight.name, case.weight.storage, case.weight.params)
                == (weight.name, weight.storage, weight.params)]
        where = f"{weight.name}.{weight.storage}"
        assert any(n % 16 == 0 and k % 256 == 0 for n, k in mine), where
        assert any(k % 128 == 0 and k % 256 for n, k in mine) or any(line.startswith(where) and "384" in line for line in out)
        assert any(k % 128 for n, k in mine) or any(line.startswith(where) and "no multiple" in line for line in out)
        planar = weight.storage == "planar"
        assert not planar or any(n % 16 and k % 128 == 0 for n, k in mine), where
    assert all(fits(case.weight) for case in planned) and len(set(planned)) == len(planned)


def test_every_regime_of_rows_is_planned(hopper: None) -> None:
    """By the kernels that a launch on a Hopper device takes, and by rows."""
    planned = [(case, list(case.calls())) for case in plan.cases()]
    rows = {check.rows for case, _ in planned for check in case.checks}
    assert {0, 1, 2, 8, 16, 64} <= rows and {m for m in rows if 8 < m < 64 and m & (m - 1)} and max(rows) >= 256
    for weight in every():
        cases = [(case, calls) for case, calls in planned
                 if (case.weight.name, case.weight.storage) == (weight.name, weight.storage)
                 and set(weight.params) <= set(case.weight.params)]
        launched = {kernel for _, calls in cases for kernel in kernels(calls)}
        lanes = matrix_unit_of(weight)
        layout = format_of(weight.name).storage(weight.storage, weight.chosen)[1]
        streams, pairs = layout.streams, bool(layout.streams) and layout.kernels.pairs is not None
        wanted = {"dequantize", "symbols" if streams else "matvec", *(["skinny"] if pairs else [])}
        wanted |= {"skinny"} if lanes and "skinny" in lanes.families else set()
        wanted |= {"gemv_records" if lanes.records else "gemv"} if lanes and "gemv" in lanes.families else set()
        wanted |= {"tile_gemm"} if lanes and "tile_gemm" in lanes.families else set()
        assert wanted <= launched, weight
        is_invariant = any(check.invariant for case, _ in cases for check in case.checks)
        assert bool(pairs or (lanes and "skinny" in lanes.families)) == is_invariant
        if lanes:
            configs = [call.constants for _, calls in cases for call in calls if "WK" in call.constants]
            widths = {config["WK"] for config in configs}
            wide = {8} - {int(key.rpartition("/")[2]) for key in costs.spilling(costs.storage_key(cases[0][0].weight.meta()))}
            assert {config["R"] for config in configs} == {1, 2} and widths >= {2} | wide
        if lanes and "tile_gemm" in lanes.families:
            configs = [call.constants for _, calls in cases for call in calls if {"BM", "R"} <= set(call.constants)]
            assert {config["BM"] for config in configs} >= {16, 32} and {config["R"] for config in configs} == {1, 2}


def matrix_unit_of(weight: Weight) -> Any:
    return weight.meta().layout.kernels.matrix_unit if fits(weight) else None


def test_other_parameters_and_missing_tensors_are_planned() -> None:
    planned = {(case.weight.name, case.weight.storage, case.weight.params, case.weight.optional) for case in plan.cases()}
    others = [(weight.name, weight.storage, weight.params, weight.optional) for weight in plan.others()]
    left = {(*key[:2], dict(key[2])["group"]) for key in set(others) - planned}
    assert left == {("int_group", "awq_gemv", 1024), ("int_group", "awq_gemv", -1),     # steps of columns have no whole ones
                    ("int_group", "marlin", -1),                                        # its scales lie otherwise for one group
                    ("int_group", "openvino_u4", -1)}                                   # zero points of two groups share a byte
    assert any(optional for *_, optional in others) and any(("group", -1) in params for _, _, params, _ in others)


def test_launches_for_another_device_end_with_it() -> None:
    before = configure.target(CPU)
    with launches_for(H200):
        assert configure.target(CPU) == configure.Target(9, 132) != before
    assert configure.target(CPU) == before
    assert product("NVIDIA H200") == "h200" and product("Some GPU") is None


# -- the judgement ----------------------------------------------------------------------------------------------------


def test_the_bound_admits_rounding_and_catches_more() -> None:
    exact = torch.tensor([[1000.0, -3.0, 0.0]], dtype=torch.float64)
    spread = torch.full((1, 3), 2000.0, dtype=torch.float64)
    allowed = checks.bound(exact, spread, 256, torch.float16, rounded=False)
    eps = torch.finfo(torch.float16).eps
    assert allowed[0, 0] == 1000 * eps / 2 + 2000 * 256 * 2.0 ** -24 + torch.finfo(torch.float16).tiny
    assert checks.worst(exact.half(), exact, allowed) < 1
    wrong = exact.clone()
    wrong[0, 1] += 1.01 * float(allowed[0, 1])
    assert checks.worst(wrong, exact, allowed) > 1
    assert checks.worst(torch.tensor([[1000.0, torch.nan, 0.0]]), exact, allowed) == float("inf")
    rounded = checks.bound(exact, spread, 256, torch.float16, rounded=True)
    assert torch.allclose(rounded - allowed, spread * eps / 2)


@pytest.mark.skipif(not INTERPRETED, reason="kernels on a GPU are what bench.gpu itself checks")
def test_a_right_kernel_is_found_right_and_a_planted_mistake_wrong(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = one("int_group.planar", plan.RAGGED)
    case = Case(weight, (Check(1, "f16", bias=True), Check(5, "f16"), Check(12, "f16"), Check(0, "f32"),
                         Check(8, "f16", invariant=True)))
    outcomes = list(checks.examine(case, CPU))
    assert [check.wrong for check in outcomes] == [""] * 5
    assert [check.kernel for check in outcomes] == ["gemv", "skinny", "tile_gemm", "dequantize", "skinny"]
    assert all(check.worst < 1 for check in outcomes)
    right = checks.product

    def off(x: Any, *args: Any, **named: Any) -> Any:
        output = right(x, *args, **named)
        output[-1, 3] += 0.02 * output.abs().max()
        return output

    monkeypatch.setattr(checks, "product", off)
    outcomes = list(checks.examine(replace(case, checks=(Check(1, "f16"), Check(8, "f16", invariant=True))), CPU))
    assert "times the bound" in outcomes[0].wrong and "in another place" in outcomes[1].wrong

    def failing(*args: Any, **named: Any) -> Any:
        raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(checks, "product", failing)
    [outcome] = checks.examine(replace(case, checks=(Check(1, "f16"),)), CPU)
    assert outcome.wrong == "RuntimeError: an illegal memory access"


@pytest.mark.skipif(not INTERPRETED, reason="as above")
def test_bits_that_change_from_run_to_run_are_wrong(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right, runs = checks.product, iter(range(99))

    def unsteady(x: Any, *args: Any, **named: Any) -> Any:
        output = right(x, *args, **named)
        output[0, 0] = output[0, 0].nextafter(torch.tensor(9.0, dtype=output.dtype)) if next(runs) % 2 else output[0, 0]
        return output

    monkeypatch.setattr(checks, "product", unsteady)
    [outcome] = checks.examine(Case(one("q4_0.planar"), (Check(2, "f16"),)), CPU)
    assert "second run" in outcome.wrong


# -- time -------------------------------------------------------------------------------------------------------------


def test_parts_end_by_their_share_of_the_budget() -> None:
    time = Clock()
    budget = Budget(480, time)
    part = budget.part("checks")
    assert part.left == 480 * SHARES["checks"] and part.allows(part.left - 1) and not part.allows(part.left)
    time.now += 400                                              # the checks were late: answers still get a little
    late = budget.part("answers")
    assert part.left < 0 < late.left <= 20 and not part.allows()
    assert budget.part("candidates").left == pytest.approx(480 * SHARES["candidates"] - 400)
    assert list(SHARES.values()) == sorted(SHARES.values()) and SHARES["candidates"] < 1


def test_checks_stop_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()

    def examined(case: Case, device: torch.device) -> Iterator[checks.Outcome]:
        time.now += 30
        yield checks.Outcome(str(case.weight), "1 row", "q4_0.planar", "gemv", 0.25, "")

    monkeypatch.setattr(checks, "examine", examined)
    cases = plan.cases(quick=True)[:9]
    checked = checks.Checked(9, 0, [], [])
    checks.run(cases, ["a shape"], Ahead(H200, 0), Budget(125, time).part("checks"), CPU, checked)
    assert checked.done == 2 and checked.left_out == ["a shape", f"7 weights, from {cases[2].weight} on: no time"]
    assert checked.data()["by_kernel"] == [{"storage": "q4_0.planar", "kernel": "gemv", "checks": 2, "worst": 0.25}]


def test_questions_are_asked_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()

    def quickly(asked: answers.Asked) -> dict[str, Any]:
        """Is it."""
        time.now += 40
        return {"values": {}, "answer": "yes"}

    def failing(asked: answers.Asked) -> dict[str, Any]:
        """Does it."""
        raise ValueError("no")

    monkeypatch.setattr(answers, "QUESTIONS", {3: failing, 1: quickly, 2: quickly})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows, left_out = answers.run(answers.Asked(H200, Ahead(H200, 0)), Budget(60, time).part("answers"))
    assert [(row["question"], row["what"], row["answer"]) for row in rows] == [
        (3, "Does it", "failed: ValueError: no"), (1, "Is it", "yes")]
    assert left_out == ["question 2, quickly: no time"]


def test_all_open_questions_are_asked() -> None:
    assert sorted(answers.QUESTIONS) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_times_are_taken_in_order_of_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {shape for shape, _ in times.groups()} == {(4096, 4096), (4096, 14336), (8192, 8192), (28672, 8192)}
    assert {rows for _, rows in times.groups()} == {times.DECODED, 1, 2, 4, 8, 16, 64, 256, 4096} and len(times.groups()) == 36
    decoded = {side.name for side in times.sides(times.SHAPES[0]) if times.is_timed(side, times.DECODED)}
    assert decoded == {"fix4.fix4", "fix3.fix3", "hlane.hlane", "df11.df11"}
    time, loaded, kept = Clock(), [], []

    class Loaded:
        def __init__(self, shape: tuple[int, int], *args: Any) -> None:
            self.shape, self.sides = shape, []
            loaded.append(shape)

    def group(loaded: Any, rows: int, *args: Any) -> tuple[list[times.Timed], list[str]]:
        time.now += 10
        timed = [times.Timed(loaded.shape, rows, times.DENSE, "bf16", [2e-5], 1), times.Timed(
            loaded.shape, rows, "q4_0.planar", "bf16", [1e-5, 1e-5, 3e-5], 10 ** 7)]
        return timed, ["another package: absent"] * (rows == 1)

    monkeypatch.setattr(times, "Loaded", Loaded)
    monkeypatch.setattr(times, "_group", group)
    table: list[dict[str, Any]] = []
    left_out = times.run(H200, 4e12, Ahead(H200, 0), Budget(68 / SHARES["times"], time).part("times"), 3, False, table,
                         peers.Packages(), lambda: kept.append(len(table)))
    assert loaded == [(8192, 8192), (4096, 4096)] and kept == [2, 4, 6, 8, 10, 12]
    assert [row["rows"] for row in table[::2]] == [1, 16, 8, 64, 1, 16]
    assert table[1] == {"n": 8192, "k": 8192, "rows": 1, "what": "q4_0.planar", "x": "bf16", "us": 10.0, "min": 10.0, "max": 30.0,
                        "times_dense": 2.0, "gbps": 1000.0, "of_copy": 0.25}
    assert len(left_out) == 2 + 36 - 6 and left_out[-1] == "N x K = 4096 x 14336, M = 0: no time"


@pytest.mark.parametrize(("nbytes", "count"), [(1, 2 * (50 << 20) + 1), (9 << 20, 12), (50 << 20, 3), (1 << 30, 2)])
def test_rotated_copies_exceed_twice_the_cache(nbytes: int, count: int) -> None:
    assert clock.copies(nbytes, H200.l2) == count and count * nbytes > 2 * H200.l2
    assert count == 2 or (count - 1) * nbytes <= 2 * H200.l2


def test_samples_are_of_several_replays() -> None:
    assert [clock.replays(once) for once in (1e-9, 1e-3, 1.0)] == [50, 3, 1]


# -- weights and launches ---------------------------------------------------------------------------------------------


def test_large_weights_repeat_rows_that_are_finite() -> None:
    for weight in every((512, 1024)):
        big = large(weight, "cpu")
        weights = big.format.dequantize(big, torch.float32)
        rows = sorted(row.numpy().tobytes() for row in weights)  # where a word holds rows far apart they are not in order
        assert weights.isfinite().all() and rows[::2] == rows[1::2] and len({*rows}) > 128, weight
        coded = {name for stream in big.layout.streams.values() for name in stream.names.values()}      # as large as they come
        assert {key: (tensor.dtype, tensor.shape) for key, tensor in big.tensors.items() if key not in coded} == {
            key: (tensor.dtype, tensor.shape) for key, tensor in weight.meta().tensors.items() if key not in coded}
    assert all(fits(side.weight) for shape in times.SHAPES for side in times.sides(shape))
    assert len(times.sides(times.SHAPES[0])) == len(times.SIDES)


def test_optional_tensors_are_there_where_asked_for() -> None:
    for weight in plan.others():
        shape = plan.shape_of(weight, plan.RAGGED)
        if weight.optional and shape:
            sized = replace(weight, shape=shape)
            assert packed(sized).tensors.keys() == sized.meta().tensors.keys()


def test_overridden_launches_stay_launches(hopper: None) -> None:
    [row] = probes.Launched(answers.weight((4096, 4096)), 1, "bf16").calls()
    for warps in probes.WARPS_ALONG_K:
        call = probes.along_k(row, warps)
        assert call.constants["WK"] == call.options["num_warps"] == warps and call.step == 16 * row.constants["R"] * 256 * warps
        assert call.constants["EVEN"] and call.grid == row.grid
    many, _ = probes.Launched(answers.weight((16896, 8192), answers.GROUPED), 64, "bf16", stages=((3, 1),)).calls()
    assert probes.staged(many, many.constants["STAGES"]) == many
    twice, once = (probes.staged(many, 4, r) for r in (2, 1))
    assert (twice.grid[0], once.grid[0]) == (132, 264) and twice.weights == 2 * once.weights == 128 * 8192
    assert once.options["num_stages"] == once.constants["STAGES"] == 4


COMPILE = """
import json
from bench.gpu import ahead, answers, probes
from bench.gpu.device import H200
from bench.gpu.plan import Case, Check
from bench.gpu.weights import Weight
from qdsl.analyze import sass
from qdsl.analyze.compile import compile_launch
from qdsl.analyze.gpus import ARCHS

for call in probes.Probes().calls():
    kernel = compile_launch(call, ARCHS["sm_90"])
    code = sass.parse(kernel.text)
    loop = max(sass.loops(code), key=len, default=range(len(code.instructions)))
    print(json.dumps({"name": kernel.name, "stack": kernel.stack, "constants": {k: str(v) for k, v in call.constants.items()},
                      "opcodes": [code.instructions[place].opcode for place in loop]}))
ahead.start(H200)
case = Case(Weight("q4_0", "planar", (), (64, 512)), (Check(1, "f16"), Check(100, "bf16")))
print(json.dumps({"name": "ahead", "made": [ahead.compile_job(each).__dict__ for each in (case, case)]}))
"""


def test_small_kernels_compile_and_hold_what_they_are_about(tmp_path: Path) -> None:
    """For sm_90, in a process that does not interpret; and what is compiled ahead is compiled once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    *small, compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any(probe["stack"] for probe in small)
    opcodes = {}
    for probe in small:
        opcodes[probe["name"], *probe["constants"].values()] = probe["opcodes"]
    for (name, *constants), inside in opcodes.items():
        if name == "convert":
            asm = constants[0]
            what = next(key for key, text in probes.CONVERSIONS.items() if str(text) == asm)
            wanted = 8 * probes.PER_TRIP if what != "none" else 0            # 1024 numbers, 128 threads
            assert sum(opcode.startswith(("I2F", "F2FP", "IMAD.HI")) for opcode in inside) == wanted, what
            assert not wanted or any(opcode.startswith(probes.OPCODES[what]) for opcode in inside)
        elif name == "matrix":
            assert inside.count("HMMA.16816.F32") == 16 and not any(opcode.startswith(("LDS", "STS", "BAR")) for opcode in inside)
        elif name == "read":
            assert {opcode for opcode in inside if opcode.startswith("LD")} == {"LDG.E.128"}
    assert any(opcode.startswith("HMMA") for opcode in opcodes["multiply", "16", "16", "64"])
    assert any(opcode.startswith("HGMMA") for opcode in opcodes["multiply", "64", "16", "64"])
    first, second = compiled["made"]
    assert first["launches"] == second["launches"] == 4 and not first["error"] and second["seconds"] < first["seconds"] / 2


# -- what is kept and said --------------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the checks, one of which is wrong; the file names everything that is needed to repeat it."""
    case = plan.cases(quick=True)[0]
    outcomes = [checks.Outcome("w", "1 row", "q4_0.planar", "gemv", 0.5, ""),
                checks.Outcome("w", "2 rows", "q4_0.planar", "skinny", float("inf"), "no number")]
    monkeypatch.setattr(command, "device_info", lambda: H200)
    monkeypatch.setattr(plan, "cases", lambda quick: [case])
    monkeypatch.setattr(checks, "examine", lambda case, device: iter(outcomes))
    options = argparse.Namespace(minutes=8.0, quick=True, only=["checks"], json=tmp_path / "found.json", processes=0,
                                 share=(1, 1))
    assert command.Run(options, "python -m bench.gpu --quick").all() == 1
    report = json.loads(options.json.read_text())
    assert set(report) == {"schema", "kind", "command", "date", "quick", "device", "versions", "minutes", "seconds", "checks",
                           "left_out"}
    assert (report["kind"], report["command"], report["device"]["gpu"]) == ("gpu", "python -m bench.gpu --quick", "NVIDIA H200")
    assert {"torch", "triton", "python", "qdsl", "cuda"} <= report["versions"].keys()
    assert report["checks"]["wrong"] == [{"weight": "w", "check": "2 rows", "storage": "q4_0.planar", "kernel": "skinny",
                                          "worst": None, "wrong": "no number"}]
    assert report["checks"]["done"] == 2 and isinstance(report["left_out"]["checks"], list)
    assert not list(tmp_path.glob("*.part"))


def test_a_run_that_breaks_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost_device(*args: Any) -> Iterator[checks.Outcome]:
        yield checks.Outcome("w", "1 row", "q4_0.planar", "gemv", 0.5, "")
        raise checks.DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr(command, "device_info", lambda: H200)
    monkeypatch.setattr(checks, "examine", lost_device)
    options = argparse.Namespace(minutes=8.0, quick=True, only=["checks"], json=tmp_path / "found.json", processes=0,
                                 share=(1, 1))
    assert command.Run(options, "python -m bench.gpu").all() == 1
    results = json.loads(options.json.read_text())
    assert results["checks"]["done"] == 1 and results["ended"].startswith("DeviceLost: an illegal")


def test_without_a_device_there_is_nothing_to_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main() == 2 and "CUDA" in capsys.readouterr().err


def test_files_are_named_after_the_device_and_lists_have_a_line_each() -> None:
    assert report.name_of(H200).startswith("gpu-nvidia-h200-torch") and report.name_of(H200).endswith(".json")
    data = {"a": 1, "left_out": {"times": ["x", "y"]}, "times": [{"us": 1.5}, {"us": 2.0}], "none": []}
    text = report.written(data)
    assert json.loads(text) == data and '\n    {"us": 1.5},\n' in text
    with pytest.raises(ValueError, match="JSON"):
        report.written({"times": [float("nan")]})


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name if name != "torchao" else "something_else")

    monkeypatch.setattr("importlib.import_module", absent)
    packages = peers.find()
    assert packages.peers_for((4096, 4096), H200.l2) == []
    notes = packages.data()
    assert notes.keys() == {"gemlite", "torchao", "bitsandbytes", "dfloat11"}
    assert notes["gemlite"] == {"version": None, "note": "not installed"}
    assert notes["torchao"]["note"].startswith("cannot be imported: ModuleNotFoundError")


def test_what_dfloat11_decodes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is launched as its hook does, and timed where it decodes the numbers that were coded."""
    weight = large(Weight("df11", "df11", (), (512, 256)), "cpu")
    numbers = normal(256, 256).repeat(2, 1)
    out = torch.zeros(512, 256, dtype=torch.bfloat16)
    launched: list[Any] = []

    def kernel(grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
        launched.append((grid, block, arguments[-3:], shared_mem))
        out.copy_(numbers)

    module = SimpleNamespace(get_function=lambda name: kernel)
    cupy = SimpleNamespace(RawModule=lambda path: module, cuda=SimpleNamespace(ExternalStream=lambda stream: nullcontext()))
    modules = {"cupy": cupy, "dfloat11": SimpleNamespace(__file__="/x/__init__.py")}
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: modules[name])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    packages = peers.Packages({"dfloat11": "0.5.0"})
    assert len(packages.decoded([weight, weight], out)) == 2 and packages.data()["dfloat11"]["note"] == ""
    size, rows = weight.tensors["encoded_exponent"].numel(), len(weight.tensors["luts"])
    assert launched == [((-(-size // 4096),), (512,), [rows, size, 512 * 256], launched[0][3])]
    assert 25_000 < launched[0][3] < 30_000
    numbers[300, 7] += 1
    assert packages.decoded([weight], out) == []
    assert packages.data()["dfloat11"]["note"] == "not timed: ValueError: it decodes other numbers"


def test_predictions_are_of_what_is_timed() -> None:
    predicted = json.loads(PREDICTED.read_text())
    assert predicted["kind"] == "predicted" and predicted["command"].startswith("python -m bench.gpu --predict")
    named = {(row["what"], row["x"]) for row in predicted["times"]}
    assert named == {(side.name, side.x) for side in times.sides(times.SHAPES[0]) if side.weight.name != "df11"}
    assert all(0 < row["of_bandwidth"] <= 0.9 and row["us"] > 0 for row in predicted["times"])


def test_the_table_calls_each_number_measured_or_predicted() -> None:
    guess = {"n": 8192, "k": 8192, "x": "bf16", "what": "q4_0.planar", "us": 8.7, "of_bandwidth": 0.9, "limit": "memory"}
    predicted = {"device": {"gpu": "H200 SXM"}, "versions": {"triton": "3.6.0"},
                 "times": [{**guess, "rows": 1}, {**guess, "rows": 8, "x": "f16"}, {**guess, "rows": 8, "what": "q4_k.planar"}]}
    text = "\n".join(speed_lines(predicted, None))
    assert text.count("easured") == 1 and "No number here is measured" in text
    assert "| q4_0.planar | predicted 8.7 us, 90% | - |" in text and "for H200 SXM, triton" in text
    row = {"n": 8192, "k": 8192, "rows": 1, "what": "q4_0.planar", "x": "bf16", "us": 10.04, "of_copy": 0.8, "times_dense": 3.3}
    measured = {"device": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "copy_gbps": 4300.0,
                "command": "python -m bench.gpu", "date": "2026-11-22", "times": [row, {**row, "n": 4096, "us": 1.0}]}
    text = "\n".join(speed_lines(predicted, measured))
    assert "| q4_0.planar | measured 10.0 us, 80%, 3.30 x; predicted 8.7 us, 90% | - |" in text
    assert "Measured on NVIDIA H200" in text and "`python -m bench.gpu`" in text and "2026-11-22" in text


def test_the_machine_is_compared_with_the_gpu() -> None:
    """Results that are the same are equal; one that is wrong by one is a difference."""
    run = compiling.run("tests.kernels.machine_differences")
    assert not run.returncode, run.stderr
    same, _, wrong, _ = json.loads(run.stdout)
    assert (same["kernel"], same["equal"], same["error"], same["findings"]) == ("skinny", 1.0, 0.0, 0)
    assert (wrong["kernel"], wrong["equal"]) == ("gemv_records", 1 - 1 / 128) and wrong["error"] > 1e-4
