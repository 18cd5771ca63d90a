"""Modelled seconds: from shipped counts, by a formula, without compiling."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from unittest.mock import patch

import pytest
import torch

import qdsl
from bench import costs as writer
from bench import dispatch
from qdsl.analyze import launches
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, devices, launch, plan
from qdsl.runtime.gpu.costs import Candidate, Cost, RepeatedWork, launch_times, seconds
from qdsl.runtime.gpu.devices import GPUS
from qdsl.runtime.gpu.families import units
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.weight import stream_kernels
from tests.support import compiling
from tests.support.paths import ROOT

X = torch.bfloat16
COST = Cost(registers=64, shared=1024, warps=4, step=4096, trip=100, fixed=50, chain=200, chain_loads=1, start=300, start_loads=1)
ROW = {"R": 1, "WN": 1, "WK": 4, "EVEN": 1}
PLAIN = {"BN": 8, "BK": 128, "EVEN": 1}
# Of how many storages a kernel, in whatever variant, moves registers to memory and back, and by how many instructions together;
# the costs of its trips have that too.  A factor of shifts by products takes a register of `gemv R=2`: with it 30 fewer spill on
# all GPUs together, but 18 more on sm_90 and 2 more on sm_89.
SPILLING: dict[str, dict[str, tuple[int, int]]] = {
    "gfx942": {"gemm 16": (1, 46), "gemm 64": (1, 102)},
    "sm_100": {"gemm 16": (41, 10497), "gemm 32": (3, 27), "gemm 64": (38, 11369), "gemv R=1": (4, 25), "gemv R=2": (9, 55),
        "matvec": (11, 1166), "skinny R=1": (3, 8), "skinny R=1 16": (5, 47), "skinny R=2": (23, 269),
        "skinny R=2 16": (3, 48), "tile_gemm R=1 32": (1, 3), "tile_gemm R=1 64": (1, 18), "tile_gemm R=2 64": (7, 3092)},
    "sm_120": {"gemm 16": (48, 6679), "gemm 32": (1, 19), "gemm 64": (59, 22158), "gemv R=1": (4, 10), "gemv R=2": (4, 27),
        "matvec": (4, 988), "skinny R=1": (5, 41), "skinny R=1 16": (5, 50), "skinny R=2": (9, 175),
        "skinny R=2 16": (3, 75), "tile_gemm R=1 32": (1, 4), "tile_gemm R=2 32": (1, 13), "tile_gemm R=2 64": (13, 1064)},
    "sm_80": {"gemm 16": (38, 9717), "gemm 32": (1, 23), "gemm 64": (60, 30412), "gemv R=1": (5, 16), "gemv R=2": (6, 28),
        "matvec": (11, 3874), "skinny R=1": (6, 81), "skinny R=1 16": (7, 393), "skinny R=2": (10, 325),
        "skinny R=2 16": (11, 5289), "tile_gemm R=2 16": (3, 9), "tile_gemm R=2 32": (2, 20),
        "tile_gemm R=2 64": (26, 7273)},
    "sm_89": {"gemm 16": (37, 10271), "gemm 32": (3, 98), "gemm 64": (54, 23973), "gemv R=1": (5, 24), "gemv R=2": (9, 56),
        "matvec": (11, 3273), "skinny R=1": (4, 32), "skinny R=1 16": (12, 52), "skinny R=2": (10, 390),
        "skinny R=2 16": (2, 8)},
    "sm_90": {"gemm 16": (40, 10837), "gemm 32": (1, 21), "gemm 64": (55, 22904), "gemv R=1": (2, 11), "gemv R=2": (12, 85),
        "matvec": (12, 3944), "skinny R=1": (10, 47), "skinny R=1 16": (21, 327), "skinny R=2": (14, 239),
        "skinny R=2 16": (16, 6618), "tile_gemm R=2 32": (9, 89), "tile_gemm R=2 64": (3, 470),
        "tile_gemm R=2 64 S=1": (1, 18)},
}


def weight(name: str = "q4_0", storage: str = "planar", shape: tuple[int, int] = (4096, 4096)) -> PackedWeight:
    return launches.meta_weight(qdsl.load(name), shape, storage, {})


def test_the_terms_of_a_launch() -> None:
    """264 programs of 10 trips, two on every one of 132 SMs: two warps on a scheduler."""
    gpu = GPUS["h100"]
    launch = launch_times(COST, programs=264, trips=10, moved=3015 * 10**6, work=RepeatedWork(), target=gpu)
    alone = (300 + 10 * 200) / 1.98e9 + 11 * costs.LATENCY
    assert launch.memory == pytest.approx(1e-3) and launch.busy == pytest.approx(2 * (50 + 10 * 100) / 1.98e9)
    assert launch.chain == pytest.approx(alone) and launch.first == pytest.approx(500 / 1.98e9 + costs.LATENCY)
    work = launch.busy + launch.chain - launch.first
    assert launch.seconds == pytest.approx(costs.LAUNCH + launch.first + 1e-3 + costs.EXPOSED * work)
    waiting = launch_times(replace(COST, chain_loads=9000), 264, 10, 3015 * 10**6, RepeatedWork(), gpu)
    assert waiting.seconds == pytest.approx(costs.LAUNCH + waiting.busy + waiting.chain + costs.EXPOSED * 1e-3)


def test_what_programs_load_of_x() -> None:
    """From the L2 cache: the SMs wait for it, or copies do while memory works; and a product of a warp group for another."""
    gpu = GPUS["h100"]
    microsecond = 132 * costs.L2_BYTES * 1980
    none, loaded, copied, many = (launch_times(COST, 264, 10, 30150, work, gpu) for work in (
        RepeatedWork(), RepeatedWork(loaded=9 * microsecond), RepeatedWork(loaded=9 * microsecond, is_copied=True),
        RepeatedWork(waits=3)))
    assert loaded.cached == pytest.approx(9e-6) and loaded.seconds == pytest.approx(none.seconds + 9e-6)
    copying = 9e-6 * costs.L2_BYTES / costs.COPIED_BYTES
    assert copied.cached == 0 and copied.memory == pytest.approx(copying) and none.memory < 1e-6
    assert many.chain - none.chain == pytest.approx(10 * 3 * costs.WAIT / 1.98e9)


def test_a_weight_is_read_again_by_other_rows_of_x() -> None:
    """A pass of 264 programs, of which an SM holds 8: 4 passes at once; from the L2 cache where half of it holds the weight."""
    gpu = GPUS["h100"]

    def again(passes: int, weight: int) -> float:
        few = replace(COST, registers=56)
        return launch_times(few, 264 * passes, 10, weight, RepeatedWork(weight, passes),
                            gpu).memory - weight / (3.35e12 * costs.REACHABLE)

    large, small = 30 * 10**6, 20 * 10**6
    assert [round(again(passes, large) / (large / 3.015e12)) for passes in (1, 4, 5, 9)] == [0, 0, 1, 2]
    assert again(5, small) == pytest.approx(small / (132 * costs.L2_BYTES * 1.98e9))


def test_programs_come_in_turns() -> None:
    """An SM takes 8 programs of 56 registers and 4 warps at once; the ninth comes after them, and works as long as one.

    It takes 7 of 72 registers, which programs of 64 may need.
    """
    gpu, few = GPUS["h100"], replace(COST, registers=56)
    one = launch_times(few, 132, 10, 1, RepeatedWork(), gpu)
    assert [round(launch_times(few, count, 10, 1, RepeatedWork(), gpu).chain / one.chain) for count in (1, 132 * 8, 132 * 9 + 1,
                                                                                                        132 * 20)] == [
        1, 1, 2, 3]
    assert launch_times(COST, 132 * 8, 10, 1, RepeatedWork(), gpu).chain == pytest.approx(2 * one.chain)
    assert [launch_times(COST, count, 10, 1, RepeatedWork(), gpu).busy / one.busy for count in (132, 133, 396)] == [1, 2, 3]
    assert launch_times(replace(COST, shared=1 << 20), 132, 10, 1, RepeatedWork(), gpu).seconds == math.inf


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
@pytest.mark.parametrize("m", [1, 8, 16, 64, 512])
def test_no_way_beats_the_memory(gpu: devices.Gpu, m: int) -> None:
    packed = weight()
    ways = [Candidate("gemv", ROW, (256,)), Candidate("skinny", ROW, (256, -(-m // 8))), Candidate("matvec", PLAIN, (512, m)),
            Candidate("tile_gemm", {"R": 1, "W": 4, "BM": 16}, (64, -(-m // 16))), Candidate("decode")]
    for way in ways:
        taken = seconds(packed, way, m, X, gpu)
        assert costs.LAUNCH + packed.nbytes / (gpu.bandwidth * 1e9) < taken < 5e-2, way
    decoded = seconds(packed, ways[-1], m, X, gpu)
    assert decoded > 2 * costs.LAUNCH + (packed.nbytes + 2 * 2 * 4096 * 4096) / (gpu.bandwidth * 1e9)


def test_more_work_takes_longer() -> None:
    gpu = GPUS["h200"]
    by_rows = [seconds(weight(), Candidate("skinny", ROW, (256, count)), 8 * count, X, gpu) for count in (1, 4, 16)]
    by_size = [seconds(weight(shape=(n, 4096)), Candidate("gemv", ROW, (n // 16,)), 1, X, gpu) for n in (4096, 16384, 65536)]
    by_gpu = [seconds(weight(shape=(65536, 4096)), Candidate("gemv", ROW, (4096,)), 1, X, GPUS[name]) for name in (
        "b200", "h200", "h100", "a100", "rtx4090")]
    for times in (by_rows, by_size, by_gpu):
        assert times == sorted(times) and times[0] < times[-1] / 1.5
    assert seconds(weight(shape=(0, 4096)), Candidate("gemv", ROW, (0,)), 1, X, gpu) == 0


@pytest.mark.parametrize("way, count", [(Candidate("gemv", ROW, (256,)), 1),
                                        (Candidate("matvec", PLAIN, (512, 1)), 0)])
def test_a_launch_before_the_kernel_takes_time(way: Candidate, count: int) -> None:
    """Where x meets a factor of columns before the kernel, as the launches say."""
    packed, gpu = weight("nunchaku_int4"), GPUS["h200"]
    x, out = torch.empty(1, 4096, dtype=X, device="meta"), torch.empty(1, 4096, dtype=X, device="meta")
    before = [call for call in launch.linear_calls(x, packed, None, out, candidate=way) if call.kernel is scale_columns]
    taken = seconds(packed, way, 1, X, gpu) - costs.launch_terms(packed, way, 1, X, gpu).seconds
    assert len(before) == count
    assert taken > costs.LAUNCH + 2 * x.nbytes / (gpu.bandwidth * 1e9) if count else taken == 0


def test_a_weight_is_decoded_in_tiles() -> None:
    """Two tiles of 2^27 weights: as many launches of both kernels."""
    large, part = (seconds(weight(shape=(n, 8192)), Candidate("decode"), 1, X, GPUS["h200"]) for n in (32768, 16384))
    assert large == pytest.approx(2 * part)
    coded = seconds(weight("fix4", "fix4", (16384, 8192)), Candidate("decode"), 1, X, GPUS["h200"])
    assert 2 * 16384 * 8192 * 3 / 4.8e12 < coded < 1e-3


def test_few_programs_are_slow() -> None:
    """What a grid of 4 programs costs: AWQ's as it is stored, with one row of x."""
    packed = weight("int_group", "awq")
    trap, other = (seconds(packed, way, 1, X, GPUS["h200"]) for way in (
        Candidate("matvec", {"BN": 128, "BK": 8, "EVEN": True}, (4, 1)), Candidate("decode")))
    assert trap > 10 * other


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("title", "capability", "count", "name"), [
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, "a100"), ("NVIDIA H100 80GB HBM3", (9, 0), 132, "h100"),
    ("NVIDIA H200", (9, 0), 132, "h200"), ("NVIDIA B200", (10, 0), 148, "b200"),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, "rtx4090"), ("NVIDIA GeForce RTX 5090", (12, 0), 170, "rtx5090"),
])
def test_devices_by_the_drivers_names(title: str, capability: tuple[int, int], count: int, name: str) -> None:
    assert devices.of_device(title, capability, count) is GPUS[name]


