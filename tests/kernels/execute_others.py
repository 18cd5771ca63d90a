"""Kernels of anybody on the PTX machine, as JSON: `python -m tests.kernels.execute_others`.  Triton must not be interpreting."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu import regimes
from qdsl.analyze.execute import Options, execute
from qdsl.generated import int_group, nf4, q4_0
from qdsl.runtime.gpu import launch
from qdsl.runtime.libraries.call import Call
from tests.support.only_ptx import stop_at_ptx

ROWS, COLUMNS, SPLITS = 6, 512, 4


@triton.jit
def softmax(x, out, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + at)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + at, value / tl.sum(value, 0))


@triton.jit
def split_sum(x, partial, arrived, out, SPLITS: tl.constexpr, PART: tl.constexpr, SEM: tl.constexpr):
    """The sum of a row in parts; the program that arrives last adds them up."""
    row, part = tl.program_id(0), tl.program_id(1)
    value = tl.load(x + (row * SPLITS + part) * PART + tl.arange(0, PART))
    tl.store(partial + row * SPLITS + part, tl.sum(value, 0))
    if tl.atomic_add(arrived + row, 1, sem=SEM) == SPLITS - 1:
        tl.store(out + row, tl.sum(tl.load(partial + row * SPLITS + tl.arange(0, SPLITS)), 0))


@triton.jit
def product(a, b, out, K: tl.constexpr, N: tl.constexpr):
    """out [64, N] = a [64, K] @ b [K, N], both row by row, so that b is transposed on its way to the matrix unit."""
    m, n, k = tl.arange(0, 64), tl.arange(0, N), tl.arange(0, K)
    left, right = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def scaled(x, w, out, COLUMNS: tl.constexpr, WAITS: tl.constexpr):
    """A dependent launch: x comes from the launch before, w does not."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(w + at)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, weight * tl.load(x + at))


def dependent_launches() -> None:
    for waits in (True, False):
        x, w, out = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
        call = Call(scaled, (x, w, out), {"COLUMNS": COLUMNS, "WAITS": waits}, (ROWS,), {"num_warps": 4, "launch_pdl": True})
        findings = execute(call, "sm_90", outputs=(out,), after=(x,)).findings
        print(json.dumps({"what": f"scaled {waits}", "findings": [finding.message for finding in findings],
                          "error": (out - x * w).abs().max().item()}))


def columns_of_a_weight() -> None:
    """A weight cut along K, with a tensor that is missing: kernels read its rows between gaps, and give the bits of a copy."""
    packed = int_group.quantize(torch.randn(40, 512), bits=4, group=128)
    part = int_group.planar(packed).cut("K", 256, 512)
    own = part.apply(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
    x = torch.randn(1, 256).half()
    for kind in ("dequantize", "linear"):
        outs, findings = [], []
        for weight in (part, own):
            outs.append(torch.zeros(part.shape) if kind == "dequantize" else torch.zeros(1, 40).half())
            [call] = launch.dequantize_calls(weight, outs[-1]) if kind == "dequantize" else \
                launch.linear_calls(x, weight, None, outs[-1], candidate=regimes.candidate(x, weight))
            findings += execute(call, "sm_90", outputs=(outs[-1],)).findings
        print(json.dumps({"what": f"columns {call.family}", "findings": list(map(str, findings)), "error": 0.0 if
                          torch.equal(*outs) and outs[0].any() else 1.0}))


def stores_of_dequantize() -> None:
    """Columns that lie apart in a unit, or along N in memory, are stored by whole sectors, as columns that neighbour are."""
    cases: list[tuple[Any, str, dict[str, int]]] = [
        (q4_0, "planar", {}), (nf4, "planar", {}), (int_group, "gptq_v2", {"bits": 4}), (int_group, "awq", {"bits": 4}),
        (int_group, "planar", {"bits": 2})]
    for form, storage, params in cases:
        packed = form.FORMAT.convert(form.quantize(torch.randn(128, 1024), **params), storage)
        wanted, out = form.dequantize(packed, torch.bfloat16), torch.zeros(128, 1024, dtype=torch.bfloat16)
        [call] = launch.dequantize_calls(packed, out)
        execution = execute(call, "sm_90", outputs=(out,), options=Options(counts=True))
        print(json.dumps({"what": f"stores of {packed.format.name}.{storage}", "findings": list(map(str, execution.findings)),
                          "error": float(not torch.equal(out.view(torch.int16), wanted.view(torch.int16))),
                          "bytes_of_sector": execution.memory["store bytes"] / execution.memory["store sectors"]}))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for arch in ("sm_80", "sm_90"):
        for order in ("lockstep", "reverse", 1):
            x, out = torch.randn(ROWS, COLUMNS, generator=generator), torch.zeros(ROWS, COLUMNS)
            findings = execute(Call(softmax, (x, out), {"COLUMNS": COLUMNS}, (ROWS,), {"num_warps": 4}), arch, outputs=(out,),
                               options=Options(order=order)).findings
            print(json.dumps({"what": f"softmax {arch} {order}", "findings": list(map(str, findings)),
                              "error": (out - x.softmax(1)).abs().max().item()}))
            for semantics in ("acq_rel", "relaxed"):
                partial, arrived, total = torch.zeros(ROWS, SPLITS), torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS)
                call = Call(split_sum, (x, partial, arrived, total),
                            {"SPLITS": SPLITS, "PART": COLUMNS // SPLITS, "SEM": semantics}, (ROWS, SPLITS), {"num_warps": 4})
                findings = execute(call, arch, workspaces=(partial,), options=Options(order=order)).findings
                print(json.dumps({"what": f"split_sum {semantics} {arch} {order}", "findings": [f.kind for f in findings],
                                  "error": (total - x.sum(1)).abs().max().item()}))
        narrow = [torch.float8_e4m3fn] if arch == "sm_90" else []
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, *narrow):
            a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((64, 64), (64, 32)))
            result = torch.zeros(64, 32, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
            call = Call(product, (a, b, result), {"K": 64, "N": 32}, (1,), {"num_warps": 4})
            findings = execute(call, arch, outputs=(result,)).findings
            print(json.dumps({"what": f"product {str(dtype)[6:]} {arch}", "findings": list(map(str, findings)),
                              "error": (result.double() - a.double() @ b.double()).abs().max().item()}))


if __name__ == "__main__":
    stop_at_ptx()
    main()
    dependent_launches()
    columns_of_a_weight()
    stores_of_dequantize()
