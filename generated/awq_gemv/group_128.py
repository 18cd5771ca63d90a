"""awq_gemv at group = 128: AWQ for gemv kernels, 4-bit codes with a zero point and a scale per group, groups padded to 1024 columns.

    w = (q - z) * s
    float32, rounded after each operation

    q      u4  [N, K]
    z      u4  [N, ceil(K/128)]
    s      f16 [N, ceil(K/128)]

    gemv: 4.15625 bits per weight
    planar: 4.1875 bits per weight

Built from the spec awq_gemv (sha256 9e88c9fd36608e2d) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.encode import minmax
from qdsl.runtime import (Field, Kernels, Lanes, Storage, Stored, Variant, as_float, as_type, cdiv, device, joined,
        lanes, many, pad, spread)


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gemv(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of qweight int32 [N, K/8]; qzeros int32 [N, ceil(K/1024)]; scales float16 [N, 8*ceil(K/1024)]."""
    qweight_bytes = as_type(qweight, torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros, torch.uint8).unflatten(-1, (-1, 4))
    scales_bytes = as_type(scales, torch.uint8).unflatten(-1, (-1, 16))
    return {
        "q": spread(qweight_bytes, 4).flatten(1),
        "z": spread(qzeros_bytes, 4).flatten(1)[:, :cdiv(K, 128)],
        "s": as_type(scales_bytes, torch.float16).flatten(1)[:, :cdiv(K, 128)],
    }


def pack_gemv(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_gemv."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qweight_bytes = joined(q_split, 4).squeeze(-1)
    z_split = pad(z, (0, -z.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 4, 2))
    qzeros_bytes = joined(z_split, 4).squeeze(-1)
    scales_bytes = as_type(pad(s, (0, -s.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 8)).unsqueeze(-1),
        torch.uint8).flatten(2)
    return {
        "qweight": as_type(qweight_bytes, torch.int32).squeeze(-1),
        "qzeros": as_type(qzeros_bytes, torch.int32).squeeze(-1),
        "scales": as_type(scales_bytes, torch.float16).flatten(1),
    }


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s float16 [N, ceil(K/128)]; z uint8 [N, ceil(K/128)]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    return {
        "q": torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K],
        "z": z & 15,
        "s": s,
    }


