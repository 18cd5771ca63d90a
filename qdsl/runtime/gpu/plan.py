"""Plans of products on a GPU: all legal kernels for a packed weight, and the one with the least modelled cost.

All dispatch on GPUs happens here.  A Candidate is a fused kernel in a launch configuration, or 'decode', which dequantizes and
calls the vendor's matmul.  runtime/gpu/costs.py models their seconds.  A candidate that `qdsl.tune` timed as the fastest on this
device takes precedence.

runtime/weight/products.py keeps choices and prepared launches for all weights of one description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qdsl.runtime.gpu import configure, costs
from qdsl.runtime.gpu.devices import Gpu
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import forget as forget_plans
from qdsl.runtime.weight.target import Candidate, plan_of

HALVES = (torch.float16, torch.bfloat16)                         # dtypes of x that these kernels multiply on matrix units
ROWS = 4096                                                      # rows of x: up to here every number of rows has its own choice
MATVEC = 4                                                       # most rows of x for 'matvec', which takes them one by one
GEMM = 256                                                       # most rows of x for 'gemm', which decodes the weight per 64 rows


@dataclass(frozen=True, slots=True)
class Option:
    """A legal candidate and its modelled seconds."""

    candidate: Candidate
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate for a product.  is_tuned: `qdsl.tune` timed it as the fastest.

    options: all legal candidates, the cheapest first.  The order multiplies a candidate's time by costs.doubt.
    """

    candidate: Candidate
    options: tuple[Option, ...]
    is_tuned: bool = False


def forget() -> None:
    """Forget all choices and prepared launches, so that the next product reads the files of tuned candidates again."""
    configure.forget()
    forget_plans()


