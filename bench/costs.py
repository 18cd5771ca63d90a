"""`python -m bench.costs`: compile the kernels of all formats and count their instructions, for bench/results/costs.json.

Runs nothing, and needs no GPU.  Takes a night of one core, or minutes after `python -m bench.dispatch`, which keeps the counts of
the same kernels.  Existing entries of the file are kept unless --anew.

Variants are kernels with other warps than usual, with partial tiles, or with other rows of `matvec`.  The package has the counts
of usual kernels, rounded to letters: qdsl/runtime/gpu/costs.txt, which is written each time.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from bench.compiled_costs import CompiledCosts
from qdsl.analyze import AnalyzeError
from qdsl.analyze.gpus import ARCHS as EVERY_ARCH
from qdsl.analyze.gpus import GPUS, arch_of
from qdsl.core import places
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, launch, plan, tiles
from qdsl.runtime.gpu.costs import Candidate, Cost
from qdsl.runtime.gpu.families import ANY_GPU, lanes
from qdsl.runtime.gpu.families.units import SMALL, gemm_config
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import triton
from qdsl.runtime.weight import stream_kernels

SHAPE = (4096, 8192)                                             # several iterations of every loop
# Other shapes, for variants: tiles of `matvec` have other rows, and tiles are partial for some storages with 7 * 2048 columns.
OTHERS = ((1024, 4096), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (152064, 4096))
ARCHS = ("sm_90", "sm_80", "sm_100", "sm_120", "sm_89", "gfx942")
ORDER = ("sm_100", "sm_90", "sm_80", "sm_89", "sm_120", "gfx942")  # similar ones side by side
COUNTED = Path(__file__).with_name("results") / "costs.json"
LANES = ("gemv", "skinny", "tile_gemm")                          # kinds of which plans take no kernel that spills
KINDS = ("dequantize", "matvec", "gemm", *LANES)
WARPS = 4                                                        # of the kernels whose keys name no warps
LETTERS = 91                                                     # from costs.FIRST on
Counts = dict[str, dict[str, dict[str, list[float]]]]             # rows by architecture, storage and key
META, X = torch.device("meta"), torch.bfloat16


def weights(only: str = "") -> Iterator[PackedWeight]:
    """A weight of every storage of every shipped format, with defaults for parameters that do not change kernels.

    only: prefix of the format's name.
    """
    for path in sorted(places.specs().glob(f"{only}*.yaml")):
        form = importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT
        for key, variant in form.variants.items():
            for storage, layout in variant.storages.items():
                shape = layout.fixed.get("N", SHAPE[0]), layout.fixed.get("K", SHAPE[1])
                params = form.complete(dict(zip(form.by, key, strict=True)))
                try:
                    yield stream_kernels.with_typical_streams(form.empty(shape, storage, **params))
                except FormatError as error:
                    print(f"{form.name}.{storage}: {error}", file=sys.stderr)


def calls(packed: PackedWeight, arch: str) -> Iterator[tuple[str, Call]]:
    """The launches to count for the table, by key: those with the usual constants first."""
    n, k = packed.shape
    decode = list(launch.dequantize_calls(packed, torch.empty(n, k, dtype=X, device="meta")))
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
    with configure.assumed(arch_of(arch).capability // 10, gpu.multiprocessors, gpu):
        yield from _plain_calls(packed)
        if len(decode) == 1:
            yield "dequantize", decode[0]
        for rows in (1, 8, 16):
            if configure.has_skinny_streams(_x(rows, k), packed):
                for call in stream_kernels.skinny_calls(_x(rows, k), packed, None, _x(rows, n)):
                    yield key_text(*costs.kernel_key("skinny", call.constants)), call
        yield from _matrix_calls(packed)
        for shape in OTHERS:
            weight = with_shape(packed, shape)
            yield from _plain_calls(weight, usual=False)
            yield from (pair for pair in _matrix_calls(weight) if "E=0" in pair[0])


def with_shape(packed: PackedWeight, shape: tuple[int, int]) -> PackedWeight:
    """A weight of the same storage and parameters in another shape, or itself if it has none of that shape."""
    try:
        return packed.format.empty(shape, packed.storage, **dict[str, Any](packed.params))
    except FormatError:
        return packed


def _plain_calls(packed: PackedWeight, usual: bool = True) -> Iterator[tuple[str, Call]]:
    """The launches of `matvec`, and of `gemm` if no kernel for matrix units applies: in each default tile, then the small one.

    usual: they are the usual kernels, else variants alone.
    """
    if packed.layout.streams:
        return
    ways = [(1, plan.any_product(packed, 1))]
    if {option.kind for option in plan.candidates(packed, 16, X, META)} <= {"gemm", "decode"} and configure.has_gemm(X, META):
        for rows, tile in (16, 0), (64, 0), (SMALL, SMALL):
            if (config := gemm_config(packed, rows, 1, META, tile)) is not None:
                ways.append((rows, ANY_GPU.candidate(packed, rows, config)))
    for rows, way in ways:
        launched = list(launch.linear_calls(_x(rows, packed.shape[1]), packed, None, _x(rows, packed.shape[0]), candidate=way))
        if len(launched) == 1 and (usual or variant(way.config)):
            yield usual_key(way) if usual else key_of(way), launched[0]


def usual_key(candidate: Candidate) -> str:
    """The key in the file of the usual kernel for a candidate."""
    kind, r, columns, _ = costs.kernel_key(candidate.kind, candidate.config)
    return key_text(kind, r, columns)


def key_of(candidate: Candidate) -> str:
    """The key in the file of a candidate's kernel."""
    return key_text(*costs.kernel_key(candidate.kind, candidate.config)[:3]) + variant(candidate.config)


