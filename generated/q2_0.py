"""q2_0: GGML Q2_0, 2-bit codes around 1 with one scale per 64.

    w = d * (q - 1)
    float32, rounded after each operation

    d      f16 [N, K/64]
    q      u2  [N, K]

    gguf: 2.25 bits per weight
    planar: 2.25 bits per weight

Built from the spec q2_0 (sha256 873b48ad7645a541) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Field, Format, Kernels, Lanes, Storage, Stored, Variant, as_float, as_type, device, empty,
        joined, lanes, many, pad, spread)
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 18*K/64]."""
    r = blocks.unflatten(-1, (-1, 18))
    return {
        "d": as_type(r, torch.float16)[..., 0],
        "q": spread(r[..., 2:18], 2).flatten(1),
    }


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 18), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 16, 4))
    r[..., 2:18] = joined(q_split, 2).squeeze(-1)
    return {
        "blocks": r.flatten(1),
    }


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; d float16 [N, K/64]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {
        "d": d,
        "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2,
            (2, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K],
    }


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4
        | q_split[:, :, 1, :, :, 1] << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {
        "q": as_type(r, torch.int32).flatten(1),
        "d": d,
    }


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (q - 1).  d [N, K/64], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 64))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 64))
    return torch.mul(d, as_float(q - 1, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by,
    ties, least.
    """
    q, d = absmax(weight, code="u2", scale="f16", rows=1, columns=64, axes=2, offset=1,
            **{"divisor": 1, "by": "exact", "ties": "away", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 18 * n.to(tl.int64) * (K // 64)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    out += n.to(tl.int64) * K
    t = u // 16
    i = u % 16
    live = (n < N) & (t < K // 64)
    d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
    for h in tl.static_range(4):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        w = d * (q - 1)
        tl.store(out + 64 * t + 4 * i + h, w, live)


@triton.jit
def _linear_gguf(blocks, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 18 * n.to(tl.int64) * (K // 64)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 4, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        i = u % 16
        live = (n < N) & (t < K // 64)
        d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
        q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
        for h in tl.static_range(4):
            q = (q_word >> 2 * h & 3).to(tl.int32)
            x_k = tl.load(x + 64 * t + 4 * i + h, live, 0).to(tl.float32)
            acc += d * (q - 1) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, d, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    d += n.to(tl.int64) * (K // 64)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 256)
    out += n.to(tl.int64) * K
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = (n < N) & (256 * t + 32 * b + 2 * a < K)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (n < N) & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                    d1 = tl.load(d + 4 * t + 2 * h + b // 2, inside, 0).to(tl.float32)
                    q1 = (q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3).to(tl.int32)
                    w = d1 * (q1 - 1)
                    tl.store(out + 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, w, inside)


@triton.jit
def _linear_planar(q, d, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    d += n.to(tl.int64) * (K // 64)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 256)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 16 * tl.cdiv(K, 256), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        b = u // 4 % 4
        a = u % 4
        live = (n < N) & (256 * t + 32 * b + 2 * a < K)
        q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
        for h in tl.static_range(2):
            for i in tl.static_range(2):
                for j in tl.static_range(2):
                    for c in tl.static_range(2):
                        inside = live & (n < N) & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                        d1 = tl.load(d + 4 * t + 2 * h + b // 2, inside, 0).to(tl.float32)
                        q1 = (q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3).to(tl.int32)
                        x_k = tl.load(x + 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a
                            + c, inside, 0).to(tl.float32)
                        acc += d1 * (q1 - 1) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _words_planar(q, row, K, chunk, more: tl.constexpr = 0):
    """The words of q in a chunk of 128 columns, or in one of those after it."""
    return lanes.words(q, row, tl.cdiv(K, 256), chunk // 2, more // 2),


@triton.jit
def _numbers_planar(
    words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr,
):
    """q of pairs i in a half of a chunk, as numbers of type F."""
    code = lanes.field(words[0], 2 * half + 8 * i, to, 2)
    return lanes.numbers(code, flip, False, F)




@triton.jit
def _few_planar(
    q, d, x, bias, out, M, N, K, tiles,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = d * (q - 1.0).

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 0 if F == tl.float16 else 128
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N)
    if tiles is not None:
        if m >= M:
            return
    x = lanes.token_rows(x, m + g, M, K)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 2, 2, False, F)
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
                d_g = lanes.by_group(d, row, lanes.count(K, 64), chunk, SIZE, 64, 0)
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 2, 2, SIZE, F)
                    sum += (-1.0 - BASE) * sums[u]
                    sum *= d_g[u]
                    total += sum
                new = new + (total,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_columns(sum * UNIT, bias, out, m, M, start, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _row_planar(
    q, d, x, bias, out, N, K,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = d * (q - 1.0).

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = 64
    TRIP: tl.constexpr = max(2, STEP // 16)
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 0 if F == tl.float16 else 128
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 2, 2, False, F)
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
                sum = lanes.product(_numbers_planar, words, columns, flip, 2 * j, STEP // 8, 2, 2, F)
                d_g = lanes.by_column(d, row, lanes.count(K, 64), chunk, K, STEP, 64, 0)
                sum += (-1.0 - BASE) * sums
                sum *= d_g
                new = new + (acc[r] + sum,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_row(sum * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _many_planar(
    q, d, x, bias, out, M, N, K,
    R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = d * (q - 1.0).

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    ZERO: tl.constexpr = -1 if F == tl.float16 else -129
    if WHOLE:
        K = WHOLE
    first = tl.program_id(0) * (16 * W * R)
    x, at = many.tile_of_x(x, M, K, BM, SIZE, W, WHOLE)
    flip = lanes.flips(N, 2, 2, False, F)
    acc = many.tiles(R, 16 * W, BM)
    for chunk in tl.range(0, K // 128, num_stages=STAGES, loop_unroll_factor=UNROLL):
        columns = many.parts(x + chunk * 128, at, SIZE)
        new = ()
        for r in tl.static_range(R):
            row = many.rows_of_tile(first + 16 * W * r, W, N, WHOLE)
            n = many.tile_of_rows(first + 16 * W * r, W, N, WHOLE)
            words = lanes.by_size(many.turned(_words_planar(q, row, K, chunk), chunk, 4, 0, 0), SIZE)
            total = acc[r]
            for u in tl.static_range(128 // SIZE):
                sum = many.rows_product(_numbers_planar, words, u, columns[u], flip, ZERO,
                                         None, 2, 2, SIZE, F)
                d_g = many.of_rows(d, n, lanes.count(K, 64), chunk * 128 + u * SIZE, 64, 0)
                sum *= d_g
                total += sum
            new = new + (total,)
        acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        many.store_tile(sum * UNIT, bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "d": Field("f16", "N", "K/64"),
        "q": Field("u2", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "18*K/64", bits=("d[1@0, 18@1]", "q+16[1@0, 4:2 16:1@1 18@1]")),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/4", last="k"),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "16*ceil(K/256)", bits=("q[1@0, 2:16 4:4@1 2:2 2:8 4:1@1 2:4 16@1]",)),
                "d": Stored("f16", "N", "K/64", bits=("d[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, reads=("K",),
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="16*ceil(K/256)", last="k",
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("64",))),
        ),
    },
    decode=decode, encode=encode,
    options={"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
)

FORMAT = Format(
    name="q2_0", title="GGML Q2_0, 2-bit codes around 1 with one scale per 64",
    source="ggml-common.h block_q2_0", formula="d * (q - 1)",
    variants={(): VARIANT},
    detect={"gguf": "Q2_0"},
    digest="873b48ad7645a541",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
requantize = FORMAT.requantize
planar = FORMAT.planar
linear = FORMAT.linear
grouped_linear = FORMAT.grouped_linear
Linear = FORMAT.Linear
Embedding = FORMAT.Embedding
