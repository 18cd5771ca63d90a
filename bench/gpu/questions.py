"""The questions of `python -m bench.gpu.measure` that ask kernels directly; each keeps what it found after every row.

A question yields rows.  It has a few seconds, after which the rest is left out; the order of rows is that of their value.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu import machine
from bench.gpu.ahead import Job, compile_job, relocate, start
from bench.gpu.ahead import carried as load_carried
from bench.gpu.checks import bound, worst
from bench.gpu.device import H200, launches_for
from bench.gpu.plan import product_calls
from bench.gpu.weights import Weight, clones, every, fits, large, packed
from bench.gpu.where import Where
from qdsl.analyze.execute import execute
from qdsl.models.experts import Experts, routed_sum
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, launch, plan, product
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.routing import Offsets

Row = dict[str, Any]
X = torch.bfloat16
ROWS = (1, 16, 64, 256, 4096, 32, 128, 512, 1024, 2048)          # M, by value
# Storages by value: a family of kernels and a width of codes each.
STORAGES = ("int_group.planar bits=4", "q4_0.planar", "fp8_block.planar", "q4_k.planar", "q8_0.planar", "nf4.planar",
            "mxfp4.planar", "q6_k.planar", "int8_channel.planar", "q5_k.planar", "iq4_nl.planar", "fp8_channel.planar",
            "int_group.planar bits=8", "int_group.planar bits=3", "q4_0.gguf", "fp8_block.safetensors")
STAGES = (1, 2, 3)                                               # of the software pipeline of `gemv`
EXPERTS = {"experts": 128, "top": 8, "hidden": 2048, "intermediate": 768}        # Qwen3-30B-A3B
TOKENS = (1, 8, 64, 512)


CHECKED, SMALL = (33, 2, 1, 100), (192, 512)                     # rows of x and the weight that `correct` takes
ONE_ROW = ("int_group.planar bits=4", "q4_0.planar", "fp8_channel.planar", "q8_0.planar", "q6_k.planar")


@dataclass(frozen=True)
class Candidates:
    """The launches of a product, for processes that compile ahead.

    most: of how many candidates; 0 is all.  stages: of `gemv`, in each number of them.
    """

    weight: Weight
    rows: int
    most: int = 0
    stages: tuple[int, ...] = ()

    def calls(self) -> Iterator[Call]:
        packed, meta = self.weight.meta(), torch.device("meta")
        options = plan.choice(packed, self.rows, X, meta).options
        for option in options[:self.most or None]:
            for call in product_calls(packed, self.rows, X, candidate=option.candidate):
                yield from (replace(call, options={**call.options, "num_stages": stages}) for stages in self.stages) \
                    if self.stages and option.candidate.kind == "gemv" else (call,)


def jobs() -> list[Job]:
    """All that is launched, by the order of questions, to be compiled ahead."""
    large_shape = (8192, 8192)
    return [*(Candidates(weight, m) for weight in chosen(STORAGES, SMALL) for m in CHECKED),
            *(Candidates(weight, m, 1) for weight in chosen(STORAGES, large_shape) for m in ROWS),
            *(Candidates(weight, 1, 4, STAGES) for weight in chosen(ONE_ROW, large_shape))]


def carried() -> Row:
    """A product's kernels compiled for an H200 by tensors without data, and loaded by others from a cache that was moved.

    Raises RuntimeError where a launch finds no kernel under its key.
    """
    job, own = Candidates(chosen(STORAGES, SMALL)[0], CHECKED[0], 1), packed(chosen(STORAGES, SMALL)[0], seed=1)
    x = torch.ones(job.rows, SMALL[1], dtype=X)
    with launches_for(H200):
        calls = list(job.calls())
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        start(H200)
        with patch.dict(os.environ, {"TRITON_CACHE_DIR": str(before)}):
            compiled = compile_job(job)
        relocate(before.rename(after))
        driver = load_carried(H200, lambda: product.product_by(plan.best(own, job.rows, X, x.device), x, own), calls, after)
    machines = {name: int.from_bytes(cubin[18:20], "little") for name, cubin in driver.binaries.items()}
    return {"compiled": compiled.launches, "launched": driver.launches, "error": compiled.error, "machines": machines,
            "kernels": sorted({call.kernel.__name__ for call in calls})}


def chosen(names: tuple[str, ...], shape: tuple[int, int]) -> list[Weight]:
    """The weights of these names in a shape, in order."""
    by_name = {str(weight).partition(" [")[0]: weight for weight in every(shape)}
    return [by_name[name] for name in names if name in by_name and fits(by_name[name])]


def correct(where: Where) -> Iterator[Row]:
    """Every candidate of a product against float64, and prepared launches and decoded tiles against the first launch."""
    for weight in where.some(chosen(STORAGES, SMALL)):
        own = packed(weight, seed=1)
        exact, stored = own.format.dequantize(own, torch.float32).double(), own.to(where.device)
        for m in where.some(CHECKED):
            x = (torch.randn(m, SMALL[1], generator=torch.Generator().manual_seed(m)) / 16).to(where.x)
            sums, spread = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
            for candidate in where.some(plan.candidates(stored, m, where.x, where.device)):
                yield _judged(where, weight, candidate, x, stored, sums, spread)
        with patch.object(costs, "DECODED", 2 * 128 * 512):
            x = torch.ones(300, SMALL[1], dtype=where.x, device=where.device)
            first, again = (product.product_by(Candidate("decode"), x, stored, mode="") for _ in range(2))
            yield {"weight": str(weight), "kernel": "decode in tiles", "same": torch.equal(first, again)}


def _judged(where: Where, weight: Weight, candidate: Candidate, x: Tensor, stored: PackedWeight, sums: Tensor, spread: Tensor,
            ) -> Row:
    row = {"weight": str(weight), "kernel": candidate.kind, "config": dict(candidate.config), "rows": len(x)}
    try:
        out = product.product_by(candidate, x.to(where.device), stored)
        where.wait()
    except Exception as error:                                   # whatever a kernel does wrong is a result
        return row | {"wrong": f"{type(error).__name__}: {str(error)[:200]}"}
    allowed = bound(sums, spread, x.shape[1], x.dtype, True)
    return row | {"worst": float(f"{worst(out.cpu(), sums, allowed):.3g}")}


def table(where: Where) -> Iterator[Row]:
    """What the plan chooses beside bfloat16, by rows of x and storage: the time by the dense one's."""
    n, k = where.shape(8192, 8192)
    dense = [torch.randn(n, k, device=where.device, dtype=where.x) for _ in range(where.copies(2 * n * k))]
    of_dense: dict[int, float] = {}
    for weight in where.some(chosen(STORAGES, (n, k))):
        copies: list[PackedWeight] = []
        for m in where.some(ROWS):
            x = _normal(where, m, k)
            if m not in of_dense:
                of_dense[m] = where.seconds([partial(torch.nn.functional.linear, x, one) for one in dense])
                yield {"weight": "dense bfloat16", "rows": m, "us": _short(of_dense[m] * 1e6)}
            copies = copies or _copies(where, weight)
            option = plan.choice(copies[0], m, x.dtype, where.device).options[0]
            seconds = where.seconds([partial(product.product_by, option.candidate, x, one) for one in copies])
            yield {"weight": str(weight), "rows": m, "kernel": option.candidate.kind, "us": _short(seconds * 1e6),
                   "modelled_us": _short(option.seconds * 1e6), "of_dense": _short(seconds / of_dense[m])}