def test_other_devices_are_parts_of_the_nearest() -> None:
    smaller = devices.of_device("NVIDIA H100 PCIe", (9, 0), 66)
    assert (smaller.multiprocessors, smaller.bandwidth, smaller.clock) == (66, 1675, 1.98)
    assert [devices.of_device("other", capability, 100).name for capability in ((7, 5), (8, 6), (8, 9), (10, 3), (12, 1))] == [
        "t4", "a100", "rtx4090", "b200", "rtx5090"]


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_storage_has_its_kernels() -> None:
    """Of all formats that ship, but those whose counts depend on the weights, and those decoded by several launches."""
    table = writer.counted()["sm_90"]
    lacking = []
    for packed in writer.weights():
        coded = packed.layout.streams.values()
        decoded = list(launch.dequantize_calls(packed, torch.empty(packed.shape, dtype=X, device="meta")))
        if any(stream.coding == "huffman_windows" for stream in coded) or len(decoded) > 1:
            continue
        lanes = None if coded else packed.layout.kernels.matrix_unit
        wanted = {"dequantize"} if coded else {"matvec", "dequantize"}
        wanted |= {kind for kind in ("skinny", "gemv") if lanes is not None and kind in lanes.families}
        kinds = {key.split()[0] for key in table.get(costs.storage_key(packed), {})}
        lacking += [f"{costs.storage_key(packed)}: {kind}" for kind in sorted(wanted - kinds)]
    assert lacking == []


