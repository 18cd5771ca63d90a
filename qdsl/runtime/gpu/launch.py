"""Launches of a storage's kernels: arguments from a packed weight, launch configuration from its plan."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qdsl.core.shapes import axis
from qdsl.runtime.gpu import configure, plan, strides
from qdsl.runtime.gpu.costs import Candidate, shared_k
from qdsl.runtime.gpu.kernels import dequantize as dequantize_kernel
from qdsl.runtime.gpu.kernels import eight_bit, gemm, matvec
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.libraries.call import Call, Plane
from qdsl.runtime.libraries.triton import is_installed, tl, triton
from qdsl.runtime.weight import eight, stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.matrix_unit import W8A8
from qdsl.runtime.weight.packed import PackedWeight

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
WARPS = 4
SHORT = 1 << 17                                                  # most columns whose sums of int8 products fit int32
SECOND_AXIS = 65535                                              # limit of the grid's second axis


def dequantize(packed: PackedWeight, out: Tensor) -> None:
    """Run `dequantize`: w [N, K] into out, exact in float32, rounded once for float16 and bfloat16."""
    for call in dequantize_calls(packed, out):
        call.run()


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False) -> None:
    """Run the chosen fused kernel: x [M, K] @ w.T + bias into out [M, N]; x and out are contiguous.

    invariant: a row of x gives the same bits whatever the other rows are.
    """
    for call in linear_calls(x, packed, bias, out, invariant):
        call.run()


def dequantize_calls(packed: PackedWeight, out: Tensor) -> Iterator[Call]:
    """The launches of `dequantize`, for tensors on any device, meta too."""
    if stream_kernels.has_dequantize(packed, out):
        yield from stream_kernels.dequantize_calls(packed, out)
        return
    packed, calls = stream_kernels.decoded(strides.readable(packed))
    yield from calls
    kernels, (rows, units) = packed.layout.kernels, configure.grid_axes(packed)
    if not rows or not units:
        return
    bn, bk = configure.dequantize_tile(kernels, rows, units)
    while cdiv(units, bk) > SECOND_AXIS:                         # for rows of 16 million columns and more
        bn, bk = max(1, bn // 2), 2 * bk
    # Fused multiply-adds would skip a rounding of the decode formula.
    yield Call(dequantize_kernel, (_planes(packed), out, *packed.shape, size_arguments(packed), rows, units),
               {**_constants(packed, bn, bk), **configure.columns_in_order(kernels, bn, bk),
                "EVEN": rows % bn == 0 and units % bk == 0}, (cdiv(rows, bn), cdiv(units, bk)),
               {"num_warps": WARPS, "enable_fp_fusion": False}, weights=_weights(packed, bn, bk))


def linear_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False,
                 candidate: Candidate | None = None) -> Iterator[Call]:
    """The launches of `linear`, for tensors on any device, meta too; candidate: a fused kernel, by default the cheapest."""
    if len(parts := _parts(x, out, 8)) > 1:
        for part, result in parts:
            yield from linear_calls(part, packed, bias, result, invariant, candidate)
        return
    if configure.has_skinny_streams(x, packed):
        yield from stream_kernels.skinny_calls(x, packed, bias, out)
        return
    packed, calls = stream_kernels.decoded(strides.readable(packed))
    yield from calls
    rows, units = configure.grid_axes(packed)
    if not rows or not x.shape[0]:
        return
    if candidate is None:
        choose = plan.invariant if invariant else plan.fused
        candidate = choose(packed, x.shape[0], x.dtype, x.device, is_aligned(x, packed))
    if candidate.kind == "gemm":
        yield _gemm_call(x, packed, bias, out, candidate)
        return
    if candidate.kind != "matvec":
        x = yield from _scaled(x, packed)
        yield _lane_call(x, packed, bias, out, candidate.kind, candidate.config)
        return
    bn, bk = candidate.config["BN"], candidate.config["BK"]
    constants = {**_constants(packed, bn, bk), "DIVIDES": packed.layout.kernels.divides, "EVEN": candidate.config["EVEN"]}
    for part, result in _parts(x, out, 1):
        yield Call(matvec, (_planes(packed), part, bias, result, *packed.shape, size_arguments(packed), rows, units),
                   constants, (cdiv(rows, bn), part.shape[0]), {"num_warps": WARPS},
                   weights=_weights(packed, bn, units), step=_weights(packed, bn, bk))


def grouped(x: Tensor, packed: PackedWeight, tiles: Tensor, bias: Tensor | None, out: Tensor, rows: Tensor | None = None) -> None:
    """Run `skinny` over experts: x [M, K], weight [E * N, K], bias [E, N], out [M, N], all contiguous.

    tiles: int32 [T, 3] of (expert, first row, end of the expert's rows); a program takes up to 8 of these rows.  rows: integers
    [M], the row of x [T, K] for each of the M rows.
    """
    for call in grouped_calls(x, packed, tiles, bias, out, rows):
        call.run()


def grouped_calls(x: Tensor, packed: PackedWeight, tiles: Tensor, bias: Tensor | None, out: Tensor, rows: Tensor | None = None,
                  ) -> Iterator[Call]:
    """The launch of `grouped`, for tensors on any device, meta too; requires fits_matrix_units(x, packed, skinny=True)."""
    if out.numel():
        packed = strides.readable(packed)
        config = configure.lane_tiles(out.shape[1] * cdiv(out.shape[0], 8), x.shape[1], x.device)
        x = yield from _scaled(x, packed)
        yield _few_call(x, packed, bias, out, config, tiles, rows)


def quantized_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, scale: float | None = None,
                    ) -> Iterator[Call]:
    """The launches of `quantized`, for tensors on any device, meta too; requires has_w8a8(x, packed).

    With a static scale torch quantizes x, and all rows have that scale.
    """
    if len(parts := _parts(x, out, 16)) > 1:
        for part, result in parts:
            yield from quantized_calls(part, packed, bias, result, scale)
        return
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None and kernels.w8a8 is not None
    packed = strides.readable(packed)
    w8a8, (m, k), n = kernels.w8a8, x.shape, packed.shape[0]
    if not m or not n:
        return
    x = yield from _scaled(x, packed)
    stored = torch.int8 if w8a8.type == "i8" else torch.float8_e4m3fn if configure.has_fp8(x.device) else torch.float16
    config, warps = configure.w8a8(m, n, k, w8a8, stored == torch.float16, x.device)
    grid, tile = (cdiv(n, config["BN"]), cdiv(m, config["BM"])), config["BN"] * config["BM"]
    trip = eight.CHUNK * config["UNROLL"]
    can = scale is None and stored != torch.float16 and w8a8.groups and config["BM"] == 16 and x.dtype.itemsize == 2
    split, is_one = shared_k(math.prod(grid), config["BN"], config["BM"], k, packed.nbytes, can, configure.gpu(x.device))
    codes, scales, sums = (x, None, None) if is_one else (yield from _quantized(x, w8a8, stored, scale))
    weight = packed.tensors[w8a8.codes]
    weight = weight.view(torch.uint8) if stored == torch.float16 else weight
    scratch = scratch_of(math.prod(grid), split * tile, x.device) if split > 1 else ()
    yield Call(w8a8.kernel, (tuple(_tensors(packed)), weight, codes, scales, sums, bias, out, *(scratch or (None, None)),
                             m, n, k, strides.pitch(packed)),
               {**kernels.constants("w8a8", False, packed.sizes, packed.layout.coded), **config, "SPLIT": split,
                "LARGEST": eight.LARGEST[w8a8.type] if is_one else 0}, (*grid, split) if split > 1 else grid,
               # fused additions would skip a rounding before quantization
               {"num_warps": warps, "num_stages": config["STAGES"], **({"enable_fp_fusion": False} if is_one else {})},
               weights=min(config["BN"], n) * cdiv(k // trip, split) * trip, step=config["BN"] * trip, scratch=scratch)


def _quantized(x: Tensor, w8a8: W8A8, stored: torch.dtype, scale: float | None,
               ) -> Generator[Call, None, tuple[Tensor, Tensor, Tensor | None]]:
    """The launch that quantizes x [M, K]; torch does it for a static scale.  Returns codes, scales and sums of codes."""
    m, k = x.shape
    groups = k // eight.CHUNK if w8a8.groups else 1
    if scale is not None:
        codes, scales = eight.quantized(x, w8a8.type, w8a8.groups, scale)
        codes, scales = codes.to(stored), scales.t().contiguous()
        return codes, scales, codes.view(m, groups, -1).sum(2, dtype=torch.int32).float().t().contiguous() if w8a8.sums else None
    codes = x.new_empty(m, k, dtype=stored)
    scales = x.new_empty(groups, m, dtype=torch.float32)
    sums = torch.empty_like(scales) if w8a8.sums else None
    bytes_ = codes.view(torch.uint8) if stored == torch.float8_e4m3fn else codes
    br, bk = (16, eight.CHUNK) if w8a8.groups else (1, min(4096, configure.power(k)))
    yield Call(eight_bit.quantize, (x, bytes_, scales, sums, m, k, k // groups),
               {"LARGEST": eight.LARGEST[w8a8.type], "BR": br, "BK": bk}, (cdiv(m * groups, br),),
               {"num_warps": WARPS, "enable_fp_fusion": False},                  # fused additions would skip a rounding
               workspace=(codes, scales) if sums is None else (codes, scales, sums))
    return codes, scales, sums


def _scaled(x: Tensor, packed: PackedWeight) -> Generator[Call, None, Tensor]:
    """The launch that multiplies x [M, K] by the weight's column factor, if it has one.  Returns the scaled x."""
    name = packed.layout.factor
    factor = packed.tensors.get(name.removeprefix("/"))
    if factor is None:
        return x
    scaled, columns = torch.empty_like(x), min(1024, configure.power(x.shape[1]))
    yield Call(scale_columns, (x, factor, scaled, x.shape[1]), {"DIVIDES": name.startswith("/"), "BK": columns},
               (x.shape[0], cdiv(x.shape[1], columns)), {"num_warps": WARPS, "enable_fp_fusion": False}, workspace=(scaled,))
    return scaled


def has_w8a8(x: Tensor, packed: PackedWeight) -> bool:
    """Whether `w8a8` serves x [M, K]: whole chunks of columns, sums that fit int32, no NaN codes."""
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or kernels.w8a8 is None or x.dtype not in (*TYPES, torch.float32) or not packed.finite:
        return False
    if not x.shape[1] or x.shape[1] % eight.CHUNK or (kernels.w8a8.type == "i8" and x.shape[1] > SHORT):
        return False
    return all(size % eight.CHUNK == 0 for size in kernels.sizes(packed.sizes)) and all(
        tensor.is_meta or tensor.data_ptr() % 16 == 0 for tensor in (x, *packed.tensors.values()))


def fits_matrix_units(x: Tensor, packed: PackedWeight, skinny: bool = False) -> bool:
    """Whether a kernel for matrix units serves x [M, K], its alignment included.

    skinny: asks for that kernel alone, whatever the number of rows of x.
    """
    if skinny:
        return plan.fits_matrix_units(packed, x.dtype, x.device, is_aligned(x, packed), skinny=True)
    return bool(plan.kinds(packed, x.shape[0], x.dtype, x.device, is_aligned(x, packed)))


def is_aligned(x: Tensor, packed: PackedWeight) -> bool:
    """Whether x and the tensors that matrix-unit kernels read as words are aligned for loads of 16 bytes."""
    wide = [tensor for name, tensor in packed.tensors.items() if tensor.dtype == torch.int32 or _is_words(name, tensor, packed)]
    return all(map(_is_aligned, (x, *wide)))


def _is_words(name: str, tensor: Tensor, packed: PackedWeight) -> bool:
    """Whether a matrix-unit kernel reads a tensor of other elements as words: 8-bit codes, and records."""
    kernels = packed.layout.kernels.matrix_unit
    records = None if kernels is None else kernels.records
    return tensor.shape == packed.shape or (records is not None and name == records.tensor)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor is aligned for loads of 16 bytes, and torch can view it as words."""
    return tensor.is_meta or (tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.element_size() % 4 == 0)


def _lane_call(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, which: str, config: Mapping[str, int]) -> Call:
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None
    (m, k), n = x.shape, packed.shape[0]
    tensors, pitch = _lane_tensors(packed), strides.pitch(packed)
    constants = {**_lane_constants(packed, which, x.dtype, config["R"], bool(config.get("SCALED"))), **config}
    if which == "tile_gemm":
        constants = {"SCALED": 0, **constants}                   # recorded and tuned configurations leave it out
        rows, split = 16 * config["R"] * config["W"], config["SPLIT"]
        grid = (cdiv(n, rows), cdiv(m, config["BM"]))
        scratch = scratch_of(grid[0] * grid[1], split * rows * config["BM"], x.device) if split > 1 else ()
        return Call(kernels.kernel(which), (tensors, x, bias, out, *(scratch or (None, None)), m, n, k, pitch), constants,
                    (*grid, split) if split > 1 else grid,
                    {"num_warps": config["W"], "num_stages": config["STAGES"]},
                    weights=min(rows, n) * cdiv(k // 128, split) * 128, step=rows * 128 * config["UNROLL"], scratch=scratch)
    if which == "gemv":
        early = _early(tensors, pitch)
        return Call(kernels.kernel(which), (tensors, x.view(torch.int32), bias, out, n, k, pitch, early), constants,
                    (cdiv(n, _lane_rows(config)),), _lane_options(config, early),
                    **_lane_weights(config, n, k, kernels.trip(packed.sizes)))
    return _few_call(x, packed, bias, out, config)


def _gemm_call(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, candidate: Candidate) -> Call:
    config, grid = candidate.config, candidate.grid
    bn, bk, split = config["BN"], config["BK"], config["SPLIT"]
    rows, units = configure.grid_axes(packed)
    kernels = packed.layout.kernels
    scratch = scratch_of(grid[0] * grid[1], split * config["BM"] * kernels.sums * bn, x.device) if split > 1 else ()
    return Call(gemm, (_planes(packed), x, bias, out, *(scratch or (None, None)), x.shape[0], *packed.shape,
                       size_arguments(packed), rows, units),
                {**_constants(packed, bn, bk), **config, "DIVIDES": kernels.divides, "F": TYPES[x.dtype]}, grid,
                {"num_warps": WARPS, "num_stages": 1}, weights=_weights(packed, bn, cdiv(cdiv(units, bk), split) * bk),
                step=_weights(packed, bn, bk), scratch=scratch)


def _few_call(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Mapping[str, int],
              tiles: Tensor | None = None, rows: Tensor | None = None) -> Call:
    """The launch of `skinny`, with or without experts; the grid's second axis counts blocks of 8 rows of x."""
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None
    (m, k), n = x.shape, out.shape[1]
    tensors, pitch = _lane_tensors(packed), strides.pitch(packed)
    early = _early(tensors, pitch) if tiles is None else None
    config = {"BM": 8, **config}
    return Call(kernels.kernel("skinny"), (tensors, x.view(torch.int32), bias, out, m, n, k, pitch, tiles, rows, early),
                {**_lane_constants(packed, "skinny", x.dtype), **config, "FENCE": _has_fence(packed, x)},
                (cdiv(n, _lane_rows(config)), cdiv(m, config["BM"]) if tiles is None else tiles.shape[0]),
                _lane_options(config, early),
                **_lane_weights(config, n, k, configure.TRIP))


def _has_fence(packed: PackedWeight, x: Tensor) -> bool:
    """Whether `skinny` keeps its loads in order: on NVIDIA GPUs, unless interpreted; rows of bytes would spill."""
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None and kernels.skinny is not None
    compiles = is_installed and isinstance(kernels.skinny.kernel, triton.JITFunction)
    return compiles and x.device.type != "xpu" and not kernels.skinny.in_order


def _lane_constants(packed: PackedWeight, which: str, dtype: torch.dtype, r: int = 1, is_scaled: bool = False) -> dict[str, Any]:
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None
    own = kernels.constants(which, dtype == torch.float16, packed.sizes, packed.layout.coded, r, is_scaled)
    return {**own, "F": TYPES[dtype]}


def _lane_tensors(packed: PackedWeight) -> tuple[Tensor | None, ...]:
    """A matrix-unit kernel's tensors in storage order, 8-bit codes and records as words; and the tables of group numbers."""
    kernels = packed.layout.kernels.matrix_unit
    return (*(tensor if tensor is None or not _is_words(name, tensor, packed) else tensor.view(torch.int32)
              for name, tensor in zip(packed.layout.coded, _tensors(packed), strict=True)),
            *(table.on(packed.device) for table in (() if kernels is None else kernels.tables)))


def _lane_rows(config: Mapping[str, int]) -> int:
    """Rows of w per program."""
    return 16 * config["R"] * config["WN"]


def _lane_options(config: Mapping[str, int], early: int | None) -> dict[str, Any]:
    return {"num_warps": config["WN"] * config["WK"], "num_stages": 1, **({} if early is None else {"launch_pdl": True})}


def _early(tensors: tuple[Tensor | None, ...], pitch: int | None) -> int | None:
    """Words of a row of codes, which a launch may prefetch before the previous one ends; None if it may not."""
    words = tensors[0]
    may = words is not None and words.dtype == torch.int32 and pitch is None and configure.overlaps(words.device)
    return words.shape[1] if may and words is not None else None


def _lane_weights(config: Mapping[str, int], n: int, k: int, trip: int) -> dict[str, Any]:
    return {"weights": min(_lane_rows(config), n) * k, "step": _lane_rows(config) * trip * config["WK"]}


def _parts(x: Tensor, out: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of x and of out per launch.  The grid's second axis is limited; a program takes at least `rows` rows."""
    if x.shape[0] <= rows * SECOND_AXIS:
        return [(x, out)]
    return list(zip(torch.split(x, rows * SECOND_AXIS), torch.split(out, rows * SECOND_AXIS), strict=True))


def _constants(packed: PackedWeight, bn: int, bk: int) -> dict[str, Any]:
    """Constants of a kernel that decodes unit by unit: the storage's function, the tile, and the integer type of offsets."""
    return {**packed.layout.kernels.constants, "BN": bn, "BK": bk, "LARGE": _is_large(packed, bn, bk),
            "GAPS": strides.has_gaps(packed)}


def _is_large(packed: PackedWeight, bn: int, bk: int) -> bool:
    """Whether an offset needs 64 bits: of a weight or a tensor element, those of partial tiles included."""
    rows, units = configure.grid_axes(packed)
    n, k = packed.shape
    beyond = cdiv(rows, bn) * bn * cdiv(units, bk) * bk / max(1, rows * units)
    return max((n * k, *map(strides.span, packed.tensors.values()))) * beyond >= 1 << 31


def _weights(packed: PackedWeight, rows: int, units: int) -> int:
    """Weights in so many rows of tiles and units of each, without padding."""
    kernels = packed.layout.kernels
    along = [(axis(kernels.rows), rows), (axis(kernels.units), units)]
    return math.prod(min(dim.whole(*packed.shape, packed.sizes), count * dim.by(packed.sizes) // dim.words)
                     for dim, count in along)


def read_tensors(packed: PackedWeight) -> tuple[Tensor | None, ...]:
    """The tensors and tables that unit-by-unit kernels read."""
    return *_tensors(packed), *(table.on(packed.device) for table in packed.layout.kernels.tables)


def _planes(packed: PackedWeight) -> tuple[Plane, ...]:
    """The same as kernel arguments: each tensor with its gaps, if the weight has some."""
    tensors = read_tensors(packed)
    if not strides.has_gaps(packed):
        return tensors
    return tuple(None if tensor is None else (tensor, *gap) for tensor, gap in zip(tensors, strides.gaps(packed), strict=True))


def size_arguments(packed: PackedWeight) -> tuple[int, ...] | None:
    """Size parameters as a kernel argument; None if there are none, because Triton takes no empty tuple."""
    return tuple(packed.sizes.values()) or None


def _tensors(packed: PackedWeight) -> list[Tensor | None]:
    """Kernel arguments in storage order: 8-bit floats as bytes, None for tensors that are absent or add nothing."""
    assert packed.order is None, "kernels take columns as they are stored, and x alike"
    arguments: list[Tensor | None] = []
    for name in packed.layout.coded:
        tensor = packed.tensors.get(name) if name not in packed.in_order else None
        if tensor is not None and tensor.is_floating_point() and tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)
        arguments.append(tensor)
    return arguments
