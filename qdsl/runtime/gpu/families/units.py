"""Families that decode a weight unit by unit, for any format: `matvec` and `gemm`; and the launches of `dequantize`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qdsl.core.shapes import axis
from qdsl.runtime.gpu import configure, costs, strides, tiles
from qdsl.runtime.gpu.families.family import SECOND_AXIS, TYPES, WARPS, Config, Family, Product, distinct, kernel_tensors, parts
from qdsl.runtime.gpu.kernels.dequantize import dequantize
from qdsl.runtime.gpu.kernels.gemm import gemm
from qdsl.runtime.gpu.kernels.matvec import matvec
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.libraries.call import Call, Plane
from qdsl.runtime.libraries.triton import release
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv, power
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.target import Candidate

ONE_BY_ONE = 4                                                   # most rows of x for `matvec`, which takes them one by one
PROGRAMS = 256                                                   # programs that fill a GPU: the goal where tiles may be smaller
MOST = 256                                                       # rows of x for `gemm`, which decodes the weight per 64 of them
PARTS = (1, 2, 4, 8, 16)                                         # numbers of programs that share K
TILES = {16: (64, 128), 64: (128, 64), 32: (32, 64)}             # by rows of x per program: its tile of w, N x K
SMALL, SMALL_STEP = 32, 8192                                     # rows of x where kernels would spill with 64; most weights
TENSOR_SUMS = 8                                                  # sums of 64 x 128 that an SM's tensor memory holds on Blackwell


def dequantize_calls(packed: PackedWeight, out: Tensor) -> Iterator[Call]:
    """The launches of `dequantize`, for tensors on any device, meta too."""
    if stream_kernels.has_dequantize(packed, out):
        yield from stream_kernels.dequantize_calls(packed, out)
        return
    packed, calls = stream_kernels.decoded_with_calls(strides.gapless_weight(packed))
    yield from calls
    kernels, (rows, units) = packed.layout.kernels, tiles.grid_axes(packed)
    if not rows or not units:
        return
    bn, bk = tiles.dequantize_tile(kernels, rows, units)
    while cdiv(units, bk) > SECOND_AXIS:                         # for rows of 16 million columns and more
        bn, bk = max(1, bn // 2), 2 * bk
    # Fused multiply-adds would skip a rounding of the decode formula.
    yield Call(dequantize, (planes(packed), out, *packed.shape, size_arguments(packed), rows, units),
               {**unit_constants(packed, bn, bk), **tiles.columns_in_order(kernels, bn, bk),
                "EVEN": rows % bn == 0 and units % bk == 0}, (cdiv(rows, bn), cdiv(units, bk)),
               {"num_warps": WARPS, "enable_fp_fusion": False}, weights=padded_weights(packed, bn, bk))


class Matvec(Family):
    """A program takes a row of x and some rows of tiles of w."""

    name = "matvec"
    use = "one row of x, decoded weight by weight"

    def why_not(self, product: Product) -> str:
        return "reads and decodes the weight once for every row of x" if product.m > ONE_BY_ONE else ""

    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        """One tile: long along K; if rows are contiguous, a memory sector along N at least, so that programs fill the GPU."""
        kernels, (rows, units) = packed.layout.kernels, tiles.grid_axes(packed)
        if kernels.last == "k":
            bn, bk = tiles.unit_tile("k", rows, units, max(128, tiles.UNITS // kernels.sums))
        else:
            bn = min(128, power(rows), max(8, power(rows // PROGRAMS)))
            bk = min(tiles.UNITS // bn, power(units))
        return [{"BN": bn, "BK": bk, "EVEN": tiles.is_even(packed, bn, bk)}]

    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        return cdiv(tiles.grid_axes(packed)[0], config["BN"]), m

    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        (rows, units), bn, bk = tiles.grid_axes(packed), config["BN"], config["BK"]
        constants = {**unit_constants(packed, bn, bk), "DIVIDES": packed.layout.kernels.divides, "EVEN": config["EVEN"]}
        for part, result in parts(x, out, 1):
            yield Call(matvec, (planes(packed), part, bias, result, *packed.shape, size_arguments(packed),
                                rows, units), constants, self.grid(packed, part.shape[0], config), {"num_warps": WARPS},
                       weights=padded_weights(packed, bn, units), step=padded_weights(packed, bn, bk))


class Gemm(Family):
    """A program takes BN rows of tiles, BK units of K per iteration and BM rows of x; SPLIT of them share K."""

    name = "gemm"
    use = "blocks of 16, 32 or 64 rows of x, decoded weight by weight, in the matrix units of any GPU"
    absent = "is slower than kernels for NVIDIA's matrix units"

    def why_not(self, product: Product) -> str:
        if not configure.has_gemm(product.dtype, product.device):
            return "Triton has no matrix instructions for this GPU"
        return "serves more rows of x" if product.m == 1 else f"serves up to {MOST} rows of x" if product.m > MOST else ""

    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        every = (gemm_config(packed, m, split, device, bm) for bm in (0, *TILES) for split in PARTS)
        return distinct([own for own in every if own is not None])

    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        grid = (cdiv(tiles.grid_axes(packed)[0], config["BN"]), cdiv(m, config["BM"]))
        return (*grid, config["SPLIT"]) if config["SPLIT"] > 1 else grid

    def candidates(self, product: Product) -> list[Candidate]:
        """The default tile; all tiles with counts if the small one is among them, as larger ones spill."""
        packed, arch, ways = product.packed, configure.gpu(product.device).arch, super().candidates(product)
        counted = [costs.has_counts(packed, way, arch) for way in ways]
        spills = any(own and way.config["BM"] == SMALL for way, own in zip(ways, counted, strict=True))
        return [way for way, own in zip(ways, counted, strict=True)
                if way.config["BM"] == ways[0].config["BM"] or (spills and own)]

    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        bn, bk, split, (rows, units) = config["BN"], config["BK"], config["SPLIT"], tiles.grid_axes(packed)
        kernels, grid = packed.layout.kernels, self.grid(packed, x.shape[0], config)
        scratch = scratch_of(grid[0] * grid[1], split * config["BM"] * kernels.sums * bn, x.device) if split > 1 else ()
        yield Call(gemm, (planes(packed), x, bias, out, *(scratch or (None, None)), x.shape[0], *packed.shape,
                          size_arguments(packed), rows, units),
                   {**unit_constants(packed, bn, bk), **config, "DIVIDES": kernels.divides,
                    "F": TYPES[x.dtype]}, grid, {"num_warps": WARPS, "num_stages": 1},
                   weights=padded_weights(packed, bn, cdiv(cdiv(units, bk), split) * bk),
                   step=padded_weights(packed, bn, bk), scratch=scratch)


def gemm_config(packed: PackedWeight, m: int, split: int, device: torch.device, bm: int = 0) -> dict[str, int] | None:
    """The configuration for `split` programs that share K.  bm: 0 for the default.

    None if some program would have no part of K, or if there were too many programs.
    """
    rows, units = tiles.grid_axes(packed)
    has_many_sums = configure.target(device).capability == 10 and packed.shape[1] > TENSOR_SUMS * units
    # Triton 3.6's compiler crashes on a warp group's MMA with the rows of units side by side.
    compiler_crashes = packed.layout.kernels.sums > 1 and release < (3, 7) and configure.target(device).capability == 9
    bm = bm or (16 if m <= 16 or has_many_sums else SMALL if compiler_crashes else 64)
    if compiler_crashes and bm == 64:
        return None
    tall, columns = TILES[bm]
    bk = min(128, max(16, power(columns * units // max(1, packed.shape[1]))))
    tall = min(tall, SMALL_STEP * units // max(1, bk * packed.shape[1])) if bm == SMALL else tall
    bn = max(1, tall // packed.layout.kernels.sums)
    programs, steps = cdiv(rows, bn) * cdiv(m, bm) * split, cdiv(units, bk)
    exceeds_sms = programs > tiles.SPLIT_PROGRAMS * configure.target(device).multiprocessors
    if split > 1 and (exceeds_sms or (split - 1) * cdiv(steps, split) >= steps):
        return None
    return {"BN": bn, "BK": bk, "BM": bm, "SPLIT": split, "EVEN": tiles.is_even(packed, bn, bk)}


# -- arguments of launches ---------------------------------------------------------------------------------------------


def unit_constants(packed: PackedWeight, bn: int, bk: int) -> dict[str, Any]:
    """Constants of a kernel that decodes unit by unit: the storage's function, the tile, and the integer type of offsets."""
    return {**packed.layout.kernels.constants, "BN": bn, "BK": bk, "LARGE": _needs_64_bit_offsets(packed, bn, bk),
            "GAPS": strides.has_gaps(packed)}