def key_text(kind: str, r: int = 0, columns: int = 0, scaled: int = 0) -> str:
    """The key in the file of a usual kernel: 'tile_gemm R=2 64', 'skinny R=1'.  Takes the parts of costs.kernel_key."""
    return " ".join([kind, *([f"R={r}"] if r else ()), *([str(columns)] if columns else ()), *(["S=1"] if scaled else ())])


def variant(config: Mapping[str, int]) -> str:
    """The end of the key for constants other than the usual ones: ' W=8', ' E=0', ' B=4', ' S=1' or ''.

    W: warps.  E=0: partial tiles.  B: BN of `matvec`, whose usual one the shape decides.  S=1: scaled weights.
    """
    if "BLOCKS" in config:
        return ""
    rows, warps = config["BN"] if "BK" in config and "BM" not in config else 0, config.get("WN", 1) * config.get("WK", 0)
    parts = ("W", warps or config.get("W", WARPS), WARPS), ("E", int(config.get("EVEN", 1)), 1), ("B", rows, 0), (
        "S", config.get("SCALED", 0), 0)
    return "".join(f" {name}={value}" for name, value, usual in parts if value != usual)


def is_wanted(key: str, entry: Mapping[str, Sequence[float]]) -> bool:
    """Whether to count a kernel, given the counts of the storage's others: the small tile of `gemm` only if those spill."""
    return not key.startswith(key_text("gemm", 0, SMALL)) or any(
        len(row) > 11 and row[11] for other, row in entry.items() if other.startswith("gemm") and other != key)


def _matrix_calls(packed: PackedWeight) -> Iterator[tuple[str, Call]]:
    """The launches of kernels for matrix units, in each configuration of `configs`."""
    n, k = packed.shape
    for kind in ("gemv", "skinny", "tile_gemm"):
        for config in configs(packed, kind) if kind in plan.kinds(packed, 1 if kind == "gemv" else 16, X, META) else ():
            rows, candidate = 1 if kind == "gemv" else config.get("BM", 8), Candidate(kind, config)
            for call in launch.linear_calls(_x(rows, k), packed, None, _x(rows, n), candidate=candidate):
                if call.kernel is not scale_columns:             # scale_columns reads no weight
                    yield key_of(candidate), call