def gemv(where: Where) -> Iterator[Row]:
    """Variants of the kernel for one row: its configurations, each with 1 to 3 stages of loads."""
    n, k = where.shape(8192, 8192)
    for weight in where.some(chosen(ONE_ROW, (n, k))):
        copies, x, out = _copies(where, weight), _normal(where, 1, k), torch.empty(1, n, device=where.device, dtype=where.x)
        ways = [option.candidate for option in plan.choice(copies[0], 1, x.dtype, where.device).options
                if option.candidate.kind == "gemv"]
        for way in where.some(ways[:4]):
            wanted = product.product_by(way, x, copies[0])
            for stages in where.some(STAGES):
                calls = [replace(call, options={**call.options, "num_stages": stages})
                         for one in copies for call in launch.linear_calls(x, one, None, out, candidate=way)]
                calls[0].run()
                yield {"weight": str(weight), "config": dict(way.config), "stages": stages, "same": torch.equal(out, wanted),
                       "us": _short(where.seconds([call.run for call in calls]) * 1e6)}


def pdl(where: Where) -> Iterator[Row]:
    """Chains of products in a graph that begin before the one before them has ended, and that do not."""
    n, k = where.shape(4096, 4096)
    for weight in where.some(chosen(("int_group.planar bits=4", "q4_0.planar", "fp8_channel.planar"), (n, k))):
        copies = _copies(where, weight)
        for m in where.some((1, 8)):
            x, results = _normal(where, m, k) / 64, dict[str, Tensor]()
            for setting in configure.OVERLAP.choices:
                with patch.dict(os.environ, {configure.OVERLAP.variable: setting}):
                    chain = partial(_chain, x, copies)           # each product takes the result of the one before it
                    results[setting] = chain().view(torch.int16)   # bits, as codes of 8 bits overflow after some products
                    same = torch.equal(results["never"], results[setting])
                    yield {"weight": str(weight), "rows": m, "pdl": setting, "same": same,
                           "us": _short(where.seconds([chain, chain]) / len(copies) * 1e6)}


