"""Modelled seconds of the ways to multiply by a packed weight on a GPU, for choosing among them; nothing is compiled or timed.

A kernel's counts come from costs.json, which `python -m bench.costs` writes from compiled kernels.  How long a launch takes
follows from them, from its grid and from the GPU's data sheet:

    LAUNCH + first + longer(memory, work) + EXPOSED * shorter(memory, work) + merge, work = x + busy + chain - first

first: until the first loads have arrived.  x: its way from the L2 cache to the SMs; copies that run on their own are compared
with memory.  busy: the busiest pipe.  chain: the dependences of programs that do not run at once.  merge: of those that share K.
LAUNCH, LATENCY, L2_BYTES, COPIED_BYTES, EXPOSED and WAIT were fitted to times on an H100 (docs/predictions.md), others assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from qdsl.runtime.gpu.devices import ARCHS, SCHEDULERS, Gpu
from qdsl.runtime.weight.arrays import cdiv

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight

LAUNCH = 2.5e-6                                                  # seconds from one kernel of a CUDA graph to the next
LATENCY = 300e-9                                                 # seconds from a load to its data
EXPOSED = 0.4                                                    # of the shorter of memory's time and the SMs', not overlapped
WAIT = 150                                                       # cycles from a product of a warp group to one that needs it
MORE_REGISTERS = 8                                               # that another release of Triton, or M = 1, may take: half counts
EXTRAPOLATED = 1.1                                               # times the time of a kernel whose own counts the table lacks
REACHABLE = 0.9                                                  # of the data sheet's bandwidth: a plain copy's share, rounded
L2_BYTES = 28                                                    # from the L2 cache, per clock and SM: loads of x
COPIED_BYTES = 64                                                # copies of x to shared memory: as wide as an SM's way there
ARRIVAL = 3 * 270                                                # cycles: a store, an atomic and a load of the L2 cache, assumed
MATMUL = 0.9                                                     # of the data sheet's matrix rate that a vendor's matmul reaches
MATMUL_TILE = 128 * 128                                          # elements of out that an SM has at a time in it
DECODED = 1 << 25                                                # weights that runtime/torch/linear.py decodes at a time on a GPU
QUANTIZE = 12                                                    # instructions per number of x that `w8a8` quantizes, on sm_90
TRIP, LONG_TRIP = 470, 955                                       # cycles of its trip of 128 columns without that, and with it
RESIDENT, MOST_SPLIT = 3, 8                                      # its programs on an SM at a time, and those that share K
LANES = 128                                                      # instructions of threads that an SM issues in a cycle
TABLE = Path(__file__).with_name("costs.json")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute x @ w.T.

    kind: a kernel of the storage ('matvec', 'gemm', 'gemv', 'skinny', 'tile_gemm'), or 'decode': dequantize and the vendor's
    matmul.  config: the launch's constants by name (R, WN, WK of 'gemv' and 'skinny', BM of 'skinny' where it is 16; R, W, BM,
    UNROLL, SPLIT of 'tile_gemm'; BN, BK of 'matvec', and with BM and SPLIT of 'gemm'; R, W, BLOCKS of an entropy code's
    'skinny').  grid: of the launch.  'decode' needs neither.
    """

    kind: str
    config: Mapping[str, int] = field(default_factory=dict)
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """Counts of a compiled kernel.

    registers: of a thread.  shared: bytes of a program.  warps: of a program.  step: weights of a program in a trip of its loop.
    trip, fixed: cycles for which a warp occupies its scheduler's busiest pipe, in a trip and outside of the loop.
    chain, chain_loads: the dependence chain of a trip, of a warp that runs alone: cycles, and latencies of memory.
    start, start_loads: the same outside of the loop.  rows: of w, or the part of one, that a program of `dequantize` takes which
    has a loop; 0 of the others, whose grid is that of the launch, or whose program takes a step.  spills: instructions that move
    registers to or from local memory.
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


# Where the table has no entry: rounded from the median of its entries of that kind.
USUAL = {
    "matvec": Cost(80, 512, 4, 2048, 240.0, 200.0, 600.0, 1.0, 400.0, 1.0),
    "dequantize": Cost(64, 0, 4, 8192, 0.0, 640.0, 0.0, 0.0, 600.0, 1.0),
    "gemm": Cost(152, 12288, 4, 8192, 700.0, 400.0, 1500.0, 1.5, 600.0, 0.5),
    "gemv": Cost(96, 512, 4, 32768, 400.0, 300.0, 500.0, 1.0, 500.0, 1.0),
    "skinny": Cost(128, 512, 4, 32768, 600.0, 400.0, 700.0, 1.0, 500.0, 1.0),
    "tile_gemm": Cost(128, 65536, 4, 16384, 400.0, 600.0, 900.0, 0.5, 800.0, 1.0),
}

# The same on AMD's GPUs, whose vector units take 4 cycles for an instruction: of CDNA, from kernels that were counted by hand.
USUAL_AMD = {
    **USUAL,
    "matvec": Cost(40, 512, 4, 2048, 400.0, 400.0, 600.0, 2.0, 800.0, 2.0),
    "dequantize": Cost(64, 0, 4, 8192, 0.0, 1600.0, 0.0, 0.0, 1600.0, 2.0),
    "gemm": Cost(112, 8192, 4, 8192, 1600.0, 800.0, 3000.0, 2.0, 1500.0, 4.0),
}


def seconds(packed: PackedWeight, candidate: Candidate, m: int, dtype: torch.dtype, target: Gpu, counts: Cost | None = None,
            ) -> float:
    """Modelled seconds of x [m, K] @ w.T on a GPU; inf where a program does not fit on its SMs.

    dtype: of x and of the result.  The weight may be on any device.  counts: of the candidate's kernel, of 'decode' those of
    `dequantize`; by default the table's, which are of bfloat16 x whatever dtype is.
    """
    n, k = packed.shape
    if not n or not k or not m:
        return 0.0
    if candidate.kind == "decode":
        return _decode_seconds(packed, packed.nbytes, m, dtype.itemsize, target, counts)
    taken = launch_terms(packed, candidate, m, dtype, target, counts).seconds
    if candidate.kind not in ("matvec", "gemm") and packed.tensors.get(packed.layout.factor.removeprefix("/")) is not None:
        taken += LAUNCH + LATENCY + 2 * dtype.itemsize * m * k / (target.bandwidth * 1e9 * REACHABLE)   # of scale_columns
    if (split := candidate.config.get("SPLIT", 1)) > 1:
        taken += merge_seconds(split, _part_bytes(candidate, n), math.prod(candidate.grid[:2]), target)
    return taken


def launch_terms(packed: PackedWeight, candidate: Candidate, m: int, dtype: torch.dtype, target: Gpu, counts: Cost | None = None,
                 ) -> Terms:
    """What the time of a kernel's launch consists of; arguments as `seconds` has them, and a candidate that is no 'decode'."""
    (n, k), nbytes = packed.shape, packed.nbytes
    cost = counts or kernel_cost(packed, candidate.kind, candidate.config, target.arch)
    if candidate.kind == "gemm":                                 # counts may be another GPU's, whose matrix units are faster
        rate = target.matmul * 1e12 / 2 / target.cycles          # multiply-adds of a scheduler's matrix unit in a cycle
        cost = replace(cost, trip=max(cost.trip, candidate.config["BM"] * cost.step / cost.warps / rate))
    kernels, programs = packed.layout.kernels.matrix_unit, math.prod(candidate.grid)
    passes = candidate.grid[1] if len(candidate.grid) > 1 else 1
    split, is_tiled = candidate.config.get("SPLIT", 1), candidate.kind == "tile_gemm" and kernels is not None
    columns = k if split == 1 else cdiv(k // 128, split) * 128
    sums = 0 if split == 1 else programs * _part_bytes(candidate, n)    # bytes of all parts: stored, and loaded again
    work = Work(nbytes, passes, dtype.itemsize * m * columns * (programs // passes) + 2 * sums, is_tiled,
                128 // min((128, *kernels.sizes(packed.sizes))) - 1 if is_tiled and kernels else 0)
    trips = cdiv(_rows(candidate.config, n, candidate.grid[0]) * columns, cost.step)
    return terms(cost, programs, trips, nbytes + dtype.itemsize * m * (n + k), work, target)


def _part_bytes(candidate: Candidate, n: int) -> int:
    """Bytes of the sums of a program that shares K with others."""
    return 4 * _rows(candidate.config, n, candidate.grid[0]) * candidate.config["BM"]


def shared_k(tiles: int, rows: int, columns: int, k: int, nbytes: int, quantizes: bool, target: Gpu) -> tuple[int, bool]:
    """How many programs of `w8a8` share K, and whether they quantize x themselves, by the least modelled time.

    tiles: of out, [rows of w, columns].  nbytes: of the weight, [N, k] codes of 8 bits.  quantizes: they can; else a launch
    before does it.  A program has 4 chunks of 128 columns or more; one that quantizes its x waits longer in each of them.
    """
    def taken(way: tuple[int, bool]) -> float:
        split, itself = way
        turns, chunks = cdiv(tiles * split, target.multiprocessors), cdiv(k // 128, split)
        streamed = turns * chunks * 128 * (rows + columns) / L2_BYTES
        issued = turns * chunks * 128 * (2 * rows + QUANTIZE * columns * itself) / LANES
        waited = cdiv(turns, RESIDENT) * chunks * (LONG_TRIP if itself else TRIP)
        merged = merge_seconds(split, 4 * rows * columns, tiles, target) if split > 1 else 0.0
        busy = max(streamed, issued, waited) / (target.clock * 1e9)
        return max(nbytes / (REACHABLE * target.bandwidth * 1e9), busy) + merged + (0.0 if itself else LAUNCH + LATENCY)

    most = min(MOST_SPLIT, max(1, k // 512)) if tiles < target.multiprocessors and target.is_nvidia else 1
    return min(((split, itself) for split in range(1, most + 1) for itself in (False, True)[:1 + quantizes]), key=taken)


def merge_seconds(split: int, part: int, tiles: int, target: Gpu) -> float:
    """From the last sums of a tile to their total: the parts are stored, counted, and loaded by one program, from the L2 cache.

    part: bytes of the sums of a program.  tiles: of out, whose last programs work at once.
    """
    return (ARRIVAL + cdiv(tiles, target.multiprocessors) * (split + 1) * part / L2_BYTES) / (target.clock * 1e9)


@dataclass(frozen=True, slots=True)
class Work:
    """What programs of a launch do several times.

    weight: bytes that each of `passes` blocks of rows of x reads: blocks that the GPU does not hold at once, each from memory, if
    half of the L2 cache, whose halves hold the same, is smaller.  loaded: bytes of x and of sums that all programs load from
    the L2 cache; is_copied: while they multiply.  waits: products of a warp group that a trip waits for, but one.
    """

    weight: int = 0
    passes: int = 1
    loaded: float = 0
    is_copied: bool = False
    waits: int = 0


class Terms(NamedTuple):
    """Seconds that a launch consists of.

    first: until the first loads have arrived.  memory, cached, busy: for which memory, the L2 cache and the busiest pipe of an
    SM work.  chain: in which the programs of an SM, as many at once as it holds, follow their dependences.
    """

    first: float
    memory: float
    cached: float
    busy: float
    chain: float

    @property
    def seconds(self) -> float:
        """The predicted time."""
        work = self.cached + self.busy + self.chain - self.first
        return LAUNCH + self.first + max(self.memory, work) + EXPOSED * min(self.memory, work)


def terms(cost: Cost, programs: int, trips: int, moved: int, work: Work, target: Gpu) -> Terms:
    """What the time of a launch consists of; a chain of inf where a program does not fit on the GPU's SMs.

    trips: of a program's loop.  moved: bytes of all tensors, each once.  Spills are added to what is loaded, as
    if all were in the loop and the L1 cache held none.
    """
    loaded = work.loaded + int(128 * cost.warps * cost.spills) * trips * programs
    resident, fewer = (ARCHS[target.arch].resident(registers, cost.shared, cost.warps)
                       for registers in (cost.registers, min(cost.registers + MORE_REGISTERS, 255)))
    clock, memory = target.clock * 1e9, target.bandwidth * 1e9 * REACHABLE
    cache, turns = target.multiprocessors * L2_BYTES * clock, cdiv(programs, target.multiprocessors)
    copying = target.multiprocessors * COPIED_BYTES * clock
    alone = (cost.start + trips * cost.chain) / clock + (cost.start_loads + trips * cost.chain_loads) * LATENCY
    in_turn = (cdiv(turns, resident) + cdiv(turns, fewer or resident)) / 2 if resident else math.inf
    at_once = max(1, resident * target.multiprocessors * work.passes // programs)
    again = (cdiv(work.passes, at_once) - 1) * work.weight
    moving, cached = moved / memory + again / (cache if work.weight <= target.cache * 5e5 else memory), loaded / cache
    if work.is_copied:
        moving, cached = max(moving, loaded / copying), 0.0
    return Terms(min(alone, (cost.start + cost.chain) / clock + max(1.0, cost.start_loads) * LATENCY), moving, cached,
                 cdiv(turns * cost.warps, SCHEDULERS) * (cost.fixed + trips * cost.trip) / clock,
                 in_turn * (alone + trips * work.waits * WAIT / clock))


def kernel_cost(packed: PackedWeight, kind: str, config: Mapping[str, int], arch: str) -> Cost:
    """Counts of a storage's kernel in a configuration, scaled to it from the table's nearest; USUAL where it has none.

    kind: a Candidate's, or 'dequantize'.
    """
    cost = _cost(storage_key(packed), kind, *configuration(config), _warps(config), arch)
    waits_twice = config.get("STAGES") == 2 and config["BM"] < 128    # the table counts three: copies one trip earlier
    return replace(cost, chain_loads=2 * cost.chain_loads) if waits_twice else cost


def _warps(config: Mapping[str, int]) -> int:
    """Warps of a launch by its constants; 0 where these do not say."""
    return config["WN"] * config["WK"] if "WK" in config else config.get("W", 0)


def configuration(config: Mapping[str, int]) -> tuple[int, int]:
    """What config_key takes of a launch's constants.  R of an entropy code's kernel is a number of streams, which K decides."""
    return (0, config["BLOCKS"]) if "BLOCKS" in config else (config.get("R", 0), config.get("BM", 0))


def storage_key(packed: PackedWeight) -> str:
    """What the table calls a storage: 'int_group.planar bits=4', with the parameters that choose among kernels."""
    chosen = "".join(f" {name}={packed.params[name]}" for name in packed.format.by)
    return f"{packed.format.name}.{packed.storage}{chosen}"


def config_key(kind: str, r: int = 0, columns: int = 0) -> str:
    """What the table calls a kernel in a configuration: 'tile_gemm R=2 64'.

    r: tiles of 16 rows of w per warp.  columns: rows of x per program, where the kernel has a choice.
    """
    return " ".join([kind, *([f"R={r}"] if r else ()), *([str(columns)] if columns else ())])


@cache
def table() -> dict[str, dict[str, dict[str, list[float]]]]:
    """The shipped counts: by architecture, storage_key and config_key the fields of a Cost in order; empty without a file."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["kernels"] if TABLE.is_file() else {}


@lru_cache(maxsize=4096)
def _cost(storage: str, kind: str, r: int, columns: int, warps: int, arch: str) -> Cost:
    """The table's entry, with as many warps as the configuration has; that of the nearest number of rows of x."""
    counted = counted_on(storage, kind, arch)
    if counted is None:
        return _with_warps((USUAL if ARCHS[arch].is_nvidia else USUAL_AMD)[kind], warps)
    kernels = {key: row for key, row in table()[counted][storage].items() if key.split()[0] == kind}
    exact = kernels.get(config_key(kind, r, columns)) or kernels[min(kernels, key=lambda key: _distance(key, r, columns))]
    return _with_warps(_read(exact), warps)


def counted_on(storage: str, kind: str, arch: str) -> str | None:
    """The architecture whose counts of a kernel serve `arch`: itself, or one that stands in; None where USUAL does."""
    return next((name for name in similar_archs(arch)
                 if any(key.split()[0] == kind for key in table().get(name, {}).get(storage, ()))), None)


def own_cost(packed: PackedWeight, candidate: Candidate, arch: str) -> Cost | None:
    """The table's counts of a candidate's own configuration, other numbers of warps aside; None where it has none."""
    storage = storage_key(packed)
    counted = counted_on(storage, candidate.kind, arch)
    row = table()[counted][storage].get(config_key(candidate.kind, *configuration(candidate.config))) if counted else None
    return None if row is None else _read(row)


def doubt(packed: PackedWeight, candidate: Candidate, arch: str) -> float:
    """EXTRAPOLATED where the table counts a candidate's kernel in other configurations, or numbers of warps, alone; else 1."""
    own, warps = own_cost(packed, candidate, arch), _warps(candidate.config)
    is_own = own is not None and own.warps == (warps or own.warps)
    return 1.0 if is_own or counted_on(storage_key(packed), candidate.kind, arch) is None else EXTRAPOLATED


def similar_archs(arch: str) -> tuple[str, ...]:
    """Architectures whose counts serve another one, the best first.

    sm_89 and sm_120 have GeForce's matrix units, a quarter as fast as those of sm_80.
    """
    return {"sm_80": ("sm_80",), "sm_89": ("sm_89", "sm_120", "sm_80"), "sm_90": ("sm_90", "sm_80"),
            "sm_100": ("sm_100", "sm_90", "sm_80"), "sm_120": ("sm_120", "sm_80"), "sm_75": ("sm_80",),
            "gfx942": ("gfx942",), "gfx950": ("gfx942",)}.get(arch, ())


def _distance(key: str, r: int, columns: int) -> tuple[int, int]:
    """How far a table's configuration is from a wanted one: in rows of x, then in rows of w."""
    parts = key.split()[1:]
    has_r = next((int(part[2:]) for part in parts if part.startswith("R=")), 0)
    return abs(next((int(part) for part in parts if part.isdigit()), 0) - columns), abs(has_r - r)


def _read(row: list[float]) -> Cost:
    registers, shared, warps, step, *cycles = row
    return Cost(int(registers), int(shared), int(warps), int(step), *cycles)


def _with_warps(cost: Cost, warps: int) -> Cost:
    """The same per warp, in programs of another number of warps; 0 leaves it."""
    if not warps or warps == cost.warps:
        return cost
    shared = cost.shared * warps // cost.warps if cost.shared < 16384 else cost.shared
    return replace(cost, shared=shared, warps=warps, step=cost.step * warps // cost.warps)


def _rows(config: Mapping[str, int], n: int, programs: int) -> int:
    """Rows of w of a program, padding among them: it takes as long as whole ones.  programs: that share the rows of w."""
    if "R" in config and "WN" in config:
        return 16 * config["R"] * config["WN"]
    return 16 * config["R"] * config["W"] if "R" in config and "BM" in config else cdiv(n, programs)


def _decode_seconds(packed: PackedWeight, nbytes: int, m: int, size: int, target: Gpu, counts: Cost | None) -> float:
    """dequantize, then the vendor's matmul, as often as the weight has tiles of DECODED weights; size: bytes of a float.

    A weight in an entropy code is one tile.
    """
    n, k = packed.shape
    tiles = 1 if packed.layout.streams else min(n, cdiv(n * k, DECODED))
    rows = cdiv(n, tiles)
    cost = counts or kernel_cost(packed, "dequantize", {}, target.arch)
    per_program = int(cost.rows * k) or cost.step
    moved = nbytes // tiles + size * rows * k
    decoded = terms(cost, cdiv(rows * k, per_program), cdiv(per_program, cost.step), moved, Work(), target)
    return tiles * (decoded.seconds + matmul_seconds(m, rows, k, size, target))


def matmul_seconds(m: int, n: int, k: int, size: int, target: Gpu) -> float:
    """Modelled seconds of the vendor's matmul, x [m, k] by w [n, k] in floats of so many bytes."""
    memory = size * (n * k + m * (n + k)) / (target.bandwidth * 1e9 * REACHABLE)
    tiles = cdiv(m * n, MATMUL_TILE)
    padding = cdiv(tiles, target.multiprocessors) * target.multiprocessors / tiles if tiles > target.multiprocessors else 1.0
    arithmetic = 2.0 * m * n * k * padding / (target.matmul * 1e12 * MATMUL)
    return LAUNCH + LATENCY + max(memory, arithmetic) + EXPOSED * min(memory, arithmetic)
