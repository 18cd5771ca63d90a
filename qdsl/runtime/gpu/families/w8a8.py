"""The family `w8a8`: 8-bit x times 8-bit codes as files store them, where a user asks for x in 8 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from qdsl.runtime.gpu import configure, strides
from qdsl.runtime.gpu.configure import target
from qdsl.runtime.gpu.costs import L2_BYTES, LATENCY, LAUNCH, REACHABLE, merge_seconds
from qdsl.runtime.gpu.devices import Gpu
from qdsl.runtime.gpu.families.family import TYPES, WARPS, kernel_tensors, kernels_of, parts, scale_x
from qdsl.runtime.gpu.kernels import eight_bit
from qdsl.runtime.gpu.kernels.w8a8 import w8a8
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight import eight
from qdsl.runtime.weight.arrays import cdiv, power
from qdsl.runtime.weight.matrix_unit import EightBit
from qdsl.runtime.weight.packed import PackedWeight

SHORT = 1 << 17                                                  # most columns whose sums of int8 products fit int32
QUANTIZE = 12                                                    # instructions per number of x that is quantized, on sm_90
TRIP, LONG_TRIP = 470, 955                                       # cycles per 128 columns: x quantized before, or in the loop
RESIDENT, MOST_SPLIT = 3, 8                                      # programs per SM at a time; the most that share K
LANES = 128                                                      # thread instructions that an SM issues per cycle


def has_quantized(x: Tensor, packed: PackedWeight) -> bool:
    """Whether it serves x [M, K]: whole chunks of columns, sums that fit int32, no NaN codes."""
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or kernels.eight is None or x.dtype not in (*TYPES, torch.float32) or not packed.finite:
        return False
    if not x.shape[1] or x.shape[1] % eight.CHUNK or (kernels.eight.type == "i8" and x.shape[1] > SHORT):
        return False
    return all(size % eight.CHUNK == 0 for size in kernels.sizes(packed.sizes)) and all(
        tensor.is_meta or tensor.data_ptr() % 16 == 0 for tensor in (x, *packed.tensors.values()))


def quantized_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, scale: float | None = None,
                    ) -> Iterator[Call]:
    """The launches that write x @ w.T + bias to out, for tensors on any device, meta too; requires has_quantized(x, packed).

    With a static scale torch quantizes x, and all rows have that scale.
    """
    if len(pieces := parts(x, out, 16)) > 1:
        for part, result in pieces:
            yield from quantized_calls(part, packed, bias, result, scale)
        return
    kernels, packed = kernels_of(packed), strides.gapless_weight(packed)
    own, (m, k), n = kernels.eight, x.shape, packed.shape[0]
    assert own is not None
    if not m or not n:
        return
    x = yield from scale_x(x, packed)
    stored = torch.int8 if own.type == "i8" else torch.float8_e4m3fn if configure.has_fp8(x.device) else torch.float16
    config, warps = configuration(m, n, k, own, stored == torch.float16, x.device)
    grid, tile = (cdiv(n, config["BN"]), cdiv(m, config["BM"])), config["BN"] * config["BM"]
    trip = eight.CHUNK * config["UNROLL"]
    can = scale is None and stored != torch.float16 and own.groups and config["BM"] == 16 and x.dtype.itemsize == 2
    split, is_one = split_of_k(math.prod(grid), config["BN"], config["BM"], k, packed.nbytes, can, configure.gpu(x.device))
    codes, scales, sums = (x, None, None) if is_one else (yield from _quantized(x, own, stored, scale))
    weight = packed.tensors[own.codes]
    weight = weight.view(torch.uint8) if stored == torch.float16 else weight
    scratch = scratch_of(math.prod(grid), split * tile, x.device) if split > 1 else ()
    yield Call(w8a8, (tuple(kernel_tensors(packed)), weight, codes, scales, sums, bias, out, *(scratch or (None, None)),
                      m, n, k, strides.pitch(packed)),
               {**kernels.scaled(packed.sizes, packed.layout.coded), **config, "SPLIT": split,
                "LARGEST": eight.LARGEST[own.type] if is_one else 0}, (*grid, split) if split > 1 else grid,
               # fused additions would skip a rounding before quantization
               {"num_warps": warps, "num_stages": config["STAGES"], **({"enable_fp_fusion": False} if is_one else {})},
               weights=min(config["BN"], n) * cdiv(k // trip, split) * trip, step=config["BN"] * trip, scratch=scratch)


def _quantized(x: Tensor, own: EightBit, stored: torch.dtype, scale: float | None,
               ) -> Generator[Call, None, tuple[Tensor, Tensor, Tensor | None]]:
    """The launch that quantizes x [M, K]; torch does it for a static scale.  Returns codes, scales and sums of codes."""
    m, k = x.shape
    groups = k // eight.CHUNK if own.groups else 1
    if scale is not None:
        codes, scales = eight.quantize_x(x, own.type, own.groups, scale)
        codes, scales = codes.to(stored), scales.t().contiguous()
        return codes, scales, codes.view(m, groups, -1).sum(2, dtype=torch.int32).float().t().contiguous() if own.sums else None
    codes = x.new_empty(m, k, dtype=stored)
    scales = x.new_empty(groups, m, dtype=torch.float32)
    sums = torch.empty_like(scales) if own.sums else None
    bytes_ = codes.view(torch.uint8) if stored == torch.float8_e4m3fn else codes
    br, bk = (16, eight.CHUNK) if own.groups else (1, min(4096, power(k)))
    yield Call(eight_bit.quantize, (x, bytes_, scales, sums, m, k, k // groups),
               {"LARGEST": eight.LARGEST[own.type], "BR": br, "BK": bk}, (cdiv(m * groups, br),),
               {"num_warps": WARPS, "enable_fp_fusion": False},                  # fused additions would skip a rounding
               workspace=(codes, scales) if sums is None else (codes, scales, sums))
    return codes, scales, sums


def split_of_k(tiles: int, rows: int, columns: int, k: int, nbytes: int, quantizes: bool, target: Gpu) -> tuple[int, bool]:
    """The number of programs that share K, and whether they quantize x themselves, by the least modelled time.

    tiles: of out, [rows of w, columns].  nbytes: of the weight, [N, k] codes of 8 bits.  quantizes: programs can quantize x, else
    a separate launch does.  A program has at least 4 chunks of 128 columns; quantizing x makes each slower.
    """
    def modelled(choice: tuple[int, bool]) -> float:
        split, quantizes_x = choice
        per_sm, chunks = cdiv(tiles * split, target.multiprocessors), cdiv(k // 128, split)
        streamed = per_sm * chunks * 128 * (rows + columns) / L2_BYTES
        issued = per_sm * chunks * 128 * (2 * rows + QUANTIZE * columns * quantizes_x) / LANES
        waited = cdiv(per_sm, RESIDENT) * chunks * (LONG_TRIP if quantizes_x else TRIP)
        merged = merge_seconds(split, 4 * rows * columns, tiles, target) if split > 1 else 0.0
        busy = max(streamed, issued, waited) / (target.clock * 1e9)
        return max(nbytes / (REACHABLE * target.bandwidth * 1e9), busy) + merged + (0.0 if quantizes_x else LAUNCH + LATENCY)

    most = min(MOST_SPLIT, max(1, k // 512)) if tiles < target.multiprocessors and target.is_nvidia else 1
    return min(itertools.product(range(1, most + 1), (False, True)[:1 + quantizes]), key=modelled)


def configuration(m: int, n: int, k: int, kernel: EightBit, wide: bool, device: torch.device) -> tuple[dict[str, int], int]:
    """The configuration, BN rows of w and BM rows of x per program, and its warps.  wide: x has 16-bit codes.

    TOKENS: from 64 rows of x on they are the rows of the MMA, so that a thread needs the scales of 2 of them, not 32.  Hopper's
    MMAs take at least 64 rows.  Stages fill 99 KB of shared memory, which every device has.  Iterations of two chunks fill up to
    200 of 227 KB: their program has the SM to itself.
    """
    bm, sms = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 or wide else 128, target(device).multiprocessors
    pairs = not wide and k % 256 == 0 and _takes_pairs(kernel, device)
    if bm < 64 or 4 * cdiv(n, 128) * cdiv(m, bm) < 3 * sms:
        bm = min(bm, 64)
        pairs = pairs and bm == 64 and cdiv(n, 64) * cdiv(m, 64) <= 2 * sms
        return {"BN": 64, "BM": bm, "STAGES": 6 if bm < 64 else 3 if pairs else 4, "TOKENS": int(bm == 64 and not wide),
                "UNROLL": 1 + pairs}, 4
    stages = 4 if bm == 64 and not wide else 3
    return {"BN": 128, "BM": bm, "STAGES": stages, "TOKENS": int(not wide), "UNROLL": 1 + (pairs and bm == 128)}, bm // 16


def _takes_pairs(kernel: EightBit, device: torch.device) -> bool:
    """Whether two chunks per iteration save more than they cost, by counts on sm_90 and sm_100.

    int8 without scales along K is summed in place, so that two programs fit on a Hopper SM.  On Blackwell int8 is multiplied
    outside of the matrix units: a second chunk would spill, and without scales along K it saves nothing.
    """
    capability = target(device).capability
    return (capability == 9 and (kernel.groups or kernel.type != "i8")) or (
        capability == 10 and kernel.groups and kernel.type != "i8")
