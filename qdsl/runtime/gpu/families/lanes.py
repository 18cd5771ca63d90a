"""Families for NVIDIA's matrix units: `gemv` for one row of x, `skinny` for few, and `tile_gemm` for many.

A program of the first two takes R tiles of 16 rows of w for each of WN warps; WK warps share K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdsl.runtime.gpu import configure, costs, strides
from qdsl.runtime.gpu.configure import target
from qdsl.runtime.gpu.families.family import TYPES, Config, MatrixUnitFamily, Product, distinct, kernels_of, lane_tensors, scale_x
from qdsl.runtime.gpu.kernels.gemv import gemv
from qdsl.runtime.gpu.kernels.gemv_records import gemv_records
from qdsl.runtime.gpu.kernels.skinny import skinny
from qdsl.runtime.gpu.kernels.tile_gemm import tile_gemm
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.gpu.tiles import MOST_PARTS, SPLIT_PROGRAMS, TRIP, lane_tile, lane_tiles
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import is_installed, triton
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.matrix_unit import MatrixUnitKernels
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.target import Candidate

RAW = 126                                                        # the exponent of the factor that raw numbers lack
RUNS, LONGEST = 8, 64                                            # columns of the MMA; most columns of w in one of them


class Gemv(MatrixUnitFamily):
    """One row of x, for groups of columns whose numbers vary along K; groups are the columns of the MMA.

    raw, of a storage: numbers of codes in bfloat16 without their last step, a product with 2^RAW; x is scaled by it.
    """

    name = "gemv"
    use = "one row of x, in matrix units"
    rows = (1, 1)

    def trip(self, packed: PackedWeight) -> int:
        """Columns of w per warp in one iteration."""
        kernels = kernels_of(packed)
        return 256 if kernels.records is not None else max(256, RUNS * min([LONGEST, *kernels.sizes(packed.sizes)]))

    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        (n, k), trip = packed.shape, self.trip(packed)
        # By counts, two warps are never the fastest.
        return distinct([lane_tiles(n, k, device, trip),
                         *(lane_tile(r, wk, k, trip) for r in (2, 1) for wk in (8, 4, 1) if trip * wk <= k)])

    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        return (cdiv(packed.shape[0], lane_rows(config)),)

    def constants(self, kernels: MatrixUnitKernels, is_half: bool, sizes: Mapping[str, int], tensors: Sequence[str], r: int = 1,
                  ) -> dict[str, Any]:
        """Constants of the kernel.  r: tiles of rows per warp: scaling x pays if several share it."""
        loaded, raw = kernels.constants(is_half, sizes, tensors), kernels.families[self.name].get("raw")
        if kernels.records is not None:
            return loaded
        lifted = {"numbers": raw, "LIFT": RAW} if raw is not None and not is_half and r > 1 else {"LIFT": 0}
        return {**loaded, **lifted, "STEP": min([LONGEST, *kernels.sizes(sizes)])}

    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        kernels, (n, k) = kernels_of(packed), packed.shape
        x = yield from scale_x(x, packed)
        tensors, pitch = lane_tensors(packed), strides.pitch(packed)
        first = prefetch_words(tensors, pitch)
        constants = self.constants(kernels, x.dtype == torch.float16, packed.sizes, packed.layout.coded, config["R"])
        yield Call(gemv if kernels.records is None else gemv_records,
                   (tensors, x.view(torch.int32), bias, out, n, k, pitch, first),
                   {**constants, "F": TYPES[x.dtype], **config}, self.grid(packed, 1, config),
                   lane_options(config, first), **lane_weights(config, n, k, self.trip(packed)))


class Skinny(MatrixUnitFamily):
    """Blocks of BM rows of x, or 8 of each expert; rows of x are the columns of the MMA."""

    name = "skinny"
    use = "blocks of 8 or 16 rows of x, in matrix units"

    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        (n, k), trip = packed.shape, TRIP
        tiles = [lane_tiles(n, k, device), *(lane_tile(r, wk, k, trip) for r in (2, 1) for wk in (8, 4, 2, 1) if trip * wk <= k)]
        return distinct([*tiles, *({**config, "BM": 16} for config in tiles if m > 8)])

    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        return cdiv(packed.shape[0], lane_rows(config)), cdiv(m, config.get("BM", 8))

    def constants(self, kernels: MatrixUnitKernels, is_half: bool, sizes: Mapping[str, int], tensors: Sequence[str],
                  ) -> dict[str, Any]:
        return {**kernels.constants(is_half, sizes, tensors), "SIZE": kernels.columns_per_sum(sizes), "ONES": kernels.sums.ones,
                "IN_ORDER": kernels.codes.in_order}

    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        return self.grouped_calls(x, packed, bias, out, config)

    def grouped_calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config,
                      tiles: Tensor | None = None, rows: Tensor | None = None) -> Iterator[Call]:
        """The same, or for experts: tiles of their rows, int32 [T, 3], and the row of x for each of the rows, if not in order."""
        x = yield from scale_x(x, packed)
        kernels, (m, k), n = kernels_of(packed), x.shape, out.shape[1]
        tensors, pitch = lane_tensors(packed), strides.pitch(packed)
        first = prefetch_words(tensors, pitch) if tiles is None else None
        config = {"BM": 8, **config}
        # A fence keeps loads in order: on NVIDIA GPUs, unless interpreted; rows of bytes would spill.
        compiles = is_installed and isinstance(skinny, triton.JITFunction)
        yield Call(skinny, (tensors, x.view(torch.int32), bias, out, m, n, k, pitch, tiles, rows, first),
                   {**self.constants(kernels, x.dtype == torch.float16, packed.sizes, packed.layout.coded),
                    "F": TYPES[x.dtype], **config,
                    "FENCE": compiles and x.device.type != "xpu" and not kernels.codes.in_order},
                   (cdiv(n, lane_rows(config)), cdiv(m, config["BM"]) if tiles is None else tiles.shape[0]),
                   lane_options(config, first), **lane_weights(config, n, k, TRIP))


def prefetch_words(tensors: tuple[Tensor | None, ...], pitch: int | None) -> int | None:
    """Words of a row of codes, which a launch may prefetch before the previous one ends; None if it may not."""
    words = tensors[0]
    may = words is not None and words.dtype == torch.int32 and pitch is None and configure.launches_overlap(words.device)
    return words.shape[1] if may and words is not None else None


def lane_rows(config: Mapping[str, int]) -> int:
    """Rows of w per program of a kernel with WN warps side by side."""
    return 16 * config["R"] * config["WN"]


def lane_options(config: Mapping[str, int], early: int | None) -> dict[str, Any]:
    """Options of the compiler for such a kernel."""
    return {"num_warps": config["WN"] * config["WK"], "num_stages": 1, **({} if early is None else {"launch_pdl": True})}


def lane_weights(config: Mapping[str, int], n: int, k: int, trip: int) -> dict[str, Any]:
    """The weights that a program of such a kernel takes, and those of an iteration.  trip: columns of a warp per iteration."""
    return {"weights": min(lane_rows(config), n) * k, "step": lane_rows(config) * trip * config["WK"]}


# -- many rows of x ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TallTile:
    """A tile of R * 16 * W rows of w and 128 rows of x, for 4-bit codes in groups of 128 columns or more.

    unroll: chunks per iteration.  whole: only for shapes without partial tiles.  count: thread instructions per weight in the
    loop on sm_90; times that follow from it are predicted.
    """

    R: int
    W: int
    unroll: int
    whole: bool
    count: float


TALL = (TallTile(2, 8, 1, True, 3.1), TallTile(2, 4, 1, True, 3.3), TallTile(1, 4, 2, True, 3.5), TallTile(1, 4, 2, False, 3.7))
# Tiles for scaled weights by compute capability: R and rows of x, as counts and modelled times chose them.
SCALED = {8: ((2, 32), (2, 64)), 9: ((1, 64), (2, 64), (1, 128)), 10: ((2, 64), (1, 128)), 12: ((2, 32),)}


@dataclass(frozen=True, slots=True)
class TileOptions:
    """What a storage says to `tile_gemm`.

    zero: the number that is added to codes, for float16 and bfloat16; exact: this subtracts their zero point, or `point` does,
    the index in group_fields of a zero point.  sums: it needs the sums of x.  spans: by plane, how many bits higher the second
    chunk of a span is.  tall: it can keep sums of 128 rows of x in registers for groups of 128 columns or more; else of 64.
    """

    point: int | None = None
    zero: tuple[int, int] = (0, -128)
    exact: bool = False
    sums: bool = False
    spans: tuple[int, ...] = (0, 0, 0)
    tall: bool = False

    def __post_init__(self) -> None:
        if self.point is not None and not self.exact:
            raise ValueError("a kernel that subtracts the zero point of groups has exact codes")


class TileGemm(MatrixUnitFamily):
    """Many rows of x from shared memory, and tiles of w that are decoded once for all of them.

    A program takes R tiles of 16 rows of w for each of W warps, and BM rows of x; SPLIT programs share K.
    """

    name = "tile_gemm"
    use = "tiles of 16 to 128 rows of x, decoded once per tile"
    rows = (2, 0)

    def why_not(self, product: Product) -> str:
        runs = target(product.device).capability >= 8            # also of an assumed device
        return super().why_not(product) or ("" if runs else "are for NVIDIA's GPUs from Ampere on")

    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        (n, k), is_hopper = packed.shape, target(device).capability == 9
        if m > 64 and is_tall(packed) and is_hopper:
            configs = _tall_tiles(m, n, k, device)
        else:
            rule = _default_tile(min(m, most_columns(packed)), n, device)
            # 2 and 4 stages would save 5 % at most by counts; 2 took longer than modelled on an H100.  Warps of other GPUs than
            # Hopper's repeat their loads of x for each other.
            fewer = () if is_hopper else (16,)
            tiles = dict.fromkeys((rule["BM"], min(32, rule["BM"]), *fewer))
            configs = distinct([rule, *({**rule, "R": r, "BM": bm} for bm in tiles for r in (1, 2))])
        configs += scaled_tile_configs(packed, m, device)
        return [{**config, "SPLIT": split} for split in range(1, MOST_PARTS + 1) for config in configs
                if split == 1 or _may_split(config, split, m, n, k, device)]

    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        grid = (cdiv(packed.shape[0], 16 * config["R"] * config["W"]), cdiv(m, config["BM"]))
        return (*grid, config["SPLIT"]) if config["SPLIT"] > 1 else grid

    def has_registers(self, candidate: Candidate, packed: PackedWeight, arch: str) -> bool:
        """The same; needs counts, unless the matrix unit is Hopper's."""
        is_counted = costs.counted_on(costs.storage_key(packed), self.name, arch) is not None
        return (is_counted or arch == "sm_90") and super().has_registers(candidate, packed, arch)

    def rows_without_counts(self, packed: PackedWeight) -> int:
        return 32 if has_short_groups(packed) else 128

    def constants(self, kernels: MatrixUnitKernels, is_half: bool, sizes: Mapping[str, int], tensors: Sequence[str],
                  is_scaled: bool = False) -> dict[str, Any]:
        """Constants of the kernel.  is_scaled: it rounds scaled weights."""
        options, place, codes = TileOptions(**kernels.families[self.name]), int(not is_half), kernels.codes
        constants = {**kernels.constants(is_half, sizes, tensors), "SIZE": kernels.columns_per_sum(sizes),
                     "BASE": None if options.exact else 0, "POINT": options.point, "ZERO": options.zero[place],
                     "ONES": options.sums, "SPANS": options.spans}
        if not is_scaled:
            return constants
        base = (0 if codes.signed else -128) if codes.bits == 8 and not is_half else codes.base[place]     # lanes.whole_bytes
        return {**constants, "POINT": None, "BASE": base, "ONES": bool(base or options.exact or options.sums)}

    def loads_ahead(self, constants: Mapping[str, Any], device: torch.device) -> bool:
        """Whether an iteration loads the next chunk's scales: on Blackwell, whose loop waits for each product before them.

        Not where groups are shorter: by counts nothing is saved.  Not where weights are scaled, which always does.
        """
        return constants["scale"] is not None and constants["SIZE"] == 128 and target(device).capability == 10

    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        x = yield from scale_x(x, packed)
        (m, k), n, split = x.shape, packed.shape[0], config["SPLIT"]
        rows, (blocks, columns, *_) = 16 * config["R"] * config["W"], self.grid(packed, m, config)
        constants = self.constants(kernels_of(packed), x.dtype == torch.float16, packed.sizes, packed.layout.coded,
                                   bool(config.get("SCALED")))
        scratch = scratch_of(blocks * columns, split * rows * config["BM"], x.device) if split > 1 else ()
        # Recorded and tuned configurations leave SCALED out.
        yield Call(tile_gemm, (lane_tensors(packed), x, bias, out, *(scratch or (None, None)), m, n, k,
                               strides.pitch(packed)),
                   {"SCALED": 0, **constants, "F": TYPES[x.dtype], **config,
                    "AHEAD": not config.get("SCALED") and self.loads_ahead(constants, x.device)},
                   self.grid(packed, m, config), {"num_warps": config["W"], "num_stages": config["STAGES"]},
                   weights=min(rows, n) * cdiv(k // 128, split) * 128, step=rows * 128 * config["UNROLL"], scratch=scratch)


def scaled_tile_configs(packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
    """Tiles for scaled weights, if groups have sums of their own: else nothing is scaled before the last sum."""
    if kernels_of(packed).sums.scale is None:
        return []
    return [{"R": r, "W": 4, "BM": bm, "STAGES": 3, "UNROLL": 1, "WHOLE": 0, "SCALED": 1}
            for r, bm in SCALED.get(target(device).capability, ()) if bm < 2 * m]


def _may_split(config: dict[str, int], split: int, m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `split` programs may share K: all fit on the SMs at once, and each has a chunk of K."""
    tiles, chunks = cdiv(n, 16 * config["R"] * config["W"]) * cdiv(m, config["BM"]), k // 128
    return tiles * split <= SPLIT_PROGRAMS * target(device).multiprocessors and (split - 1) * cdiv(chunks, split) < chunks


def _default_tile(m: int, n: int, device: torch.device) -> dict[str, int]:
    """The default tile: R tiles of 64 rows of w and BM rows of x per program."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    r = 2 if (4 if bm < 64 else 2) * cdiv(n, 128) >= target(device).multiprocessors else 1
    return {"R": r, "W": 4, "BM": bm, "STAGES": 3, "UNROLL": 1, "WHOLE": 0}


def most_columns(packed: PackedWeight) -> int:
    """The most rows of x per program."""
    return 128 if is_tall(packed) else 64


def has_short_groups(packed: PackedWeight) -> bool:
    """Whether groups have fewer columns than a chunk: their sums take more registers."""
    return min(kernels_of(packed).sizes(packed.sizes), default=128) < 128


def is_tall(packed: PackedWeight) -> bool:
    """Whether a program may take 128 rows of x."""
    return bool(kernels_of(packed).families.get(TileGemm.name, {}).get("tall")) and not has_short_groups(packed)


def _tall_tiles(m: int, n: int, k: int, device: torch.device) -> list[dict[str, int]]:
    """Configurations for more than 64 rows of x, by the instructions of the busiest multiprocessor."""
    def cost(tile: TallTile) -> float:
        rows = 16 * tile.R * tile.W
        return cdiv(cdiv(n, rows) * cdiv(m, 128), target(device).multiprocessors) * rows * tile.count

    fit = [tile for tile in TALL if not tile.whole or (m % 128 == 0 and n % (16 * tile.R * tile.W) == 0)]
    return [{"R": tile.R, "W": tile.W, "BM": 128, "STAGES": 2, "UNROLL": tile.unroll, "WHOLE": k if tile.whole else 0}
            for tile in sorted(fit, key=cost)]