def test_no_kernel_spills() -> None:
    """But for some storages'; numbers become smaller alone, but for new storages and counts.  Plans take no such lane kernel."""
    spilling: dict[str, dict[str, Counter[str]]] = {}
    for arch, storage, key, row in rows_of_the_table():
        if len(row) > 11 and row[11]:
            usual = " ".join(part for part in key.split() if part[:2] not in ("W=", "U=", "E=", "B="))
            spilling.setdefault(arch, {}).setdefault(usual, Counter())[storage] += int(row[11])
    assert {arch: {key: (len(counts), counts.total()) for key, counts in kinds.items()} for arch, kinds in spilling.items()
            } == SPILLING


def rows_of_the_table() -> Iterator[tuple[str, str, str, list[float]]]:
    for arch, table in writer.counted().items():
        for storage, kernels in table.items():
            for key, row in kernels.items():
                yield arch, storage, key, row


def test_what_spills_takes_time() -> None:
    """Each instruction moves a register of 128 bytes per warp in each trip, through the L2 cache."""
    gpu = GPUS["h100"]
    none, many = (launch_times(replace(COST, spills=count), 132, 10, 1, RepeatedWork(), gpu) for count in (0, 5000))
    assert none.cached == 0 and many.cached == pytest.approx(5000 * 128 * 4 * 10 / (costs.L2_BYTES * 1.98e9))
    assert many.seconds == pytest.approx(none.seconds + many.cached)