def pack_planar(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    z_bytes = torch.zeros(z.shape[0], z.shape[1], 1, dtype=torch.uint8, device=z.device)
    z_bytes[...] = z.unsqueeze(-1)
    return {
        "q": as_type(q_bytes, torch.int32).flatten(1),
        "s": s,
        "z": z_bytes.squeeze(-1),
    }


def decode(q: Tensor, z: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], z [N, ceil(K/128)], s [N,
    ceil(K/128)].
    """
    out = out if out is None else out.unflatten(1, (z.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (z.shape[1], -1))
    z = z.view(torch.int8).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code
    of 0.  options: by, symmetric, rounds, span.
    """
    q, z, s = minmax(weight, code="u4", zero="u4", scale="f16", rows=1, columns=128, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gemv(qweight, qzeros, scales, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    t = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    qweight += n.to(tl.int64) * (K // 8)
    qzeros += n.to(tl.int64) * tl.cdiv(K, 1024)
    scales += 8 * n.to(tl.int64) * tl.cdiv(K, 1024)
    out += n.to(tl.int64) * K
    live = (n < N) & (t < K // 8)
    q_word = tl.load(qweight + t, live, 0)
    z = (tl.load(qzeros + t // 16 // 8, live, 0) >> 4 * (t // 16 % 8) & 15).to(tl.int32)
    s = tl.load(scales + 8 * (t // 16 // 8) + t // 16 % 8, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        w = (q - z) * s
        tl.store(out + 8 * t + h, w, live)


@triton.jit
def _linear_gemv(qweight, qzeros, scales, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    qweight += n.to(tl.int64) * (K // 8)
    qzeros += n.to(tl.int64) * tl.cdiv(K, 1024)
    scales += 8 * n.to(tl.int64) * tl.cdiv(K, 1024)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 8, BK):
        t = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (t < K // 8)
        q_word = tl.load(qweight + t, live, 0)
        z = (tl.load(qzeros + t // 16 // 8, live, 0) >> 4 * (t // 16 % 8) & 15).to(tl.int32)
        s = tl.load(scales + 8 * (t // 16 // 8) + t // 16 % 8, live, 0).to(tl.float32)
        for h in tl.static_range(8):
            q = (q_word >> 4 * h & 15).to(tl.int32)
            x_k = tl.load(x + 8 * t + h, live, 0).to(tl.float32)
            acc += (q - z) * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, s, z, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 128)
    z += n.to(tl.int64) * tl.cdiv(K, 128)
    s += n.to(tl.int64) * tl.cdiv(K, 128)
    out += n.to(tl.int64) * K
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = (n < N) & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    z1 = (tl.load(z + t, live, 0) & 15).to(tl.int32)
    s1 = tl.load(s + t, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (n < N) & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            w = (q1 - z1) * s1
            tl.store(out + 128 * t + 32 * j + 8 * h + 2 * c + i, w, inside)


@triton.jit
def _linear_planar(q, s, z, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 128)
    z += n.to(tl.int64) * tl.cdiv(K, 128)
    s += n.to(tl.int64) * tl.cdiv(K, 128)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 16 * tl.cdiv(K, 128), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        j = u // 4 % 4
        c = u % 4
        live = (n < N) & (128 * t + 32 * j + 2 * c < K)
        q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
        z1 = (tl.load(z + t, live, 0) & 15).to(tl.int32)
        s1 = tl.load(s + t, live, 0).to(tl.float32)
        for h in tl.static_range(4):
            for i in tl.static_range(2):
                inside = live & (n < N) & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
                q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
                x_k = tl.load(x + 128 * t + 32 * j + 8 * h + 2 * c + i, inside, 0).to(tl.float32)
                acc += (q1 - z1) * s1 * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _words_planar(q, row, K, chunk, more: tl.constexpr = 0):
    """The words of q in a chunk of 128 columns, or in one of those after it."""
    return lanes.words(q, row, K // 128, chunk, more),


@triton.jit
def _numbers_planar(
    words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr,
):
    """q of pairs i in a half of a chunk, as numbers of type F."""
    code = lanes.field(words[0], 4 * (half % 2) + 8 * i, to, 4)
    return lanes.numbers(code, flip, False, F)




@triton.jit
def _few_planar(
    q, s, z, x, bias, out, M, N, K, tiles,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = s * (q - z).

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 128
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 0 if F == tl.float16 else 128
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N)
    if tiles is not None:
        if m >= M:
            return
    x = lanes.token_rows(x, m + g, M, K)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 4, 4, False, F)
    acc = lanes.zeros(R, WN * WK)
    for step in range(0, tl.cdiv(K, 256 * WK)):
        for j in tl.static_range(2):
            chunk = (step * WK + w % WK) * 2 + j
            columns, sums = lanes.tokens(x, chunk, K // 128, c, SIZE, UNIT, EVEN, F)
            chunk = lanes.within(chunk, K // 128)
            new = ()
            for r in tl.static_range(R):
                row = lanes.rows(first + 16 * r, N, start)
                words = lanes.by_size(_words_planar(q, row, K, chunk), SIZE)
                s_g = lanes.by_group(s, row, lanes.count(K, 128), chunk, SIZE, 128, 0)
                z_g = lanes.by_group(z, row, lanes.count(K, 128), chunk, SIZE, 128, 4)
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 4, 4, SIZE, F)
                    sum += lanes.shifted(-z_g[u], BASE) * sums[u]
                    sum *= s_g[u]
                    total += sum
                new = new + (total,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_columns(sum * UNIT, bias, out, m, M, start, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _row_planar(
    q, s, z, x, bias, out, N, K,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = s * (q - z).

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = 64
    TRIP: tl.constexpr = max(2, STEP // 16)
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 0 if F == tl.float16 else 128
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 4, 4, False, F)
    acc = lanes.zeros(R, WN * WK)
    for step in range(0, tl.cdiv(K, 128 * TRIP * WK)):
        for j in tl.static_range(32 // min(32, STEP)):
            chunk = (step * WK + w % WK) * TRIP + j
            columns, sums = lanes.groups(x, chunk, K, g, c, STEP, UNIT, EVEN, F)
            chunk = lanes.within(chunk, K // 128)
            new = ()
            for r in tl.static_range(R):
                row = lanes.rows(first + 16 * r, N)
                words = ()
                for t in tl.static_range(STEP // 16):
                    words = words + (_words_planar(q, row, K, lanes.after(chunk, t, K // 128, EVEN), t if EVEN else 0),)
                sum = lanes.product(_numbers_planar, words, columns, flip, 2 * j, STEP // 8, 4, 4, F)
                s_g = lanes.by_column(s, row, lanes.count(K, 128), chunk, K, STEP, 128, 0)
                z_g = lanes.by_column(z, row, lanes.count(K, 128), chunk, K, STEP, 128, 4)
                sum += lanes.shifted(-z_g, BASE) * sums
                sum *= s_g
                new = new + (acc[r] + sum,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_row(sum * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _many_planar(
    q, s, z, x, bias, out, M, N, K,
    R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = s * (q - z).

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 128
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    ZERO: tl.constexpr = 0
    if WHOLE:
        K = WHOLE
    first = tl.program_id(0) * (16 * W * R)
    x, at = many.tile_of_x(x, M, K, BM, SIZE, W, WHOLE)
    flip = lanes.flips(N, 4, 4, False, F)
    acc = many.tiles(R, 16 * W, BM)
    for chunk in tl.range(0, K // 128, num_stages=STAGES, loop_unroll_factor=UNROLL):
        columns = many.parts(x + chunk * 128, at, SIZE)
        new = ()
        for r in tl.static_range(R):
            row = many.rows_of_tile(first + 16 * W * r, W, N, WHOLE)
            n = many.tile_of_rows(first + 16 * W * r, W, N, WHOLE)
            words = lanes.by_size(_words_planar(q, row, K, chunk), SIZE)
            total = acc[r]
            for u in tl.static_range(128 // SIZE):
                point = many.points(z, row, lanes.count(K, 128), chunk * 128 + u * SIZE, 128, SIZE, F)
                sum = many.rows_product(_numbers_planar, words, u, columns[u], flip, ZERO,
                                         point, 4, 4, SIZE, F)
                s_g = many.of_rows(s, n, lanes.count(K, 128), chunk * 128 + u * SIZE, 128, 0)
                sum *= s_g
                total += sum
            new = new + (total,)
        acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        many.store_tile(sum * UNIT, bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "q": Field("u4", "N", "K"),
        "z": Field("u4", "N", "ceil(K/128)"),
        "s": Field("f16", "N", "ceil(K/128)"),
    },
    storages={
        "gemv": Storage(
            tensors={
                "qweight": Stored("i32", "N", "K/8", bits=("q[1@0, 8:4 1@1]",)),
                "qzeros": Stored("i32", "N", "ceil(K/1024)", bits=("z[1@0, 8:4 1@1]",)),
                "scales": Stored("f16", "N", "8*ceil(K/1024)", bits=("s[1@0, 8:1@1 8@1]",)),
            },
            unpack=unpack_gemv, pack=pack_gemv, needs_shape=True,
            kernels=Kernels(_dequantize_gemv, _linear_gemv, rows="N", units="K/8", last="k"),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "16*ceil(K/128)", bits=("q[1@0, 2:16 4:4@1 4:4 4:1@1 16@1]",)),
                "s": Stored("f16", "N", "ceil(K/128)", bits=("s[1@0, 1@1]",)),
                "z": Stored("u8", "N", "ceil(K/128)", bits=("z[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, needs_shape=True,
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="16*ceil(K/128)", last="k",
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("128",))),
        ),
    },
    decode=decode, encode=encode,
    options={"by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum"),
        "span": ("found", "full")},
    cuts=("N", "ceil(K/128)"),
)
