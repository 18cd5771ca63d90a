"""Compiled kernels executed from their PTX, against the reference.

`python -m tests.kernels.execute_kernels 0 4` executes a quarter of them.

A line of JSON per launch, about 120.  Triton must not be interpreting.  Kernels run that have all lines between them, each on one
architecture, half of them in turn; in `make test-all` every kernel on every architecture.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu import regimes
from qdsl.analyze.compile import compile_with_triton
from qdsl.analyze.execute import Finding, Options, execute
from qdsl.analyze.execute.run_launch import execute_ptx, flat_arguments
from qdsl.analyze.gpus import arch_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, launch
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.expert_tiles import tile_call
from qdsl.runtime.gpu.families import BY_NAME, w8a8
from qdsl.runtime.gpu.families.lanes import TileGemm
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import experts
from qdsl.runtime.torch.linear import as_stored
from tests.kernels import test_w8a8
from tests.kernels.test_lanes import expected, matrix_unit_of, shapes_of
from tests.support.covering import ALL, covering, kernels, quarter_of
from tests.support.formats import Case, cases, random_packed, shapes, shuffled_fields, smallest
from tests.support.only_ptx import stop_at_ptx

ARCHS = ("sm_80", "sm_90", "sm_100")
TILE_ARCHS = ("sm_80", "sm_90")                                  # the machine has no tcgen05
DTYPES = (torch.bfloat16, torch.float16)
ROWS = {"dequantize": (0,), "matvec": (1, 5), "gemv": (1,), "skinny": (5, 20), "tile_gemm": (40, 3, 100)}
ORDERS: tuple[str | int, ...] = ("lockstep", "reverse", 7)
SUMS = ("exact", "truncated")
# Of x from the start of its storage, in bytes.  Kernels for matrix units ask for 16; for others the plain ones are launched.
OFFSETS = {True: (0, 16), False: (0, 8, 2, 16, 4)}


@dataclass(frozen=True)
class Job:
    """A kernel of a storage, where and how it runs; rows of x, 0 for dequantize."""

    case: Case
    kind: str
    arch: str
    rows: int
    dtype: torch.dtype
    order: str | int
    offset: int
    sums: str

    def __str__(self) -> str:
        return f"{self.case} {self.kind} {self.arch} {self.rows} {str(self.dtype)[6:]} {self.order} {self.offset} {self.sums}"


def jobs() -> list[Job]:
    """Kernels that have all lines between them; what else is chosen goes round, so that pairs of choices meet.

    Functions of a format complete several families: they are executed in mma.sync's and in wgmma's.
    """
    every = [(case, kind) for case in cases() for kind in ROWS if any(kernels(case, kind)) and
             (kind in ("dequantize", "matvec") or str(case) != "same_names.planar-group9")]
    families = [("dequantize", "matvec"), ("gemv", "skinny"), ("tile_gemm",)]
    representatives = [pair for kinds in families
                       for pair in covering([pair for pair in every if pair[1] in kinds], lambda pair: kernels(*pair))]
    chosen = []
    for number, (case, kind) in enumerate(representatives):
        archs = TILE_ARCHS if kind == "tile_gemm" and is_counted(case) else ARCHS[1:2] if kind == "tile_gemm" else ARCHS
        for arch in archs if ALL else [archs[number % len(archs)]]:
            turn, offsets = number // 3, OFFSETS[kind in ("gemv", "skinny", "tile_gemm")]
            chosen.append(Job(case, kind, arch, ROWS[kind][turn % len(ROWS[kind])], DTYPES[turn % 2], ORDERS[turn % 5 % 3],
                              offsets[turn % len(offsets)], SUMS[number % 2]))
    return quarter_of(chosen)


def is_counted(case: Case) -> bool:
    """Whether plans launch `tile_gemm` of a case off Hopper: its kernel was counted there."""
    form, storage = case.module.FORMAT, case.storage
    params = form.complete(case.choice)
    key = "".join(f" {name}={params[name]}" for name in form.by)
    return "tile_gemm" in {own[0] for own in costs.counts(f"{form.name}.{storage}{key}").get("sm_80", ())}


def shape_of(job: Job) -> tuple[int, int]:
    if matrix_unit_of(job.case) and job.kind in ("gemv", "skinny", "tile_gemm"):
        return shapes_of(job.case)[1]
    return [smallest(job.case), *shapes(job.case, (7, 33), (160, 384))][-1]


def packed_of(job: Job) -> PackedWeight:
    """Random; columns in an order of their own where the storage has one."""
    shape = shape_of(job)
    if job.case.module.FORMAT.variant(job.case.choice).storages[job.case.storage].order and job.kind == "skinny":
        fields = shuffled_fields(job.case, shape, 0, {})
        return job.case.module.pack(fields, storage=job.case.storage, **job.case.choice)
    return random_packed(job.case, shape)


def sample(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, none of them too small for a normal number of float16."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 64
    return torch.where(x.abs() < 2.0 ** -13, 2.0 ** -13, x).to(dtype)


def displaced(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose first byte lies so many bytes behind the start of its storage."""
    skipped = offset // tensor.element_size()
    storage = torch.empty(tensor.numel() + skipped, dtype=tensor.dtype)
    return storage[skipped:].view(tensor.shape).copy_(tensor)