def _needs_64_bit_offsets(packed: PackedWeight, bn: int, bk: int) -> bool:
    """Whether an offset needs 64 bits: of a weight or a tensor element, those of partial tiles included."""
    rows, units = tiles.grid_axes(packed)
    n, k = packed.shape
    beyond = cdiv(rows, bn) * bn * cdiv(units, bk) * bk / max(1, rows * units)
    return max((n * k, *map(strides.span, packed.tensors.values()))) * beyond >= 1 << 31


def padded_weights(packed: PackedWeight, rows: int, units: int) -> int:
    """Weights in so many rows of tiles and units of each, without padding."""
    kernels = packed.layout.kernels
    along = [(axis(kernels.rows), rows), (axis(kernels.units), units)]
    return math.prod(min(dim.whole(*packed.shape, packed.sizes), count * dim.by(packed.sizes) // dim.words)
                     for dim, count in along)


def read_tensors(packed: PackedWeight) -> tuple[Tensor | None, ...]:
    """The tensors and tables that unit-by-unit kernels read."""
    return *kernel_tensors(packed), *(table.on(packed.device) for table in packed.layout.kernels.tables)


def planes(packed: PackedWeight) -> tuple[Plane, ...]:
    """The same as kernel arguments: each tensor with its gaps, if the weight has some."""
    read = read_tensors(packed)
    if not strides.has_gaps(packed):
        return read
    return tuple(None if tensor is None else (tensor, *gap) for tensor, gap in zip(read, strides.row_gaps(packed), strict=True))


def size_arguments(packed: PackedWeight) -> tuple[int, ...] | None:
    """Size parameters as a kernel argument; None if there are none, because Triton takes no empty tuple."""
    return tuple(packed.sizes.values()) or None
