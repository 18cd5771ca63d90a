"""Figures that others published, and what the model says: of the same launch, or of our kernel for the same codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import qdsl
from qdsl.analyze import launches
from qdsl.runtime.gpu import configure, costs
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu
from qdsl.runtime.gpu.families import BY_NAME
from qdsl.runtime.weight.arrays import cdiv

FILE = Path(__file__).resolve().parents[2] / "bench" / "results" / "public.json"
HEADS = ["kernel of others", "GPU", "N x K, M", "published", "modelled", "modelled by published", "what is modelled"]


def lines() -> Iterator[list[str]]:
    """A line for every figure."""
    for figure in json.loads(FILE.read_text())["figures"]:
        gpu = GPUS[figure["gpu"]]
        modelled = seconds(figure, gpu) * 1e6
        yield [f"[{figure['what']}]({figure['source']})", gpu.title, f"{figure['n']} x {figure['k']}, {figure['m']}",
               f"{figure['us']:.1f} us", f"{modelled:.1f} us", f"{modelled / figure['us']:.2f}",
               ours(figure) if figure["ours"] else "the same launch"]


def ours(figure: dict[str, Any]) -> str:
    params = "".join(f" {name}={value}" for name, value in figure["params"].items())
    return f"`{figure['ours']}{params}`"


def seconds(figure: dict[str, Any], gpu: Gpu) -> float:
    """Of the vendor's matmul, or of our kernel as it is launched by rule."""
    n, k, m = figure["n"], figure["k"], figure["m"]
    if figure["ours"] is None:
        return costs.matmul_seconds(m, n, k, 2, gpu)
    name, _, storage = figure["ours"].partition(".")
    packed = launches.meta_weight(qdsl.load(name), (n, k), storage, figure["params"])
    lanes = packed.layout.kernels.matrix_unit
    kind = "gemv" if m == 1 and lanes is not None and "gemv" in lanes.families else "skinny"
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors):
        config = BY_NAME[kind].configs(packed, m, torch.device("meta"))[0]
    rows = cdiv(n, 16 * config["R"] * config["WN"])
    way = costs.Candidate(kind, config, (rows,) if kind == "gemv" else (rows, cdiv(m, 8)))
    return costs.seconds(packed, way, m, torch.bfloat16, gpu)