def _chain(x: Tensor, copies: list[PackedWeight]) -> Tensor:
    for one in copies:
        candidate = plan.fused_candidate(one, x.shape[0], x.dtype, x.device)
        x = product.product_by(candidate, x, one)
    return x


def moe(where: Where) -> Iterator[Row]:
    """A layer of routed experts, against the formula of vLLM's tests, with the bytes of live experts."""
    sizes = {name: min(size, 128) if where.is_stand_in else size for name, size in EXPERTS.items()} | (
        {"experts": 4, "top": 2} if where.is_stand_in else {})
    experts, top, hidden, middle = sizes["experts"], sizes["top"], sizes["hidden"], sizes["intermediate"]
    for name in where.some(("q4_0.planar", "int_group.planar bits=4", "fp8_block.planar")):
        weights = [chosen((name,), (experts * n, k)) for n, k in ((2 * middle, hidden), (hidden, middle))]
        up, down = (Experts(large(one[0], where.device), experts, dtype=where.x) for one in weights)
        for tokens in where.some(TOKENS):
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, hidden, generator=generator).to(where.device, where.x)
            scores = torch.rand(tokens, experts, generator=generator).softmax(1).topk(top)
            layer = partial(_layer, x, up, down, *(part.to(where.device) for part in (scores.values, scores.indices)))
            live = len({*scores.indices.flatten().tolist()}) / experts
            wanted = _layer_by_experts(x, up, down, scores.values, scores.indices) if tokens <= 8 else None
            out = layer()
            yield {"weight": name, "tokens": tokens, "us": _short(where.seconds([layer, layer]) * 1e6),
                   "eager_us": _short(where.eager_seconds(layer) * 1e6),
                   "off": None if wanted is None else _short(float((out.double() - wanted).norm() / wanted.norm())),
                   "live_bytes": int(live * sum(part.nbytes for one in (up, down) for part in [one.weight(0)]) * experts)}
            where.wait()


def _layer(x: Tensor, up: Experts, down: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    """A layer of experts as models have it: the gate's silu times up, then down."""
    def run(x: Tensor, offsets: Offsets, rows: Tensor | None) -> Tensor:
        gate, middle = up(x, offsets, rows=rows).chunk(2, -1)
        result: Tensor = down(torch.nn.functional.silu(gate) * middle, offsets)
        return result

    return routed_sum(x, run, len(up), weights, ids)


def _layer_by_experts(x: Tensor, up: Experts, down: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    """The formula of vLLM's tests, expert by expert in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (scales, places) in enumerate(zip(weights, ids, strict=True)):
        for scale, expert in zip(scales.tolist(), places.tolist(), strict=True):
            first, second = (one.weight(expert).dequantize(torch.float32).double() for one in (up, down))
            gate, middle = (x[token].double() @ first.t()).chunk(2)
            out[token] += scale * (second @ (torch.nn.functional.silu(gate) * middle))
    return out


def executed(where: Where) -> Iterator[Row]:
    """The PTX machine's results against the device's, bit by bit and by the sum of |x w|."""
    arch = f"sm_{where.info.capability}"

    def run(call: Call) -> object:
        return execute(call, arch) if where.is_stand_in else call.run()

    with launches_for(where.info), patch.object(machine, "CASES", where.some(machine.CASES)):
        for difference in machine.differences(arch, str(where.device), run):
            yield machine.table([difference])[0]


def _copies(where: Where, weight: Weight) -> list[PackedWeight]:
    one = large(weight, where.device)
    return clones(one, where.copies(one.nbytes))


def _normal(where: Where, m: int, k: int) -> Tensor:
    return torch.randn(m, k, device=where.device, dtype=torch.float32).to(where.x)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


QUESTIONS: dict[str, Callable[[Where], Iterator[Row]]] = {
    "correct": correct, "table": table, "gemv": gemv, "pdl": pdl, "moe": moe, "executed": executed}
