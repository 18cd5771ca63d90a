"""Times every candidate of a product on this GPU, next to its modelled seconds, to correct the cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu import clock
from bench.gpu.ahead import Ahead, Job
from bench.gpu.budget import Part
from bench.gpu.checks import STUCK
from bench.gpu.device import DeviceInfo
from bench.gpu.plan import product_calls
from bench.gpu.report import say
from bench.gpu.weights import Weight, clones, every, fits, large
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import plan, product
from qdsl.runtime.libraries.call import Call

SHAPES = ((8192, 8192), (4096, 4096))
ROWS = (1, 16, 4, 64, 8, 32, 256, 2, 128, 512)                   # M, by value
X = torch.bfloat16
MOST = 8                                                         # candidates of a product: those of least modelled seconds
SLOWEST = 4.0                                                    # times the best modelled seconds, beyond which none is timed
# Storages by value: each family of kernels, each width of codes, tables, and what is timed as it is stored.
TIMED = (
    "q4_0.planar", "int_group.planar bits=4", "q4_k.planar", "fp8_block.planar", "nf4.planar", "mxfp4.planar",
    "q8_0.planar", "q6_k.planar", "int8_channel.planar", "iq4_nl.planar", "iq2_xxs.planar", "int_group.planar bits=3",
    "q4_0.gguf", "q4_k.gguf", "int_group.awq bits=4", "int_group.gptq_v2 bits=4", "iq3_s.planar", "q5_k.planar",
    "int_group.planar bits=2", "fp8_block.safetensors", "iq2_xxs.gguf", "nf4.bitsandbytes", "df11.df11",
    "squeezellm.planar bits=4",
)
LAUNCHES = 10                                                    # of a candidate in a graph


@dataclass(frozen=True)
class Product:
    """x [rows, K] by a weight; for Ahead, the launches of all candidates that are timed."""

    weight: Weight
    rows: int

    def calls(self) -> Iterator[Call]:
        packed = self.weight.meta()
        for option in candidates(packed, self.rows, torch.device("meta")):
            yield from product_calls(packed, self.rows, X, candidate=option.candidate)


def weights(shape: tuple[int, int]) -> list[Weight]:
    """Those of TIMED that can hold a shape, in its order."""
    by_name = {str(weight).partition(" [")[0]: weight for weight in every(shape)}
    return [by_name[name] for name in TIMED if name in by_name and by_name[name].shape == shape and fits(by_name[name])]


def products() -> list[Product]:
    """All that is timed, in order of value."""
    return [Product(weight, rows) for shape in SHAPES for some in (ROWS[:4], ROWS[4:]) for weight in weights(shape)
            for rows in some]


def candidates(packed: PackedWeight, rows: int, device: torch.device) -> list[plan.CandidateCost]:
    """The ways that are timed, as the plan ranks them: what it chooses without timings first; 'decode' is always one of them."""
    options = plan.choice(packed, rows, X, device).options
    timed = [option for option in options[:MOST] if option.seconds <= SLOWEST * options[0].seconds]
    return timed + [option for option in options if option.candidate.kind == "decode" and option not in timed]


def jobs() -> list[Job]:
    """What is launched, to be compiled ahead."""
    return list(products())


def run(info: DeviceInfo, ahead: Ahead, part: Part, rounds: int, rows_of: list[dict[str, Any]], keep: Callable[[], None],
        ) -> list[str]:
    """Time product by product while there is time; what was not timed is returned in words."""
    left_out: list[str] = []
    loaded: dict[Weight, list[PackedWeight]] = {}
    all_products = products()
    for place, timed in enumerate(all_products):
        if not part.allows(2.0):
            left_out.append(f"{len(all_products) - place} products, from {timed.weight}, M = {timed.rows} on: no time")
            break
        ahead.wait(timed, min(part.left, STUCK))
        try:
            if timed.weight not in loaded:
                packed = large(timed.weight, "cuda")
                loaded = {timed.weight: clones(packed, clock.copies(packed.nbytes, info.l2))}
            rows = _timed(timed, loaded[timed.weight], rounds, left_out)
        except Exception as error:                               # a weight that cannot be made keeps no other from it
            left_out.append(f"{timed.weight}: {type(error).__name__}: {str(error)[:200]}")
            torch.cuda.synchronize()
            continue
        rows_of += rows
        keep()
        say(f"{timed.weight}, M = {timed.rows}: {_summary(rows)}")
    return left_out


def _summary(rows: list[dict[str, Any]]) -> str:
    """What the plan chose takes, next to the fastest; a kernel that did not run is named so."""
    shown = [f"{row['kind']} {row['us']} us, {row['modelled']} modelled" for row in
             (*filter(lambda row: row["chosen"], rows), *sorted(rows, key=lambda row: row["us"])[:1])]
    return f"chosen {shown[0]}; best {shown[1]}" if len(shown) == 2 else f"the chosen kernel did not run; best {' '.join(shown)}"


def _timed(timed: Product, copies: list[PackedWeight], rounds: int, left_out: list[str]) -> list[dict[str, Any]]:
    """A row for each candidate that runs."""
    x = torch.randn(timed.rows, timed.weight.shape[1], device="cuda").to(X)
    options = candidates(copies[0], timed.rows, x.device)
    graphs: dict[int, clock.Graph] = {}
    for place, option in enumerate(options):
        try:
            graphs[place] = clock.Graph([partial(product.product_by, option.candidate, x, copy) for copy in copies], LAUNCHES)
        except Exception as error:
            left_out.append(f"{timed.weight}, M = {timed.rows}, {option.candidate}: {type(error).__name__}: {str(error)[:200]}")
            torch.cuda.synchronize()
    (n, k), name = timed.weight.shape, str(timed.weight).partition(" [")[0]
    return [{"weight": name, "n": n, "k": k, "rows": timed.rows, "kind": options[place].candidate.kind,
             "config": dict(options[place].candidate.config), "chosen": place == 0, "us": float(f"{median(seconds) * 1e6:.4g}"),
             "modelled": float(f"{options[place].seconds * 1e6:.4g}")}
            for place, seconds in zip(graphs, clock.sides(list(graphs.values()), rounds), strict=True)]