def configs(packed: PackedWeight, kind: str) -> Iterator[dict[str, int]]:
    """Launch configurations of a matrix-unit kernel to count: the usual ones, then their variants."""
    if kind != "tile_gemm":
        k, trip = packed.shape[1], lanes.Gemv().trip(packed) if kind == "gemv" else tiles.TRIP
        for warps, r in itertools.product((4, 1, 8) if kind == "gemv" else (4, 1, 2, 8), (1, 2)):
            if trip * warps <= k:
                tile = tiles.lane_tile(r, warps, k, trip)
                yield from (tile, {**tile, "BM": 16}) if kind == "skinny" else (tile,)
        return
    tallest = lanes.most_columns(packed) if configure.target(META).capability == 9 else 64
    for bm, r in itertools.product(sorted({16, 32, 64, tallest}), (1, 2)):
        yield {"R": r, "W": 4, "BM": bm, "STAGES": 3 if bm < 128 else 2, "UNROLL": 1, "WHOLE": 0, "SPLIT": 1}
    yield from ({**config, "SPLIT": 1} for config in lanes.scaled_tile_configs(packed, configure.MULTIPROCESSORS, META))


def _x(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=X, device="meta")


def row(call: Call, arch: str, compiled: CompiledCosts) -> list[float]:
    """The fields of a Cost, rounded; rows only for a `dequantize` kernel with a loop, and spills only if there are any.

    Raises AnalyzeError if the kernel does not compile.
    """
    cost, spills, refused = compiled.of_call(call, arch)
    if cost is None:
        raise AnalyzeError(refused)
    values = [*astuple(cost)[:4], *(round(value) for value in (cost.trip, cost.fixed, cost.chain)), round(cost.chain_loads, 2),
              round(cost.start), round(cost.start_loads, 2)]
    rows = call.weights / SHAPE[1] if cost.trip and "x" not in call.kernel.arg_names else 0
    return [*values, rows, spills] if spills else [*values, rows] if rows else values


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="formats whose name begins so")
    parser.add_argument("--arch", action="append", choices=list(EVERY_ARCH), help=f"by default {' and '.join(ARCHS)}")
    parser.add_argument("--anew", action="store_true", help="count kernels again that the file has")
    parser.add_argument("--kind", action="append", choices=KINDS, help="kernels of this kind alone, may be repeated")
    parser.add_argument("--file", type=Path, default=COUNTED)
    options = parser.parse_args()
    kernels = json.loads(options.file.read_text())["kernels"] if options.file.is_file() else {}
    compiled = CompiledCosts()
    for arch in options.arch or ARCHS:
        for packed in weights(options.only):
            storage = costs.storage_key(packed)
            entry = kernels.get(arch, {}).get(storage, {})
            if options.anew:
                entry = {key: row for key, row in entry.items() if key.split()[0] not in (options.kind or KINDS)}
            for key, call in calls(packed, arch):
                if key not in entry and key.split()[0] in (options.kind or KINDS) and is_wanted(key, entry):
                    try:
                        entry[key] = row(call, arch, compiled)
                    except AnalyzeError as error:
                        print(f"{storage} {key}: {error}", file=sys.stderr)
            if entry:
                kernels.setdefault(arch, {})[storage] = entry
                options.file.write_text(text(kernels))
                print(f"{arch} {storage}: {len(entry)} kernels", file=sys.stderr)
    if options.file == COUNTED:
        costs.TABLE.write_text(compact(kernels), encoding="utf-8")


def text(kernels: Counts) -> str:
    """The text of the file, with one storage per line so that diffs are readable."""
    archs = []
    for arch in sorted(kernels):
        lines = [f"    {json.dumps(storage)}: {json.dumps(_short(kernels[arch][storage]), separators=(',', ':'))}"
                 for storage in sorted(kernels[arch])]
        archs.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(archs) + "\n}}\n"


@cache
def counted() -> Counts:
    """All counts of the file, by architecture, storage and key."""
    kernels: Counts = json.loads(COUNTED.read_text(encoding="utf-8"))["kernels"]
    return kernels


