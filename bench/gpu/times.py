"""Times products: every leading format next to torch's bfloat16 product and other packages.

All sides of a shape and a number of rows alternate in one run, under CUDA graphs, over copies of their weights that do not fit
into the L2 cache together.  A side's bytes are its weight, x and the result, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.gpu import clock, peers
from bench.gpu.ahead import Ahead, Job
from bench.gpu.budget import Part
from bench.gpu.checks import STUCK
from bench.gpu.device import DeviceInfo
from bench.gpu.probes import Launched
from bench.gpu.report import say
from bench.gpu.weights import DTYPES, Weight, clones, fits, large
from bench.weights import format_of
from qdsl.runtime.gpu import launch

SHAPES = ((8192, 8192), (4096, 4096), (28672, 8192), (4096, 14336))             # N out features x K in features, by value
ROWS = (1, 16, 8, 64, 4, 2, 256, 4096)                                          # M, by value
DECODED = 0                                                      # in place of M: the weight is decoded, and nothing multiplied
QUICK_SHAPES, QUICK_ROWS = ((8192, 8192),), (1, 16)
DENSE, COPY = "torch F.linear", "torch copy"
# What is timed: format and storage, parameters that are not the default, and the type of x.
SIDES: tuple[tuple[str, dict[str, int | str], str], ...] = (
    ("q4_0.planar", {}, "bf16"), ("int_group.planar", {"bits": 4}, "bf16"), ("fp8_block.planar", {}, "bf16"),
    ("fp8_channel.planar", {}, "bf16"), ("int8_channel.planar", {}, "bf16"), ("q4_k.planar", {}, "bf16"),
    ("q4_0.planar", {}, "f16"), ("int_group.planar", {"bits": 4}, "f16"), ("fp8_block.safetensors", {}, "bf16"),
    ("q8_0.planar", {}, "bf16"), ("q6_k.planar", {}, "bf16"), ("int_group.planar", {"bits": 8}, "bf16"),
    ("int_group.planar", {"bits": 3}, "bf16"), ("int_group.planar", {"bits": 2}, "bf16"), ("fp8_tensor.planar", {}, "bf16"),
    ("int8_channel.safetensors", {}, "bf16"), ("int8_tensor.planar", {}, "bf16"), ("fp8_channel.safetensors", {}, "bf16"),
    ("int_group.gptq_v2", {"bits": 4}, "bf16"), ("int_group.awq", {"bits": 4}, "bf16"), ("q4_0.gguf", {}, "bf16"),
    ("q4_k.gguf", {}, "bf16"), ("fix4.fix4", {}, "bf16"), ("fix3.fix3", {}, "bf16"), ("hlane.hlane", {}, "bf16"),
    ("df11.df11", {}, "bf16"),
)
QUICK_SIDES = SIDES[:7]
PLAIN = ("gptq_v2", "awq", "gguf")                               # storages without kernels for matrix units: slow for more rows
FEW = 16                                                         # rows up to which those are timed


@dataclass(frozen=True)
class Side:
    """What is timed: a name and its weight, or one of another package's."""

    weight: Weight
    x: str

    @property
    def name(self) -> str:
        return str(self.weight).partition(" [")[0]


@dataclass
class Timed:
    """One side's row."""

    shape: tuple[int, int]
    rows: int
    what: str
    x: str
    seconds: list[float]
    nbytes: int

    def data(self, dense: dict[str, float], bandwidth: float) -> dict[str, Any]:
        """dense: seconds of torch's own, by the type of x."""
        middle = median(self.seconds)
        return {"n": self.shape[0], "k": self.shape[1], "rows": self.rows, "what": self.what, "x": self.x,
                "us": _short(middle * 1e6), "min": _short(min(self.seconds) * 1e6), "max": _short(max(self.seconds) * 1e6),
                "times_dense": _short(dense[self.x] / middle), "gbps": _short(self.nbytes / middle / 1e9),
                "of_copy": _short(self.nbytes / middle / bandwidth)}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def sides(shape: tuple[int, int], quick: bool = False) -> list[Side]:
    """The formats that a shape can be stored in."""
    all_sides = []
    for where, params, x in QUICK_SIDES if quick else SIDES:
        name, _, storage = where.partition(".")
        chosen = tuple(format_of(name).complete(params).items())
        all_sides.append(Side(Weight(name, storage, chosen, shape), x))
    return [side for side in all_sides if fits(side.weight)]


def groups(quick: bool = False) -> list[tuple[tuple[int, int], int]]:
    """Shapes and rows in order of value: all shapes with few rows before any with many."""
    shapes, rows = (QUICK_SHAPES, QUICK_ROWS) if quick else (SHAPES, ROWS)
    return [(shape, m) for some in (rows[:4], (*rows[4:], DECODED)) for shape in shapes for m in some]


def is_timed(side: Side, rows: int) -> bool:
    """Weights in streams are decoded too, beside a copy of the dense one."""
    if rows == DECODED:
        return bool(format_of(side.weight.name).storage(side.weight.storage, side.weight.chosen)[1].streams)
    return rows <= FEW or side.weight.storage not in PLAIN


def jobs(quick: bool = False) -> list[Job]:
    """What is launched, to be compiled ahead, in the order in which it is needed."""
    return [Launched(side.weight, rows, side.x) for shape, rows in groups(quick) for side in sides(shape, quick)
            if is_timed(side, rows)]