def run(calls: list[Call], arch: str, output: torch.Tensor | None, options: Options) -> list[Finding]:
    """Findings of launches, of which the last stores every byte of the output once."""
    return [finding for call in calls for finding in execute(
        call, arch, outputs=(output,) if output is not None and call is calls[-1] else (), options=options).findings]


def result(job: Job, flush: bool = False) -> dict[str, Any]:
    """The largest error as a share of what is allowed (0 or infinite for dequantize), and what the checkers say."""
    packed, options = packed_of(job), Options(order=job.order, sums=job.sums, flush=flush)
    with configure.assumed(arch_of(job.arch).capability // 10, configure.MULTIPROCESSORS):
        if not job.rows:
            out = torch.full(packed.shape, torch.nan)
            calls = list(launch.dequantize_calls(packed, out))
            findings = run(calls, job.arch, out, options)
            weight = job.case.module.dequantize(packed, torch.float32)
            same = torch.equal(out.view(torch.int32), weight.view(torch.int32))
            error = 0.0 if same or bool(((out == weight) | (out.isnan() & weight.isnan())).all()) else float("inf")
        else:
            x = displaced(sample(job.rows, packed.shape[1], job.dtype), job.offset)
            bias = sample(1, packed.shape[0], job.dtype)[0] if job.rows % 2 else None
            out = torch.full((job.rows, packed.shape[0]), torch.nan, dtype=job.dtype)
            stored, weight = as_stored(x, packed)
            candidate = regimes.candidate(stored, weight, job.kind == "tile_gemm")
            if job.kind == "skinny" and job.rows > 16 and job.sums == "truncated":
                candidate = replace(candidate, config={**candidate.config, "BM": 16})
            calls = list(launch.linear_calls(stored, weight, bias, out, candidate=candidate))
            findings = run(calls, job.arch, out, options)
            exact, allowed = expected(job.case, packed, x, bias)
            error = share_of(out, exact, allowed)
    return {"kernel": calls[-1].kernel.__name__, "error": error,
            "findings": [str(finding) for finding in findings]}


# -- what no case of a storage launches ---------------------------------------------------------------------------------------


def share_of(out: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest error as a share of what is allowed; infinite for NaN."""
    return float(((out.double() - exact).abs() / allowed).nan_to_num(torch.inf).max())


def products_of_bytes(name: str, arch: str, sums: str) -> dict[str, Any]:
    """x quantized to 8 bits by a kernel, and its product with codes of 8 bits.  FP8 units keep 14 bits of a sum."""
    packed = importlib.import_module(f"qdsl.generated.{name}").quantize(sample(40, 512, torch.float32))
    x, out = sample(33, 512, torch.bfloat16), torch.full((33, 40), torch.nan, dtype=torch.bfloat16)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        findings = run(list(launch.quantized_calls(x, packed, None, out)), arch, out, Options(sums=sums))
    exact, spread = test_w8a8.exact(x, packed)
    bits = 12 if sums == "truncated" and name.startswith("fp8") else 22
    allowed = exact.abs() * 2.0 ** -8 + spread * 2.0 ** -bits + torch.finfo(torch.bfloat16).tiny
    return {"kernel": "w8a8", "error": share_of(out, exact, allowed), "findings": list(map(str, findings))}


def parts_of_bytes(name: str) -> dict[str, Any]:
    """Three programs share K in products of bytes: in any order the same bits, and counters at 0."""
    packed = importlib.import_module(f"qdsl.generated.{name}").quantize(sample(72, 1280, torch.float32))
    x, outs, findings = sample(20, 1280, torch.bfloat16), [], []
    for order in ("lockstep", 0, 1):
        out = torch.full((20, 72), torch.nan, dtype=x.dtype)
        with configure.assumed(9, configure.MULTIPROCESSORS), patch.object(w8a8, "split_of_k", lambda *_: (3, False)):
            calls = list(launch.quantized_calls(x, packed, None, out))
        findings += map(str, run(calls, "sm_90", out, Options(order=order)))
        findings += [] if not calls[1].scratch[1].any() else [f"counters are left at {calls[1].scratch[1].max()}"]
        outs.append(out)
    findings += [] if all(torch.equal(out, outs[0]) for out in outs) else ["bits depend on the order of programs"]
    exact, spread = test_w8a8.exact(x, packed)
    allowed = exact.abs() * 2.0 ** -8 + spread * 2.0 ** -22 + torch.finfo(torch.bfloat16).tiny
    return {"kernel": "w8a8", "error": share_of(outs[0], exact, allowed), "findings": findings}


def bytes_made_in_place(name: str) -> dict[str, Any]:
    """Programs that quantize x themselves: the bits of two launches."""
    packed = importlib.import_module(f"qdsl.generated.{name}").quantize(sample(72, 512, torch.float32))
    x, outs, findings = sample(11, 512, torch.bfloat16), [], []
    for apart in (False, True):
        outs.append(torch.full((11, 72), torch.nan, dtype=x.dtype))
        way = (1, not apart)
        with configure.assumed(9, configure.MULTIPROCESSORS), patch.object(w8a8, "split_of_k", lambda *_, way=way: way):
            calls = list(launch.quantized_calls(x, packed, None, outs[-1]))
        findings += [*map(str, run(calls, "sm_90", outs[-1], Options())), *([] if len(calls) == 1 + apart else ["launches"])]
    return {"kernel": "w8a8", "error": 0.0 if torch.equal(*outs) else torch.inf, "findings": findings}


def experts_in_one_launch(arch: str, fused: bool) -> dict[str, Any]:
    """Rows of four experts, one of them without any: few rows of packed weights, or many of decoded ones, in any order of x."""
    form = importlib.import_module("qdsl.generated.q4_0")
    packed = form.planar(form.quantize(sample(4 * 32, 256, torch.float32)))
    offsets, x = torch.tensor([0, 5, 5, 16, 21]), sample(21, 256, torch.float16)
    weight = form.dequantize(packed, torch.float32 if fused else torch.float16)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    out = torch.full((21, 32), torch.nan, dtype=x.dtype)
    listing = tile_call(offsets, 21, experts.ROWS if fused else 16)
    tiles = listing.arguments[1].fill_(-1)
    findings = run([listing], arch, tiles, Options(order="reverse"))
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        call = next(launch.grouped_calls(x, packed, tiles, None, out, order)) if fused else \
            experts.matmul_call(x, weight, None, order, tiles, out, 16)
    findings += run([call], arch, out, Options(order="reverse"))
    rows = x[order].double()
    owner = torch.bucketize(torch.arange(21), offsets[1:], right=True)
    part = weight.double().view(4, 32, 256)[owner]
    exact, spread = torch.einsum("mk,mnk->mn", rows, part), torch.einsum("mk,mnk->mn", rows.abs(), part.abs())
    return {"kernel": call.kernel.__name__, "error": share_of(out, exact, exact.abs() * 2.0 ** -11 + spread * 256 * 2.0 ** -24),
            "findings": list(map(str, findings))}


def streams_decoded(name: str, arch: str, rows: int) -> dict[str, Any]:
    """Entropy codes: every bit of the weight, or the product with a few rows.  fix4 and fix3 store weights of patches again."""
    packed = importlib.import_module(f"qdsl.generated.{name}").quantize(sample(40, 512, torch.float32))
    weight = packed.format.dequantize(packed, torch.bfloat16)
    x, out = sample(rows, 512, torch.bfloat16), torch.full((rows, 40) if rows else (40, 512), torch.nan, dtype=torch.bfloat16)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        calls = list(launch.linear_calls(x, packed, None, out) if rows else launch.dequantize_calls(packed, out))
    findings = run(calls, arch, None if name in ("fix4", "fix3") and not rows else out, Options(order=3))
    wide = weight.double()
    exact = x.double() @ wide.t() if rows else wide
    allowed = exact.abs() * 2.0 ** -8 + x.double().abs() @ wide.abs().t() * 512 * 2.0 ** -24 if rows else torch.full_like(wide,
        1e-300)
    return {"kernel": calls[-1].kernel.__name__, "error": share_of(out, exact, allowed), "findings": list(map(str, findings))}


def parts_of_k(name: str, dtype: torch.dtype, without: str = "", ahead: bool = False) -> dict[str, Any]:
    """Three programs share K, of 8 chunks, in tiles without all their rows: in any order the same bits, and counters at 0.

    ahead: they load the next chunk's scales, as on Blackwell, whose matrix units the machine lacks.
    """
    form = importlib.import_module(f"qdsl.generated.{name}")
    packed = form.quantize(sample(72, 1024, torch.float32), **{"int_group": {"bits": 4, "group": 128}}.get(name, {}))
    packed = form.planar(packed) if "planar" in packed.variant.storages else packed
    if without:                                                  # a field, which then has its default everywhere
        fields = {field: value for field, value in form.unpack(packed).items() if field != without}
        packed = form.pack(fields, storage="planar", **packed.params)
    x, bias = sample(20, 1024, dtype), sample(1, 72, dtype)[0]
    outs, findings = [], []
    for order in ("lockstep", 0, 1):                             # program 2, 1 and 0 of three is the last at a tile
        out = torch.full((20, 72), torch.nan, dtype=dtype)
        with configure.assumed(9, configure.MULTIPROCESSORS):
            config = {**BY_NAME["tile_gemm"].configs(packed, 20, packed.device)[0], "SPLIT": 3}
            with patch.object(TileGemm, "loads_ahead", lambda *_: ahead):
                [call] = launch.linear_calls(x, packed, bias, out, candidate=Candidate("tile_gemm", config))
        done = execute(call, "sm_90", outputs=(out,), options=Options(order=order))
        findings += [str(finding) for finding in done.findings]
        findings += [] if not call.scratch[1].any() else [f"counters are left at {call.scratch[1].max()}"]
        outs.append(out)
    findings += [] if all(torch.equal(out, outs[0]) for out in outs) else ["bits depend on the order of programs"]
    wide = form.dequantize(packed, torch.float32).double().t()
    exact, spread = x.double() @ wide + bias.double(), x.double().abs() @ wide.abs() + bias.double().abs()
    allowed = exact.abs() * torch.finfo(dtype).eps + spread * 1024 * 2.0 ** -24
    return {"kernel": call.kernel.__name__, "error": share_of(outs[0], exact, allowed), "findings": findings}


def overlapping(name: str, storage: str, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """A launch that may begin before the one before has ended, which may have written all that it takes: the same bits.

    Without its wait the same kernel reads and writes too early.
    """
    form = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    packed = form.convert(form.quantize(sample(40, 1024, torch.float32)), storage)
    x, bias = sample(rows, 1024, dtype), sample(1, 40, dtype)[0]
    candidate = Candidate("gemv" if rows == 1 else "skinny", {"R": 2, "WN": 1, "WK": 4, "EVEN": True})
    calls, outs = [], []
    for setting in ("auto", "never"):
        outs.append(torch.full((rows, 40), torch.nan, dtype=dtype))
        with configure.assumed(9, configure.MULTIPROCESSORS), patch.dict(os.environ, {configure.OVERLAP.variable: setting}):
            calls += launch.linear_calls(x, packed, bias, outs[-1], candidate=candidate)
    before = (x, bias, *packed.tensors.values())
    findings = run(calls[1:], "sm_90", outs[1], Options())
    findings += execute(calls[0], "sm_90", outputs=(outs[0],), after=before).findings
    compiled = compile_with_triton(calls[0], arch_of("sm_90"))
    early = execute_ptx(compiled.asm["ptx"].replace("griddepcontrol.wait", "// "), flat_arguments(calls[0]), calls[0].grid,
                        compiled.metadata.num_warps, compiled.metadata.shared, after=before).findings
    texts = [*map(str, findings), *([] if {finding.kind for finding in early} == {"dependent"} else ["there is no wait"]),
             *([] if "prefetch.global.L2" in compiled.asm["ptx"] else ["nothing is fetched"])]
    return {"kernel": calls[0].family, "error": 0.0 if torch.equal(*outs) and not outs[0].isnan().any() else torch.inf,
            "findings": texts}


def scaled_x(name: str, arch: str, flush: bool = False) -> dict[str, Any]:
    """One row of x that is scaled instead of codes, which are subnormal numbers of bfloat16."""
    form = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    packed = form.convert(form.quantize(sample(40, 1024, torch.float32)), "planar")
    x, out = sample(1, 1024, torch.bfloat16) * 2.0 ** 70, torch.full((1, 40), torch.nan, dtype=torch.bfloat16)
    x[:, :512] = sample(1, 512, torch.bfloat16)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        candidate = Candidate("gemv", {"R": 2, "WN": 1, "WK": 4, "EVEN": True})
        findings = run(list(launch.linear_calls(x, packed, None, out, candidate=candidate)), arch, out, Options(flush=flush))
    weight = form.dequantize(packed, torch.float32).double().t()
    exact = x.double() @ weight
    allowed = exact.abs() * 2.0 ** -8 + x.double().abs() @ weight.abs() * 1024 * 2.0 ** -24
    return {"kernel": "gemv", "error": share_of(out, exact, allowed), "findings": list(map(str, findings))}


SPECIAL: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"{name} of bytes {arch} {sums}": partial(products_of_bytes, name, arch, sums) for name, arch, sums in (
        ("fp8_block", "sm_90", "exact"), ("fp8_channel", "sm_90", "truncated"), ("int8_channel", "sm_90", "exact"),
        ("int8_channel", "sm_80", "exact"))},
    **{f"parts of bytes {name}": partial(parts_of_bytes, name) for name in ("fp8_block", "int8_channel")},
    **{f"bytes in place {name}": partial(bytes_made_in_place, name) for name in ("fp8_block", "int8_block")},
    **{f"overlapping {name}.{kind} {rows}": partial(overlapping, name, kind, rows, dtype) for name, kind, rows, dtype in (
        ("q4_k", "planar", 1, torch.bfloat16), ("q4_k", "gguf", 1, torch.float16), ("q2_0", "planar", 5, torch.float16),
        ("fp8_block", "planar", 9, torch.bfloat16))},
    **{f"scaled x {name}": partial(scaled_x, name, arch) for name, arch in (("mxfp4", "sm_100"), ("nvfp4", "sm_80"))},
    **{f"parts of K {name}": partial(parts_of_k, name, dtype) for name, dtype in (
        ("int_group", torch.float16), ("int8_channel", torch.float16), ("bitnet", torch.bfloat16))},
    "parts of K int_group without zero points": partial(parts_of_k, "int_group", torch.bfloat16, "z", True),
    **{f"experts {arch} {fused}": partial(experts_in_one_launch, arch, fused) for arch in ("sm_80", "sm_90") for fused in (True,
        False)},
    **{f"{name} {arch} {rows}": partial(streams_decoded, name, arch, rows) for name, arch, rows in (
        ("hlane", "sm_80", 0), ("hlane", "sm_90", 1), ("hlane", "sm_80", 5), ("fix4", "sm_90", 0), ("fix4", "sm_90", 1),
        ("fix4", "sm_80", 5), ("fix3", "sm_90", 0), ("fix3", "sm_90", 1), ("fix3", "sm_80", 5),
        ("df11", "sm_90", 0), ("df11", "sm_80", 5))},
}


def otherwise(job: Job) -> Job:
    """What hardware may choose otherwise, of the same compiled kernel."""
    order = ORDERS[(ORDERS.index(job.order) + 1) % len(ORDERS)]
    return replace(job, order=order, sums=SUMS[job.sums == SUMS[0]])


def every(share: int, shares: int) -> Iterator[dict[str, Any]]:
    """Launches of a share, two of five kernels twice: the second, which compiles nothing, otherwise."""
    chosen: list[tuple[object, Callable[[], dict[str, Any]]]] = [*SPECIAL.items()][share::shares]
    for number, job in [*enumerate(jobs())][share::shares]:
        chosen += [(job, partial(result, job)) for job in (job, otherwise(job))[:1 + (number % 5 < 2)]]
    for title, function in chosen:
        try:
            yield {"job": str(title), **function()}
        except Exception as error:                               # a line of its own, so that the others are tried, too
            yield {"job": str(title), "kernel": "", "error": float("inf"), "findings": [f"{type(error).__name__}: {error}"]}


# Whether kernels put codes where x's type has subnormal numbers: a matrix unit that reads those as zero gives other sums.
SUBNORMAL = {("nvfp4.planar", "skinny"): True, ("int8_channel.safetensors-scale_typebf16", "skinny"): True,
             ("q6_k.planar", "skinny"): True, ("iq4_xs.planar", "skinny"): True, ("nf4.planar-block64", "gemv"): False,
             ("q1_0.planar", "tile_gemm"): True,
             ("fp8_block.planar-bn128-bk128-scale_typef32", "tile_gemm"): False, ("q2_k.planar", "skinny"): True,
             ("mxfp4.planar", "gemv of bfloat16"): True}


def flushed() -> Iterator[dict[str, Any]]:
    """Kernels of SUBNORMAL on a matrix unit that flushes, with x in float16 unless they say otherwise."""
    yield {"job": ["mxfp4.planar", "gemv of bfloat16"], "wrong": scaled_x("mxfp4", "sm_90", flush=True)["error"] > 1}
    for case in cases():
        for kind in ("gemv", "skinny", "tile_gemm"):
            if (str(case), kind) in SUBNORMAL:
                job = Job(case, kind, "sm_90", ROWS[kind][-1], torch.float16, "lockstep", 0, "exact")
                yield {"job": [str(case), kind], "wrong": result(job, flush=True)["error"] > 1}


if __name__ == "__main__":
    stop_at_ptx()
    for line in flushed() if sys.argv[1] == "flushed" else every(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(line), flush=True)