def usual(kernels: Counts, storage: str) -> tuple[dict[str, dict[costs.Key, Cost]], set[str]]:
    """The counts of a storage's usual kernels as the package has them, but not rounded; and the variants of them that spill.

    Kernels for matrix units that spill are left out.  Other kernels' spills are cycles of their trips: each moves 128 bytes per
    warp through the L2 cache.  sm_89 stands in for sm_120, but for `tile_gemm`, which is not counted there, and `gemm`, whose
    spills differ.
    """
    compiled = [("sm_89" if arch == "sm_120" and "gemm" not in key[0] else arch, arch, key, is_usual, cost)
             for arch in ORDER for key, is_usual, cost in _read(kernels.get(arch, {}).get(storage, {}))]
    spilling = {(place, key) for place, _, key, is_usual, cost in compiled if is_usual and cost.spills and key[0] in LANES}
    entries: dict[str, dict[costs.Key, Cost]] = {}
    for place, arch, key, is_usual, cost in compiled:
        if is_usual and place == arch and (arch, key) not in spilling:
            cycles = cost.spills * 128 * cost.warps / WARPS / costs.L2_BYTES
            entries.setdefault(arch, {})[key] = replace(cost, trip=cost.trip + cycles, spills=0)
    return entries, {costs.variant_key(place, key, cost.warps) for place, _, key, is_usual, cost in compiled
                     if cost.spills and not is_usual and key[0] in LANES and key in entries.get(place, ())}


def _read(entry: Mapping[str, Sequence[float]]) -> Iterator[tuple[costs.Key, bool, Cost]]:
    """Kernels of a storage in the file: the key of costs.kernel_key, whether it is the usual one of that key, and its counts."""
    for text, values in entry.items():
        cost = Cost(*map(int, values[:4]), *values[4:])
        kind, *parts = text.split()
        own = dict(part.split("=") for part in parts if "=" in part)
        key = kind, int(own.pop("R", 0)), next((int(part) for part in parts if part.isdigit()), 0), int(own.pop("S", 0))
        yield key, not own, cost


@cache
def exact(storage: str) -> dict[str, dict[costs.Key, Cost]]:
    """costs.counts of the file's counts, which are not rounded."""
    return usual(counted(), storage)[0]


def compact(kernels: Counts) -> str:
    """The text of costs.TABLE: the columns with medians over all storages, then a line per storage.

    A line has the storage's letters, and the variants of its kernels that spill.
    """
    storages = {storage: usual(kernels, storage) for storage in sorted({*itertools.chain(*kernels.values())})}
    # A column's kernels have one number of warps, and all a loop or none.
    columns: dict[tuple[costs.Key, str, int, bool], list[Cost]] = defaultdict(list)
    for entries, _ in storages.values():
        for arch, entry in entries.items():
            for key, cost in entry.items():
                columns[key, arch, cost.warps, cost.trip > 0].append(cost)
    lines, body = [], []
    order = sorted(columns, key=lambda column: (KINDS.index(column[0][0]), column[0], column[2:], ORDER.index(column[1])))
    for column in order:
        medians = (median_low(values) for values in zip(*map(astuple, columns[column]), strict=True))
        lines.append(" ".join([column[1], *map(str, column[0]), *(f"{value:g}" for value in [*medians][:-1])]))
    for storage, (entries, spilling) in storages.items():
        text, before = "", ""
        for key, arch, warps, has_loop in order:
            own = entries.get(arch, {}).get(key)
            if own is None or (own.warps, own.trip > 0) != (warps, has_loop):
                text += costs.ABSENT
                continue
            letters = _letters(own)
            text += costs.SAME if letters == before else letters
            before = letters
        text = re.sub(f"{costs.ABSENT}{{3,{LETTERS - 1}}}", lambda run: costs.MANY + chr(ord(costs.FIRST) + len(run[0])),
                      text.rstrip(costs.ABSENT))
        body.append("\t".join([storage, text, *([" ".join(sorted(spilling))] if spilling else ())]))
    return "\n".join([*lines, "", *body]) + "\n"


def _letters(cost: Cost) -> str:
    """Counts in five letters, as costs.decode_counts reads them."""
    busy, chain = (cost.trip, cost.chain) if cost.trip else (cost.fixed, cost.start)
    numbers = [math.ceil(cost.registers / 8), 4 * math.log2(cost.step), *(
        1 + costs.STEPS * math.log(cycles) if cycles else 0 for cycles in (busy, chain)), 4 * cost.chain_loads]
    return "".join(chr(ord(costs.FIRST) + min(LETTERS - 1, max(0, round(number)))) for number in numbers)


def _short(entry: dict[str, list[float]]) -> dict[str, list[float]]:
    return {key: [int(value) if value == int(value) else value for value in entry[key]] for key in sorted(entry)}


if __name__ == "__main__":
    main()
