"""Explains the runtime's choice for a product on a GPU, which need not be present: the alternatives, and the refused kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from qdsl.analyze.gpus import Gpu, arch_of
from qdsl.analyze.launches import TYPES
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, plan
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import FAMILIES

META = torch.device("meta")
HEADS = ["kernel", "configuration", "programs", "weights", "us", "of the chosen"]
SHOWN = ("R", "W", "WN", "WK", "BM", "BLOCKS", "STAGES", "UNROLL", "SPLIT", "BN", "BK", "ROWS", "INT8")
USES = {**{family.name: family.use for family in FAMILIES}, "decode": "dequantize, then the vendor's matmul"}


def explain_choice(packed: PackedWeight, rows: int, x: str, gpu: Gpu) -> dict[str, Any]:
    """The plan's choice for `rows` rows of x of a dtype ('bf16') on a GPU: chosen, reason, counts, candidates, refused.

    dense_us: microseconds of the vendor's matmul with a dense weight of this dtype; of_dense: the chosen candidate's by them.
    weights, of a candidate: 'exact', or the dtype to which it rounds them.
    """
    dtype = TYPES[x]
    with configure.assumed(arch_of(gpu.arch).capability // 10, gpu.multiprocessors, gpu):
        choice = plan.choice(packed, rows, dtype, META)
        refused = dict(_refused_kernels(packed, rows, dtype))
    candidates = [{"kernel": option.candidate.kind, "config": dict(option.candidate.config), "grid": list(option.candidate.grid),
                   "us": float(f"{option.seconds * 1e6:.4g}"),
                   "weights": f"rounded to {x}" if plan.rounds_weights(packed, option.candidate, dtype) else "exact"}
                  for option in choice.options]
    dense = costs.matmul_seconds(rows, *packed.shape, dtype.itemsize, gpu)
    return {"format": packed.format.name, "storage": packed.storage, "shape": list(packed.shape), "rows": rows, "x": x,
            "gpu": gpu.title, "times": "modelled", "chosen": candidates[0], "reason": _why_chosen(choice, gpu),
            **of_dense(choice.options[0].seconds, dense),
            "counts": _counted_architectures(packed, choice, gpu), "candidates": candidates, "refused": refused}


def of_dense(seconds: float, dense: float) -> dict[str, float]:
    """The entries about the dense matmul, by the seconds of the chosen candidate and of that matmul."""
    return {"dense_us": float(f"{dense * 1e6:.4g}"), "of_dense": float(f"{seconds / dense:.3g}")}


def choice_title(choice: dict[str, Any]) -> str:
    """The product and the chosen candidate, as text."""
    chosen, (n, k), rows = choice["chosen"], choice["shape"], choice["rows"]
    what = f"{choice['format']}.{choice['storage']} [{n}, {k}], {rows} row{'s' * (rows > 1)} of x in {choice['x']}"
    return (f"{what}, {choice['gpu']}: {chosen['kernel']}, {chosen['us']:.3g} us ({choice['times']}), "
            f"{choice['of_dense']:.2f} of dense")


def candidate_rows(choice: dict[str, Any]) -> list[list[str]]:
    """A row per candidate, the cheapest first."""
    least = choice["chosen"]["us"]
    configs = [" ".join(f"{key}={option['config'][key]}" for key in SHOWN if key in option["config"])
               for option in choice["candidates"]]
    return [[option["kernel"], config, str(math.prod(option["grid"])) if option["grid"] else "", option.get("weights", ""),
             f"{option['us']:.3g}",
             f"{option['us'] / least:.2f}" if least else ""]
            for option, config in zip(choice["candidates"], configs, strict=True)]


def _why_chosen(choice: plan.Choice, gpu: Gpu) -> str:
    """Why this candidate is chosen over the cheapest candidate of every other kernel."""
    best: dict[str, plan.CandidateCost] = {}
    for option in choice.options:
        best.setdefault(option.candidate.kind, option)
    chosen, *others = best.values()
    if not others:
        return f"{USES[chosen.candidate.kind]}; nothing else serves this product"
    compared = [f"{kind} {option.seconds / chosen.seconds:.3g} times as long{_few_programs(option.candidate, gpu)}"
                for kind, option in best.items() if option is not chosen and chosen.seconds]
    return f"{USES[chosen.candidate.kind]}; by the model {', '.join(compared)}"


def _counted_architectures(packed: PackedWeight, choice: plan.Choice, gpu: Gpu) -> str:
    """The architectures whose kernel counts the times come from."""
    counted: dict[str | None, list[str]] = {}
    for way in dict.fromkeys(option.candidate.kind for option in choice.options):
        kind = "dequantize" if way == "decode" else way
        counted.setdefault(costs.counted_on(costs.storage_key(packed), kind, gpu.arch), []).append(kind)
    described = {arch: f"compiled for {arch}" + ("" if arch == gpu.arch else f", which stand in for {gpu.arch}") if arch else
                 "of other storages" for arch in counted}
    return "; ".join(f"{', '.join(names)}: kernels {described[arch]}" for arch, names in counted.items())


def _few_programs(candidate: Candidate, gpu: Gpu) -> str:
    programs = math.prod(candidate.grid)
    return f" ({programs} programs for {gpu.multiprocessors} SMs)" if candidate.grid and programs < gpu.multiprocessors else ""


def _refused_kernels(packed: PackedWeight, rows: int, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Kernels that cannot serve the product, and why."""
    product, reasons = plan.Product(packed, rows, dtype, META), dict[str, list[str]]()
    legal = {candidate.kind for candidate in plan.candidates(packed, rows, dtype, META)}
    for family in FAMILIES if not packed.layout.streams else ():
        if family.name not in legal:
            reasons.setdefault(family.why_not(product) or family.absent, []).append(family.name)
    yield from ((", ".join(names), why) for why, names in reasons.items())
