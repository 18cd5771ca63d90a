"""q8_0: GGML Q8_0, 8-bit codes with one scale per 32.

    w = d * q
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      i8  [N, K]

    gguf: 8.5 bits per weight
    planar: 8.5 bits per weight

Built from the spec q8_0 (sha256 27e7007f65a4d856) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Field, Format, Kernels, Lanes, Storage, Stored, Variant, as_float, as_type, device, empty,
        lanes, many, pad)
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 34*K/32]."""
    r = blocks.unflatten(-1, (-1, 34))
    return {
        "d": as_type(r, torch.float16)[..., 0],
        "q": as_type(r[..., 2:34], torch.int8).flatten(1),
    }


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 34), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:34] = q.unflatten(-1, (-1, 32)).view(torch.uint8)
    return {
        "blocks": r.flatten(1),
    }


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; d float16 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {
        "d": d,
        "q": as_type(r, torch.int8).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K],
    }


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {
        "q": as_type(r, torch.int32).flatten(1),
        "d": d,
    }


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * q.  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.unflatten(1, (-1, 32))
    return torch.mul(d, as_float(q, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by,
    ties, least.
    """
    q, d = absmax(weight, code="i8", scale="f16", rows=1, columns=32, axes=2,
            **{"divisor": 127, "by": "exact", "ties": "away", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 34 * n.to(tl.int64) * (K // 32)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    out += n.to(tl.int64) * K
    t = k // 32
    h = k % 32
    live = (n < N) & (t < K // 32)
    d = tl.load(blocks_f16 + 17 * t, live, 0).to(tl.float32)
    q = tl.load(blocks + 34 * t + h + 2, live, 0).to(tl.int8, bitcast=True)
    w = d * q
    tl.store(out + k, w, live)


@triton.jit
def _linear_gguf(blocks, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 34 * n.to(tl.int64) * (K // 32)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = k // 32
        h = k % 32
        live = (n < N) & (t < K // 32)
        d = tl.load(blocks_f16 + 17 * t, live, 0).to(tl.float32)
        q = tl.load(blocks + 34 * t + h + 2, live, 0).to(tl.int8, bitcast=True)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += d * q * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, d, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    d += n.to(tl.int64) * (K // 32)
    q += 32 * n.to(tl.int64) * tl.cdiv(K, 128)
    out += n.to(tl.int64) * K
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = (n < N) & (128 * t + 32 * j + 2 * c < K)
    d1 = tl.load(d + 4 * t + j, live, 0).to(tl.float32)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (n < N) & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = ((q_word >> 16 * i + 8 * h & 255).to(tl.int32) ^ 128) - 128
            w = d1 * q1
            tl.store(out + 128 * t + 32 * j + 16 * h + 2 * c + i, w, inside)


@triton.jit
def _linear_planar(q, d, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    d += n.to(tl.int64) * (K // 32)
    q += 32 * n.to(tl.int64) * tl.cdiv(K, 128)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 32 * tl.cdiv(K, 128), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 32
        j = u // 8 % 4
        c = u % 8
        live = (n < N) & (128 * t + 32 * j + 2 * c < K)
        d1 = tl.load(d + 4 * t + j, live, 0).to(tl.float32)
        q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
        for h in tl.static_range(2):
            for i in tl.static_range(2):
                inside = live & (n < N) & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
                q1 = ((q_word >> 16 * i + 8 * h & 255).to(tl.int32) ^ 128) - 128
                x_k = tl.load(x + 128 * t + 32 * j + 16 * h + 2 * c + i, inside, 0).to(tl.float32)
                acc += d1 * q1 * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _words_planar(q, row, K, chunk, more: tl.constexpr = 0):
    """The words of q in a chunk of 128 columns, or in one of those after it."""
    return lanes.words(q, row, K // 64, 2 * chunk, 2 * more), lanes.words(q, row, K // 64, 2 * chunk, 2 * more + 1)


@triton.jit
def _numbers_planar(
    words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr,
):
    """q of pairs i in a half of a chunk, as numbers of type F."""
    code = lanes.field(words[half % 2], 4 * digit + 8 * i, 0, 8 if F == tl.float16 else 4)
    return lanes.numbers(code, flip, True, F)




@triton.jit
def _few_planar(
    q, d, x, bias, out, M, N, K, tiles,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = d * q.

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 128 if F == tl.float16 else 2304
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N)
    if tiles is not None:
        if m >= M:
            return
    x = lanes.token_rows(x, m + g, M, K)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 8, 8, True, F)
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
                d_g = lanes.by_group(d, row, lanes.count(K, 32), chunk, SIZE, 32, 0)
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 8, 8, SIZE, F)
                    if BASE != 0:
                        sum -= BASE * sums[u]
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
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = d * q.

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = 32
    TRIP: tl.constexpr = max(2, STEP // 16)
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 128 if F == tl.float16 else 2304
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 8, 8, True, F)
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
                sum = lanes.product(_numbers_planar, words, columns, flip, 2 * j, STEP // 8, 8, 8, F)
                d_g = lanes.by_column(d, row, lanes.count(K, 32), chunk, K, STEP, 32, 0)
                if BASE != 0:
                    sum -= BASE * sums
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
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = d * q.

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    ZERO: tl.constexpr = -128
    if WHOLE:
        K = WHOLE
    first = tl.program_id(0) * (16 * W * R)
    x, at = many.tile_of_x(x, M, K, BM, SIZE, W, WHOLE)
    flip = lanes.flips(N, 8, 8, True, F)
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
                sum = many.rows_product(_numbers_planar, words, u, columns[u], flip, ZERO,
                                         None, 8, 8, SIZE, F)
                d_g = many.of_rows(d, n, lanes.count(K, 32), chunk * 128 + u * SIZE, 32, 0)
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
        "d": Field("f16", "N", "K/32"),
        "q": Field("i8", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "34*K/32", bits=("d[1@0, 34@1]", "q+16[1@0, 32:1@1 34@1]")),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K", last="k"),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "32*ceil(K/128)", bits=("q[1@0, 2:16 8:4@1 2:8 4:1@1 32@1]",)),
                "d": Stored("f16", "N", "K/32", bits=("d[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, reads=("K",),
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="32*ceil(K/128)", last="k",
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("32",), double=True)),
        ),
    },
    decode=decode, encode=encode,
    options={"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
)

FORMAT = Format(
    name="q8_0", title="GGML Q8_0, 8-bit codes with one scale per 32",
    source="ggml-common.h block_q8_0", formula="d * q",
    variants={(): VARIANT},
    detect={"gguf": "Q8_0"},
    digest="27e7007f65a4d856",
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
