"""`python -m bench.costs`: compile the kernels of all formats and count their instructions, for qdsl/runtime/gpu/costs.json.

Runs nothing, and needs no GPU.  Takes three hours on one core; existing entries of the file are kept unless --anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch

from qdsl.analyze import AnalyzeError, report
from qdsl.analyze.gpus import ARCHS as EVERY_ARCH
from qdsl.analyze.gpus import GPUS, arch_of
from qdsl.analyze.predict import cost as cost_of
from qdsl.core import places
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, launch, plan
from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.gpu.triton import triton
from qdsl.runtime.weight import streams

SHAPE = (4096, 8192)                                             # several iterations of every loop
ARCHS = ("sm_90", "sm_80", "sm_100", "sm_120", "sm_89", "gfx942")
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
                    yield streams.usual(form.empty(shape, storage, **params))
                except FormatError as error:
                    print(f"{form.name}.{storage}: {error}", file=sys.stderr)


def calls(packed: PackedWeight, arch: str) -> Iterator[tuple[str, Call]]:
    """The launches to count for the table, by costs.config_key."""
    n, k = packed.shape
    wide = torch.empty(1, k, dtype=torch.float32, device="meta")
    out = wide.new_empty(1, n)
    plain = list(launch.linear_calls(wide, packed, None, out))
    decode = list(launch.dequantize_calls(packed, torch.empty(n, k, dtype=X, device="meta")))
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
    with configure.assumed(arch_of(arch).capability // 10, gpu.multiprocessors, gpu):
        if len(plain) == 1:                                      # the kernel for any x; other dtypes use it too
            yield costs.config_key("matvec"), _narrowed(plain[0], (wide, out))
        if len(decode) == 1:
            yield costs.config_key("dequantize"), decode[0]
        for rows in (1, 8, 16):
            if configure.has_skinny_streams(_x(rows, k), packed):
                for call in streams.skinny_calls(_x(rows, k), packed, None, _x(rows, n)):
                    yield costs.config_key("skinny", *costs.configuration(call.constants)), call
        if packed.layout.kernels.matrix_unit is not None and not packed.layout.streams:
            yield from _matrix_calls(packed)
        if {option.kind for option in plan.candidates(packed, 16, X, META)} <= {"gemm", "decode"} and not packed.layout.streams:
            yield from _gemm_calls(packed)


def _gemm_calls(packed: PackedWeight) -> Iterator[tuple[str, Call]]:
    """The launches of `gemm`: in each default tile, then in the small one."""
    for rows, tile in ((16, 0), (64, 0), (configure.SMALL, configure.SMALL)) if configure.has_gemm(X, META) else ():
        if (config := configure.gemm(packed, rows, 1, META, tile)) is not None:
            x, out = _x(rows, packed.shape[1]), _x(rows, packed.shape[0])
            [call] = launch.linear_calls(x, packed, None, out, candidate=plan.gemm(packed, rows, config))
            yield costs.config_key("gemm", *costs.configuration(config)), call


def is_wanted(key: str, entry: Mapping[str, Sequence[float]]) -> bool:
    """Whether to count a kernel, given the counts of the storage's others: the small tile of `gemm` only if those spill."""
    return key != costs.config_key("gemm", columns=configure.SMALL) or any(
        len(row) > 11 and row[11] for other, row in entry.items() if other.startswith("gemm") and other != key)


def _matrix_calls(packed: PackedWeight) -> Iterator[tuple[str, Call]]:
    """The launches of kernels for matrix units, in each configuration of `configs`."""
    n, k = packed.shape
    for kind, rows in (("gemv", 1), ("skinny", 8), ("tile_gemm", 16)):
        for config in configs(packed, kind) if launch.fits_matrix_units(_x(rows, k), packed) else ():
            rows = config.get("BM", rows)
            if kind in plan.kinds(packed, rows, X, META):
                candidate = costs.Candidate(kind, config)
                for call in launch.linear_calls(_x(rows, k), packed, None, _x(rows, n), candidate=candidate):
                    if call.kernel is not scale_columns:         # scale_columns reads no weight
                        yield costs.config_key(kind, *costs.configuration(config)), call