class Loaded:
    """The weights of a shape, on the device, in as many copies as it takes; made once for all numbers of rows."""

    def __init__(self, shape: tuple[int, int], info: DeviceInfo, quick: bool, packages: peers.Packages) -> None:
        self.shape = shape
        self.info = info
        self.sides = sides(shape, quick)
        self.weights = {}
        for weight in dict.fromkeys(side.weight for side in self.sides):
            packed = large(weight, "cuda")
            self.weights[weight] = clones(packed, clock.copies(packed.nbytes, info.l2))
        n, k = shape
        count = clock.copies(2 * n * k, info.l2)
        self.dense = {x: [torch.randn(n, k, device="cuda", dtype=DTYPES[x]) for _ in range(count)] for x in ("bf16", "f16")}
        self.peers = packages.peers_for(shape, info.l2)
        self.packages = packages


def run(info: DeviceInfo, bandwidth: float, ahead: Ahead, part: Part, rounds: int, quick: bool, rows_of: list[dict[str, Any]],
        packages: peers.Packages, keep: Callable[[], None]) -> list[str]:
    """Time group by group while there is time; what was not is returned in words."""
    loaded: Loaded | None = None
    longest, left_out = 2.0, []
    for shape, rows in groups(quick):
        begun = part.left
        if not part.allows(longest):
            left_out.append(f"N x K = {shape[0]} x {shape[1]}, M = {rows}: no time")
            continue
        if loaded is None or loaded.shape != shape:
            loaded = None                                        # its memory first
            torch.cuda.empty_cache()
            loaded = Loaded(shape, info, quick, packages)
        for side in loaded.sides:
            ahead.wait(Launched(side.weight, rows, side.x), min(part.left, STUCK))
        timed, missed = _group(loaded, rows, rounds, part, packages)
        dense = {row.x: median(row.seconds) for row in timed if row.what in (DENSE, COPY)}
        rows_of_group = [row.data(dense, bandwidth) for row in timed if row.x in dense]
        rows_of += rows_of_group
        left_out += missed
        keep()
        longest = max(longest, 1.2 * (begun - part.left))
        say(f"times: N x K = {shape[0]} x {shape[1]}, M = {rows}, us and speed by dense: " + "; ".join(
            f"{row['what']} ({row['x']}) {row['us']}, {row['times_dense']} x" for row in _shown(rows_of_group)))
    return left_out


def _shown(rows_of_group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a person follows a run by: torch's, the leading formats, other packages."""
    ours = {side.name for side in sides(SHAPES[0])}
    leading = {f"{where}{' bits=4' * ('bits' in params)}" for where, params, _ in SIDES[:4]}
    return [row for row in rows_of_group if row["what"] in leading or row["what"] not in ours]


def _group(loaded: Loaded, rows: int, rounds: int, part: Part, packages: peers.Packages) -> tuple[list[Timed], list[str]]:
    """All sides with so many rows, in turn."""
    (n, k), missed = loaded.shape, []
    xs = {x: torch.randn(rows, k, device="cuda").to(DTYPES[x]) for x in ("bf16", "f16")}
    captured: list[tuple[Timed, clock.Graph]] = []
    for what, x, nbytes, calls in _calls(loaded, rows, xs):
        if not part.allows(1.0):
            missed.append(f"{what} ({x}), N x K = {n} x {k}, M = {rows}: no time")
            continue
        try:
            graph = clock.Graph(calls, clock.LAUNCHES if rows < 256 else 1)
        except Exception as error:                               # a side that cannot be captured keeps no other from it
            missed.append(f"{what} ({x}), N x K = {n} x {k}, M = {rows}: {type(error).__name__}: {str(error)[:200]}")
            torch.cuda.synchronize()
            continue
        io = (rows * (n + k) if rows else n * k) * xs[x].element_size()
        captured.append((Timed((n, k), rows, what, x, [], nbytes + io), graph))
    for (timed, _), samples in zip(captured, clock.sides([graph for _, graph in captured], rounds), strict=True):
        timed.seconds = samples
    return [timed for timed, _ in captured], missed


def _calls(loaded: Loaded, rows: int, xs: dict[str, torch.Tensor],
           ) -> Iterator[tuple[str, str, int, list[Callable[[], Any]]]]:
    """Name, type of x, bytes of the weight, and a call for each copy."""
    if rows == DECODED:
        out = torch.empty(loaded.shape, device="cuda", dtype=torch.bfloat16)
        dense = loaded.dense["bf16"]
        yield COPY, "bf16", dense[0].numel() * 2, [_bound(out.copy_, copy) for copy in dense]
        for side in loaded.sides:
            if is_timed(side, rows):
                weights = loaded.weights[side.weight]
                yield side.name, "bf16", weights[0].nbytes, [_bound(launch.dequantize, copy, out) for copy in weights]
                if side.weight.name == "df11" and (theirs := loaded.packages.decoded(weights, out)):
                    yield f"{peers.DFLOAT11}, decoded", "bf16", weights[0].nbytes, theirs
        return
    for x, dense in loaded.dense.items():
        yield DENSE, x, dense[0].numel() * 2, [_bound(torch.nn.functional.linear, xs[x], copy) for copy in dense]
    for side in loaded.sides:
        if is_timed(side, rows):
            weights = loaded.weights[side.weight]
            yield side.name, side.x, weights[0].nbytes, [_bound(copy.format.linear, xs[side.x], copy) for copy in weights]
    for peer in loaded.peers:
        yield peer.name, peer.x, peer.nbytes, [_bound(layer, xs[peer.x]) for layer in peer.layers]


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
