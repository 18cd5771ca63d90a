"""Modelled seconds of every candidate for x @ w.T on a GPU, by which plan.py chooses; nothing is compiled or timed.

Kernels' instruction counts come from costs.txt, which `python -m bench.costs` writes from compiled kernels: a line per kernel
with the medians over all storages, then a line per storage with five letters for each of these kernels (`counts`).  The time of
a launch follows from them, its grid and the GPU's data sheet:

    LAUNCH + first + longer(memory, work) + EXPOSED * shorter(memory, work) + merge, work = x + busy + chain - first

first: until the first loads arrive.  x: loads of x from the L2 cache; asynchronous copies count as memory time.  busy: the
busiest pipe.  chain: dependent instructions of programs in turn.  merge: adding the sums of split K.  LAUNCH, LATENCY, L2_BYTES,
COPIED_BYTES, EXPOSED and WAIT were fitted to times on an H100 (docs/predictions.md); others are assumed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from qdsl.runtime.gpu.devices import ARCHS, SCHEDULERS, Gpu
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.target import Candidate as Candidate
from qdsl.runtime.weight.tiles import balanced_tiles

LAUNCH = 2.5e-6                                                  # seconds from one kernel of a CUDA graph to the next
LATENCY = 300e-9                                                 # seconds from a load to its data
EXPOSED = 0.4                                                    # share of the shorter of memory and SM time not overlapped
WAIT = 150                                                       # cycles from an MMA of a warp group to an MMA that needs its sum
MORE_REGISTERS = 8                                               # other Triton releases may need them
REACHABLE = 0.9                                                  # share of the bandwidth that a plain copy reaches, rounded
L2_BYTES = 28                                                    # bytes of x per clock and SM, loaded from the L2 cache
COPIED_BYTES = 64                                                # the same of asynchronous copies, at the SM's full width
ARRIVAL = 3 * 270                                                # cycles: a store, an atomic and a load of the L2 cache, assumed
MATMUL = 0.9                                                     # share of the matrix rate that the vendor's matmul reaches
MATMUL_TILE = 128 * 128                                          # elements of out per SM in the vendor's matmul
DECODED = 1 << 28                                                # bytes of a weight that a product decodes at a time
TABLE = Path(__file__).with_name("costs.txt")
FIRST, SAME, ABSENT = "#", "!", "~"                              # the letter of 0; counts of the kernel before; no counts
MANY = '"'                                                       # before a letter: no counts of so many kernels
UNIT_KINDS = ("gemm", "tile_gemm")                               # kinds whose instructions depend on Arch.unit
STEPS = 7                                                        # letters per factor of e in cycles: they are within 8 %


@dataclass(frozen=True, slots=True)
class Cost:
    """Instruction counts of a compiled kernel.

    registers: per thread.  shared: bytes per program.  warps: per program.  step: weights that a program takes in one loop
    iteration.  trip, fixed: cycles for which a warp occupies its scheduler's busiest pipe, per iteration and outside of the loop.
    chain, chain_loads: the dependence chain of an iteration, for a warp that runs alone: cycles, and memory latencies.  start,
    start_loads: the same outside of the loop.  rows: rows of w per program of a `dequantize` kernel with a loop, when it was
    counted; else 0.  spills: register spill instructions.
    """

    registers: int
    shared: int
    warps: int
    step: int
    trip: float
    fixed: float
    chain: float
    chain_loads: float
    start: float
    start_loads: float
    rows: float = 0.0
    spills: float = 0.0


Key = tuple[str, int, int, int]
Column = tuple[str, Key, Cost]


def seconds(packed: PackedWeight, candidate: Candidate, m: int, dtype: torch.dtype, target: Gpu, counts: Cost | None = None,
            ) -> float:
    """Modelled seconds of x [m, K] @ w.T on a GPU; inf if a program does not fit on an SM.

    dtype: of x and of the result.  The weight may be on any device.  counts: of the candidate's kernel, or of `dequantize` for
    'decode'.  By default they come from the table, which was counted with bfloat16 x.
    """
    n, k = packed.shape
    if not n or not k or not m:
        return 0.0
    if candidate.kind == "decode":
        return _decode_seconds(packed, packed.nbytes, m, dtype.itemsize, target, counts)
    total = launch_terms(packed, candidate, m, dtype, target, counts).seconds
    if "BK" not in candidate.config and packed.tensors.get(packed.layout.factor.removeprefix("/")) is not None:
        total += LAUNCH + LATENCY + 2 * dtype.itemsize * m * k / (target.bandwidth * 1e9 * REACHABLE)   # the scale_columns launch
    if (split := candidate.config.get("SPLIT", 1)) > 1:
        total += merge_seconds(split, _part_bytes(candidate, n), math.prod(candidate.grid[:2]), target)
    return total


def launch_terms(packed: PackedWeight, candidate: Candidate, m: int, dtype: torch.dtype, target: Gpu, counts: Cost | None = None,
                 ) -> LaunchTimes:
    """The parts of the modelled time of a launch.  Takes the arguments of `seconds`; `candidate` must not be 'decode'."""
    (n, k), nbytes = packed.shape, packed.nbytes
    cost = counts or kernel_cost(packed, candidate.kind, candidate.config, target.arch)
    if {"BK", "BM"} <= candidate.config.keys():                  # counts may come from an arch with faster matrix units
        rate = target.matmul * 1e12 / 2 / target.cycles          # multiply-adds of a scheduler's matrix unit in a cycle
        cost = replace(cost, trip=max(cost.trip, candidate.config["BM"] * cost.step / cost.warps / rate))
    kernels, programs = packed.layout.kernels.matrix_unit, math.prod(candidate.grid)
    passes = candidate.grid[1] if len(candidate.grid) > 1 else 1
    split, is_tiled = candidate.config.get("SPLIT", 1), "STAGES" in candidate.config and kernels is not None
    columns = k if split == 1 else cdiv(k // 128, split) * 128
    sums = 0 if split == 1 else programs * _part_bytes(candidate, n)    # bytes of all partial sums: stored, then loaded
    work = RepeatedWork(nbytes, passes, dtype.itemsize * m * columns * (programs // passes) + 2 * sums, is_tiled,
                        128 // min((128, *kernels.sizes(packed.sizes))) - 1
                        if is_tiled and kernels and not candidate.config.get("SCALED") else 0)
    trips = cdiv(_rows_per_program(candidate.config, n, candidate.grid[0]) * columns, cost.step)
    return launch_times(cost, programs, trips, nbytes + dtype.itemsize * m * (n + k), work, target)


def _part_bytes(candidate: Candidate, n: int) -> int:
    """Bytes of the partial sums of one program when programs share K."""
    return 4 * _rows_per_program(candidate.config, n, candidate.grid[0]) * candidate.config["BM"]


def merge_seconds(split: int, part: int, tiles: int, target: Gpu) -> float:
    """Seconds in which one program loads the partial sums of a tile from the L2 cache and adds them.

    part: bytes of the sums of one program.  tiles: of out; their last programs add at the same time.
    """
    return (ARRIVAL + cdiv(tiles, target.multiprocessors) * (split + 1) * part / L2_BYTES) / (target.clock * 1e9)


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Repeated work of the programs of a launch.

    weight: its bytes, read by each of `passes` blocks of rows of x.  Blocks that run later read it again: from the L2 cache if
    half of it holds the weight (both halves hold the same data), else from memory.  loaded: bytes of x and partial sums that all
    programs load from the L2 cache; is_copied: asynchronously, during the MMAs.  waits: MMAs of a warp group that one loop
    iteration waits for, minus one.
    """

    weight: int = 0
    passes: int = 1
    loaded: float = 0
    is_copied: bool = False
    waits: int = 0