def configs(packed: PackedWeight, kind: str) -> Iterator[dict[str, int]]:
    """Launch configurations of a matrix-unit kernel to count; counts of other numbers of warps follow from these."""
    if kind != "tile_gemm":
        for rows in ({}, {"BM": 16}) if kind == "skinny" else ({},):
            yield from ({"R": r, "WN": 1, "WK": 4, "EVEN": True, **rows} for r in (1, 2))
        return
    for bm in sorted({16, 32, configure.most_columns(packed)}):
        stages = 3 if bm < 128 else 2
        yield from ({"R": r, "W": 4, "BM": bm, "STAGES": stages, "UNROLL": 1, "WHOLE": 0, "SPLIT": 1} for r in (1, 2))


def _x(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=X, device="meta")


def _narrowed(call: Call, floats: tuple[torch.Tensor, ...]) -> Call:
    """A launch with its arguments x and out in dtype X."""
    return replace(call, arguments=tuple(
        value.to(X) if isinstance(value, torch.Tensor) and any(value is one for one in floats) else value
        for value in call.arguments))


def row(call: Call, arch: str) -> list[float]:
    """The fields of a Cost, rounded; rows only for a `dequantize` kernel with a loop, and spills only if there are any.

    Raises AnalyzeError if `skinny` with 16 rows of x, or `tile_gemm` with 64, spills: plans only use these with counts.
    """
    counts = report(call, arch)
    if counts.spills and call.constants.get("BM", 8) == {"skinny": 16, "tile_gemm": 64}.get(call.family):
        raise AnalyzeError(f"{counts.spills} spills with {call.constants['BM']} rows of x")
    cost = cost_of(counts)
    values = [*astuple(cost)[:4], *(round(value) for value in (cost.trip, cost.fixed, cost.chain)), round(cost.chain_loads, 2),
              round(cost.start), round(cost.start_loads, 2)]
    rows = counts.weights / SHAPE[1] if counts.has_loop and "x" not in call.kernel.arg_names else 0
    return [*values, rows, counts.spills] if counts.spills else [*values, rows] if rows else values


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="formats whose name begins so")
    parser.add_argument("--arch", action="append", choices=list(EVERY_ARCH), help=f"by default {' and '.join(ARCHS)}")
    parser.add_argument("--anew", action="store_true", help="count kernels again that the file has")
    parser.add_argument("--kind", action="append", choices=[*costs.USUAL], help="kernels of this kind alone, may be repeated")
    parser.add_argument("--file", type=Path, default=costs.TABLE)
    options = parser.parse_args()
    kernels = json.loads(options.file.read_text())["kernels"] if options.file.is_file() else {}
    for arch in options.arch or ARCHS:
        for packed in weights(options.only):
            storage = costs.storage_key(packed)
            entry = kernels.get(arch, {}).get(storage, {})
            if options.anew:
                entry = {key: row for key, row in entry.items() if key.split()[0] not in (options.kind or costs.USUAL)}
            for key, call in calls(packed, arch):
                if key not in entry and key.split()[0] in (options.kind or costs.USUAL) and is_wanted(key, entry):
                    try:
                        entry[key] = row(call, arch)
                    except AnalyzeError as error:
                        print(f"{storage} {key}: {error}", file=sys.stderr)
            if entry:
                kernels.setdefault(arch, {})[storage] = entry
                options.file.write_text(text(kernels))
                print(f"{arch} {storage}: {len(entry)} kernels", file=sys.stderr)


def text(kernels: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """The text of the file, with one storage per line so that diffs are readable."""
    archs = []
    for arch in sorted(kernels):
        lines = [f"    {json.dumps(storage)}: {json.dumps(_short(kernels[arch][storage]), separators=(',', ':'))}"
                 for storage in sorted(kernels[arch])]
        archs.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(archs) + "\n}}\n"


def _short(entry: dict[str, list[float]]) -> dict[str, list[float]]:
    return {key: [int(value) if value == int(value) else value for value in entry[key]] for key in sorted(entry)}


if __name__ == "__main__":
    main()