def choice(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Choice:
    """The choice for x [m, K] @ w.T.  dtype: of x.  is_aligned: x and the weight are aligned for loads of 16 bytes."""
    plan, rows, gpu = plan_of(packed), rows_class(m), configure.gpu(device)
    key = (rows, dtype, configure.target(device), gpu, device, is_aligned)
    chosen = plan.choices.get(key)
    if chosen is None:
        chosen = plan.choices[key] = _choice(packed, rows, dtype, device, gpu, is_aligned)
    return chosen


def rows_class(m: int) -> int:
    """The number of rows whose choice serves m: m up to ROWS, above it one per number of 128-row tiles, whole or partial."""
    return m if m <= ROWS or m % 128 == 0 else cdiv(m, 128) * 128 - 1


def best(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Candidate:
    """The candidate that runs x [m, K] @ w.T."""
    return choice(packed, m, dtype, device, is_aligned).candidate


def fused(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Candidate:
    """The best fused kernel for x [m, K]; 'matvec', for any number of rows, if no kernel for matrix units applies."""
    chosen = choice(packed, m, dtype, device, is_aligned)
    ways = (chosen.candidate, *(option.candidate for option in chosen.options))
    return next((candidate for candidate in ways if candidate.kind != "decode"), None) or matvec(packed, m)


def invariant(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Candidate:
    """The kernel and configuration, one for all m, that give a row of x the same bits whatever the other rows are."""
    if not fits_matrix_units(packed, dtype, device, is_aligned, skinny=True):
        return matvec(packed, m)
    return _lane_candidate("skinny", packed, m, configure.candidates("skinny", packed, m, device)[0])


def candidates(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True,
               ) -> list[Candidate]:
    """All legal candidates for x [m, K]."""
    legal = _stream_candidates(packed, m, dtype, device) if packed.layout.streams else []
    for kind in kinds(packed, m, dtype, device, is_aligned):
        ways = (_lane_candidate(kind, packed, m, config) for config in configure.candidates(kind, packed, m, device))
        legal += [way for way in ways if _has_registers(way, packed, configure.gpu(device).arch)]
    if 1 < m <= GEMM and not legal and not packed.layout.streams and configure.has_gemm(dtype, device):
        legal += _gemm_candidates(packed, m, device)
    if m <= MATVEC and not packed.layout.streams:
        legal.append(matvec(packed, m))
    return [*legal, Candidate("decode")]


def kinds(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> list[str]:
    """Matrix-unit kernels that serve x [m, K]: 'gemv' for 1 row, 'skinny' for any number, 'tile_gemm' from 2 rows on."""
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or packed.layout.streams or not fits_matrix_units(packed, dtype, device, is_aligned):
        return []
    legal = ["gemv"] if m == 1 and kernels.gemv is not None else []
    legal += ["skinny"] if kernels.skinny is not None else []
    return legal + (["tile_gemm"] if m > 1 and configure.has_tile_gemm(packed, dtype, device) else [])


def fits_matrix_units(packed: PackedWeight, dtype: torch.dtype, device: torch.device, is_aligned: bool = True,
                      skinny: bool = False) -> bool:
    """Whether a matrix-unit kernel serves x of a dtype: 16-bit floats, whole chunks of columns, no NaN codes.

    skinny: ask for `skinny` alone.
    """
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or not is_aligned or dtype not in HALVES or packed.shape[1] % 128 or not packed.shape[1]:
        return False
    if not configure.has_mma(device) or (dtype == torch.float16 and not kernels.codes.unit[0]):
        return False                                             # `gemm` and `matvec` serve them
    if skinny and kernels.skinny is None:
        return False
    return all(map(kernels.serves, kernels.sizes(packed.sizes))) and packed.finite


def rounds_weights(packed: PackedWeight, candidate: Candidate, dtype: torch.dtype) -> bool:
    """Whether a candidate rounds weights, or the numbers of their table, to x's dtype before it multiplies."""
    if candidate.config.get("SCALED"):
        return True
    if candidate.kind in ("decode", "gemm"):
        copied = packed.variant.copies                           # weights that are stored numbers; others are float32
        kind = "f32" if copied is None else str(packed.params.get(copied, packed.variant.fields[copied].type))
        return torch.promote_types(torch_dtype(kind), dtype) != dtype
    return candidate.kind != "matvec" and packed.layout.kernels.rounds(dtype, packed.tensors)


def matvec(packed: PackedWeight, m: int) -> Candidate:
    """The candidate `matvec`, which decodes weight by weight; a program takes one row of x."""
    kernels = packed.layout.kernels
    rows, units = configure.grid_axes(packed)
    bn, bk = configure.product_tile(kernels.last, rows, units, kernels.sums)
    return Candidate("matvec", {"BN": bn, "BK": bk, "EVEN": configure.is_even(packed, bn, bk)}, (cdiv(rows, bn), m))


def gemm(packed: PackedWeight, m: int, config: dict[str, int]) -> Candidate:
    """The candidate `gemm`, which decodes weight by weight and multiplies blocks of rows of x on any GPU's matrix units."""
    rows, _ = configure.grid_axes(packed)
    grid = (cdiv(rows, config["BN"]), cdiv(m, config["BM"]))
    return Candidate("gemm", config, (*grid, config["SPLIT"]) if config["SPLIT"] > 1 else grid)


def _lane_candidate(kind: str, packed: PackedWeight, m: int, config: dict[str, int]) -> Candidate:
    n = packed.shape[0]
    if kind == "tile_gemm":
        grid = (cdiv(n, 16 * config["R"] * config["W"]), cdiv(m, config["BM"]))
        return Candidate(kind, config, (*grid, config["SPLIT"]) if config["SPLIT"] > 1 else grid)
    rows = cdiv(n, 16 * config["R"] * config["WN"])
    return Candidate(kind, config, (rows,) if kind == "gemv" else (rows, cdiv(m, config.get("BM", 8))))


def _gemm_candidates(packed: PackedWeight, m: int, device: torch.device) -> list[Candidate]:
    """Candidates of `gemm`: the default tile and, if its kernel spills, the other tiles with counts."""
    arch = configure.gpu(device).arch
    ways = [gemm(packed, m, config) for config in configure.candidates("gemm", packed, m, device)]
    rule = costs.own_cost(packed, ways[0], arch)
    return [way for way in ways if way.config["BM"] == ways[0].config["BM"] or (
        rule is not None and rule.spills and costs.own_cost(packed, way, arch) is not None)]


def _has_registers(candidate: Candidate, packed: PackedWeight, arch: str) -> bool:
    """Whether the kernel runs without register spills, by the table's counts.

    Without counts: whether a program takes so few rows of x that no format's kernel spills.  `tile_gemm` needs counts for the
    matrix unit that it is compiled for, unless that is Hopper's.
    """
    if candidate.kind == "tile_gemm" and arch != "sm_90":
        counted = costs.counted_on(costs.storage_key(packed), candidate.kind, arch)
        if counted is None or costs.matrix_unit(counted) != costs.matrix_unit(arch):
            return False
    cost, rows = costs.own_cost(packed, candidate, arch), candidate.config.get("BM", 8)
    if cost is not None or candidate.config.get("SCALED"):
        return cost is not None and cost.spills == 0
    return rows <= {"skinny": 8, "tile_gemm": 32 if configure.has_short_groups(packed) else 128}.get(candidate.kind, rows)


def _stream_candidates(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """Candidates of the kernel that decodes an entropy code as it multiplies, for up to stream_kernels.SKINNY_ROWS rows."""
    if m > stream_kernels.SKINNY_ROWS:
        return []
    x, out = (torch.empty(m, columns, dtype=dtype, device=device) for columns in packed.shape[::-1])
    if not configure.has_skinny_streams(x, packed):
        return []
    calls = list(stream_kernels.skinny_calls(x, packed, None, out))
    return [Candidate("skinny", {key: value for key, value in call.constants.items() if isinstance(value, int)}, call.grid)
            for call in calls]


def _choice(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, gpu: Gpu, is_aligned: bool) -> Choice:
    legal = candidates(packed, m, dtype, device, is_aligned)
    modelled = [Option(candidate, costs.seconds(packed, candidate, m, dtype, gpu)) for candidate in legal]
    options = tuple(sorted(modelled, key=lambda option: option.seconds * costs.doubt(packed, option.candidate, gpu.arch)))
    file = {} if device.type == "meta" else configure.tuned(configure.tuned_file(device))
    timed: Any = file.get(configure.key(packed, m, dtype))
    for option in options if isinstance(timed, dict) else ():
        if (option.candidate.kind, option.candidate.config) == (timed.get("kind"), timed.get("config")):
            return Choice(option.candidate, options, True)
    return Choice(options[0].candidate, options)