def test_a_small_tile_of_gemm_where_others_spill() -> None:
    """It is counted and a candidate there alone, and is chosen for Marlin's weights."""
    meta = torch.device("meta")
    with configure.assumed(9, GPUS["h100"].multiprocessors, GPUS["h100"]):
        spills, fits = weight("int_group", "marlin"), weight("q4_0", "gguf")
        rows = {16: ({16, 32, 64}, {16}), 64: ({16, 32, 64}, {64})}
        for m, wanted in rows.items():
            for packed, tiles in zip((spills, fits), wanted, strict=True):
                ways = [way for way in plan.candidates(packed, m, X, meta) if way.kind == "gemm"]
                assert {way.config["BM"] for way in ways} == tiles
        assert plan.best(spills, 16, X, meta).config["BM"] == units.SMALL
    for arch, storage, key, _ in rows_of_the_table():
        if key == "gemm 32":
            entry = writer.counted()[arch][storage]
            assert writer.is_wanted(key, entry) and entry["gemm 16"]
    assert not writer.is_wanted("gemm 32", writer.counted()["sm_90"]["q4_0.gguf"])


def test_configurations_that_the_table_lacks_follow_from_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the table has none for sm_89."""
    entries = {arch: entry for arch, entry in costs.counts("q4_0.planar").items() if arch != "sm_89"}
    monkeypatch.setattr(costs, "counts", lambda storage: entries)
    packed, entry = weight(), entries["sm_90"]
    exact = costs.kernel_cost(packed, "gemv", ROW, "sm_90")
    assert exact == entry["gemv", 1, 0, 0]
    wide = costs.kernel_cost(packed, "gemv", {**ROW, "WK": 8}, "sm_90")
    assert (wide.warps, wide.step, wide.trip) == (8, 2 * exact.step, exact.trip)
    assert costs.kernel_cost(packed, "tile_gemm", {"R": 2, "W": 4, "BM": 48}, "sm_90") == entry["tile_gemm", 2, 32, 0]
    assert costs.kernel_cost(packed, "gemv", ROW, "sm_89") == costs.kernel_cost(packed, "gemv", ROW, "sm_120")
    assert costs.kernel_cost(packed, "gemv", ROW, "gfx942") == costs.median_costs("gemv", "gfx942")["gemv", 1, 0, 0]


@pytest.mark.parametrize("arch", devices.ARCHS)
@pytest.mark.parametrize("kind", writer.KINDS)
def test_counts_stand_in_for_kernels_of_the_same_instructions(kind: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a storage has counts of a kind for one architecture alone, and medians where it has none."""
    for other in devices.ARCHS:
        monkeypatch.setattr(costs, "counts", lambda storage, other=other: {other: {(kind, 1, 16, 0): COST}})
        counted = costs.counted_on("q4_0.planar", kind, arch)
        assert counted is None or (counted == other and costs.matrix_unit(kind, other) == costs.matrix_unit(kind, arch))
    columns = [(name, cost) for name, key, cost in costs.parse_table(costs.TABLE.read_text())[0] if key[0] == kind]
    same = [cost for name, cost in columns if costs.matrix_unit(kind, name) == costs.matrix_unit(kind, arch)]
    assert all(cost in same for cost in costs.median_costs(kind, arch).values()) or not same