class LaunchTimes(NamedTuple):
    """Seconds of the parts of a launch.

    first: until the first loads arrive.  memory, cached, busy: time in which memory, the L2 cache and the busiest pipe of an SM
    work.  chain: time for the dependence chains of all programs of an SM, with as many at once as fit.
    """

    first: float
    memory: float
    cached: float
    busy: float
    chain: float

    @property
    def seconds(self) -> float:
        work = self.cached + self.busy + self.chain - self.first
        return LAUNCH + self.first + max(self.memory, work) + EXPOSED * min(self.memory, work)


def launch_times(cost: Cost, programs: int, trips: int, moved: int, work: RepeatedWork, target: Gpu) -> LaunchTimes:
    """The time of a launch by its parts; chain is inf if a program does not fit on an SM.

    trips: loop iterations per program.  moved: bytes of all tensors, each counted once.  Spills count as loads from the L2 cache:
    all are assumed to be in the loop and to miss the L1 cache.
    """
    loaded = work.loaded + int(128 * cost.warps * cost.spills) * trips * programs
    limits = ARCHS[target.arch]
    resident = limits.resident_programs(min(cost.registers + MORE_REGISTERS, 255), cost.shared, cost.warps) or \
        limits.resident_programs(cost.registers, cost.shared, cost.warps)
    clock, memory = target.clock * 1e9, target.bandwidth * 1e9 * REACHABLE
    cache, per_sm = target.multiprocessors * L2_BYTES * clock, cdiv(programs, target.multiprocessors)
    copying = target.multiprocessors * COPIED_BYTES * clock
    alone = (cost.start + trips * cost.chain) / clock + (cost.start_loads + trips * cost.chain_loads) * LATENCY
    in_turn = cdiv(per_sm, resident) if resident else math.inf
    at_once = max(1, resident * target.multiprocessors * work.passes // programs)
    again = (cdiv(work.passes, at_once) - 1) * work.weight
    moving, cached = moved / memory + again / (cache if work.weight <= target.cache * 5e5 else memory), loaded / cache
    if work.is_copied:
        moving, cached = max(moving, loaded / copying), 0.0
    return LaunchTimes(min(alone, (cost.start + cost.chain) / clock + max(1.0, cost.start_loads) * LATENCY), moving, cached,
                       cdiv(per_sm * cost.warps, SCHEDULERS) * (cost.fixed + trips * cost.trip) / clock,
                       in_turn * (alone + trips * work.waits * WAIT / clock))


def kernel_cost(packed: PackedWeight, kind: str, config: Mapping[str, int], arch: str) -> Cost:
    """Counts of a storage's kernel, a Candidate's kind or 'dequantize', from the table's nearest one; medians if it has none."""
    storage, (_, r, columns, scaled), warps = storage_key(packed), kernel_key(kind, config), _warps(config)
    counted = counted_on(storage, kind, arch)
    every = median_costs(kind, arch) if counted is None else counts(storage)[counted]
    entry = {key: cost for key, cost in every.items() if key[0] == kind}
    nearest = min(entry, key=lambda key: (key[3] != scaled, abs(key[2] - columns), abs(key[1] - r)))
    return _with_warps(entry[nearest], warps)


def has_counts(packed: PackedWeight, candidate: Candidate, arch: str) -> bool:
    """Whether the table has counts of a candidate's kernel, perhaps with other warps, and it spills no registers or is `gemm`."""
    storage, key, warps = storage_key(packed), kernel_key(candidate.kind, candidate.config), _warps(candidate.config)
    counted = counted_on(storage, candidate.kind, arch)
    return counted is not None and key in counts(storage)[counted] and variant_key(counted, key, warps) not in spilling(storage)


def _warps(config: Mapping[str, int]) -> int:
    """Warps per program by the constants of the launch; 0 if the constants do not determine them."""
    return config["WN"] * config["WK"] if "WK" in config else config.get("W", 0)


def kernel_key(kind: str, config: Mapping[str, int]) -> Key:
    """The table's key of a kernel: its kind, tiles of 16 rows of w per warp, rows of x per program, and if it scales weights.

    R is 0 for entropy codes: there it counts streams, which K decides.
    """
    if "BLOCKS" in config:
        return kind, 0, config["BLOCKS"], 0
    return kind, config.get("R", 0), config.get("BM", 0), config.get("SCALED", 0)


def storage_key(packed: PackedWeight) -> str:
    """The table's key of a storage, with the parameters that choose among kernels: 'int_group.planar bits=4'."""
    chosen = "".join(f" {name}={packed.params[name]}" for name in packed.format.by)
    return f"{packed.format.name}.{packed.storage}{chosen}"


@cache
def counts(storage: str) -> dict[str, dict[Key, Cost]]:
    """The shipped counts of a storage's kernels, by architecture and kernel_key."""
    return decode_counts(*_table(), storage)


@cache
def spilling(storage: str) -> frozenset[str]:
    """The variant_key of kernels of a storage that spill registers, though they do not with as many warps as were counted."""
    return frozenset(_table()[1].get(storage, "").partition("\t")[2].split())


def variant_key(arch: str, key: Key, warps: int) -> str:
    """The name in the table of a kernel with other warps: 'sm_90/skinny/2/16/8'."""
    return "/".join([arch, *map(str, key[:3]), str(warps)])


@cache
def median_costs(kind: str, arch: str) -> dict[Key, Cost]:
    """A kind's medians of all storages by kernel_key: of the most similar counted architecture, else of another maker's."""
    order = [*similar_archs(kind, arch), *(name for name in ARCHS if ARCHS[name].is_nvidia == ARCHS[arch].is_nvidia), *ARCHS]
    columns = [column for column in _table()[0] if column[1][0] == kind]
    nearest = min((name for name, _, _ in columns), key=order.index)
    return {key: cost for name, key, cost in reversed(columns) if name == nearest}


@cache
def _table() -> tuple[list[Column], dict[str, str]]:
    return parse_table(TABLE.read_text(encoding="utf-8"))


def parse_table(text: str) -> tuple[list[Column], dict[str, str]]:
    """The columns of a table in the form of TABLE, and for every storage its letters and, after a tab, variants that spill."""
    head, body = (part.splitlines() for part in text.split("\n\n"))
    columns = []
    for line in head:
        arch, kind, *numbers = line.split()
        r, bm, scaled, *values = (int(number) if number.isdigit() else float(number) for number in numbers)
        columns.append((arch, (kind, int(r), int(bm), int(scaled)), Cost(*values)))  # type: ignore[arg-type]
    return columns, dict(line.split("\t", 1) for line in body)


def decode_counts(columns: Sequence[Column], letters: Mapping[str, str], storage: str) -> dict[str, dict[Key, Cost]]:
    """The counts of a storage.  Five letters stand for registers, step, trip, chain and chain_loads, the rest is the column's.

    A kernel without a loop has letters for `fixed` and `start` instead of trip and chain.
    """
    kernels: dict[str, dict[Key, Cost]] = {}
    text = re.sub(f"{MANY}(.)", lambda run: ABSENT * (ord(run[1]) - ord(FIRST)), letters.get(storage, "").partition("\t")[0])
    cells, numbers = iter(text), [0] * 5
    for (arch, key, usual), first in zip(columns, cells, strict=False):
        if first == ABSENT:
            continue
        if first != SAME:
            numbers = [ord(letter) - ord(FIRST) for letter in (first, *itertools.islice(cells, 4))]
        registers, step, loads = min(255, 8 * numbers[0]), round(2 ** (numbers[1] / 4)), numbers[4] / 4
        busy, chain = (math.exp((number - 1) / STEPS) if number else 0.0 for number in numbers[2:4])
        own = replace(usual, trip=busy, chain=chain) if usual.trip else replace(usual, fixed=busy, start=chain)
        kernels.setdefault(arch, {})[key] = replace(own, registers=registers, step=step, chain_loads=loads)
    return kernels


def counted_on(storage: str, kind: str, arch: str) -> str | None:
    """The architecture whose counts are used for `arch`: itself or a similar one; None if only medians apply."""
    own = counts(storage)
    return next((name for name in similar_archs(kind, arch) if any(key[0] == kind for key in own.get(name, ()))), None)


def similar_archs(kind: str, arch: str) -> tuple[str, ...]:
    """Architectures whose counts of a kind are used for `arch`, the best first.

    sm_89 and sm_120 have GeForce matrix units, a quarter as fast as those of sm_80.
    """
    similar = {"sm_80": ("sm_80",), "sm_89": ("sm_89", "sm_120", "sm_80"), "sm_90": ("sm_90", "sm_80"),
               "sm_100": ("sm_100", "sm_90", "sm_80"), "sm_120": ("sm_120", "sm_89", "sm_80"), "sm_75": ("sm_80",),
               "gfx942": ("gfx942",), "gfx950": ("gfx942",)}.get(arch, ())
    return tuple(name for name in similar if matrix_unit(kind, name) == matrix_unit(kind, arch))


def matrix_unit(kind: str, arch: str) -> str:
    """The matrix instruction of a kind's kernels: that of the architecture's large tiles, or mma on all."""
    return ARCHS[arch].unit if kind in UNIT_KINDS else "mma"


def _with_warps(cost: Cost, warps: int) -> Cost:
    """The same counts per warp for programs with another number of warps; unchanged for 0."""
    if not warps or warps == cost.warps:
        return cost
    shared = cost.shared * warps // cost.warps if cost.shared < 16384 else cost.shared
    return replace(cost, shared=shared, warps=warps, step=cost.step * warps // cost.warps)


def _rows_per_program(config: Mapping[str, int], n: int, programs: int) -> int:
    """Rows of w per program, counting padding, which takes the same time.  programs: they share the n rows."""
    if "R" in config and "WN" in config:
        return 16 * config["R"] * config["WN"]
    return 16 * config["R"] * config["W"] if "R" in config and "BM" in config else cdiv(n, programs)


def _decode_seconds(packed: PackedWeight, nbytes: int, m: int, size: int, target: Gpu, counts: Cost | None) -> float:
    """Seconds to dequantize and multiply by the vendor's matmul, tile by tile.  size: bytes of a float."""
    n, k = packed.shape
    cost = counts or kernel_cost(packed, "dequantize", {}, target.arch)
    per_program = (stream_kernels.program_weights(packed) or int(cost.rows * k)) if cost.rows else cost.step
    total = 0.0
    for rows, tiles in Counter(stop - start for start, stop in decoded_tiles(packed, size)).items():
        moved = nbytes * rows // n + size * rows * k
        decoded = launch_times(cost, cdiv(rows * k, per_program), cdiv(per_program, cost.step), moved, RepeatedWork(), target)
        total += tiles * (decoded.seconds + matmul_seconds(m, rows, k, size, target))
    return total


def decoded_tiles(packed: PackedWeight, size: int) -> list[tuple[int, int]]:
    """The row ranges that a product decodes one after the other, of about DECODED bytes at most.  size: bytes of a float.

    An entropy-coded weight is decoded whole, as one tile.
    """
    return [(0, packed.shape[0])] if packed.layout.streams else balanced_tiles(packed, DECODED // size)


def matmul_seconds(m: int, n: int, k: int, size: int, target: Gpu) -> float:
    """Modelled seconds of the vendor's matmul of x [m, k] and w [n, k].  size: bytes of a float."""
    memory = size * (n * k + m * (n + k)) / (target.bandwidth * 1e9 * REACHABLE)
    tiles = cdiv(m * n, MATMUL_TILE)
    padding = cdiv(tiles, target.multiprocessors) * target.multiprocessors / tiles if tiles > target.multiprocessors else 1.0
    arithmetic = 2.0 * m * n * k * padding / (target.matmul * 1e12 * MATMUL)
    return LAUNCH + LATENCY + max(memory, arithmetic) + EXPOSED * min(memory, arithmetic)