def test_counts_of_ampere_take_no_kernel_from_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage with counts of `tile_gemm` for sm_80 alone has the candidates of one without any."""
    own, h200 = costs.counts("q4_0.planar"), GPUS["h200"]
    few = {key: cost for key, cost in own["sm_80"].items() if key[2] <= 16}
    others = {arch: {key: cost for key, cost in entry.items() if key[0] != "tile_gemm"} for arch, entry in own.items()}
    ways = []
    for entries in (others, {**others, "sm_80": few}):
        monkeypatch.setattr(costs, "counts", lambda storage, entries=entries: entries)
        with configure.assumed(9, h200.multiprocessors, h200):
            ways.append([way for way in plan.candidates(weight(), 64, X, torch.device("meta")) if way.kind == "tile_gemm"])
    assert ways[0] == ways[1] and any(way.config["BM"] > 16 for way in ways[0])


def test_the_shipped_table_is_small_and_what_was_counted() -> None:
    """Every kernel of the file but those that spill, cycles within 8 %, registers rounded up to how they are allocated."""
    text = costs.TABLE.read_text()
    assert text == writer.compact(writer.counted()) and len(text) < 60_000
    columns, letters = costs.parse_table(text)
    for storage in letters:
        shipped, exact = costs.decode_counts(columns, letters, storage), writer.exact(storage)
        assert {arch: {*entry} for arch, entry in shipped.items()} == {arch: {*entry} for arch, entry in exact.items()}
        for arch, entry in exact.items():
            for key, cost in entry.items():
                own = shipped[arch][key]
                assert own.registers == min(255, -(-cost.registers // 8) * 8) and own.warps == cost.warps
                for name in ("step", "trip", "chain") if cost.trip else ("step", "fixed", "start"):
                    assert getattr(own, name) == pytest.approx(getattr(cost, name), rel=0.08, abs=0.5), (storage, arch, key)


def test_rounded_counts_choose_as_exact_ones() -> None:
    """By exact counts choices take 1.003 of the best candidate's time in the mean; by medians of all storages it is 1.25."""
    ratios, meta = [], torch.device("meta")
    for packed in [*dispatch.storages(dispatch.SHAPES[0])][::9]:
        for gpu, m in itertools.product((GPUS["a100"], GPUS["h200"], GPUS["mi300x"]), (1, 16, 64)):
            with configure.assumed(devices.ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
                chosen = plan.best(packed, m, X, meta)
                with patch.object(costs, "counts", writer.exact):
                    times = [seconds(packed, way, m, X, gpu) for way in plan.candidates(packed, m, X, meta)]
                    ratios.append(seconds(packed, chosen, m, X, gpu) / min(times))
    assert len(ratios) > 200 and mean(ratios) <= 1.005 and max(ratios) <= 1.4, (len(ratios), mean(ratios), max(ratios))


@pytest.mark.parametrize("k", [1024, 4096, 8192])
def test_a_program_that_decodes_streams_takes_the_weights_of_its_launch(k: int) -> None:
    """At every K: a program takes a chunk of its rows."""
    packed, gpu = stream_kernels.with_typical_streams(weight("hlane", "hlane", (4096, k))), GPUS["h200"]
    out = torch.empty(packed.shape, dtype=X, device="meta")
    [call] = launch.dequantize_calls(packed, out)
    times = {seconds(packed, Candidate("decode"), 1, X, gpu, replace(COST, rows=rows)) for rows in (1, call.weights / k, 64)}
    assert len(times) == 1 and stream_kernels.program_weights(packed) == call.weights


def test_the_table_is_what_the_compiler_makes() -> None:
    """A storage and a kernel of every kind compiled again: the counts are the shipped ones."""
    done = compiling.run("tests.kernels.count_costs")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_modelling_imports_no_compiler() -> None:
    """Neither the analyser nor anything of the compiler is needed to choose."""
    parts = tuple(f"qdsl.{part}" for part in ("analyze", "spec", "ir", "passes", "emit"))
    code = f"import sys, qdsl.runtime.gpu.costs; print([name for name in sys.modules if name.startswith({parts})])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "[]\n", done.stderr
