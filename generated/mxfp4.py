"""mxfp4: GGML MXFP4, 4-bit floats with a power of two per 32.

    w = e * level[q]
    float32, rounded after each operation

    e      e8m0h [N, K/32]
    q      u4    [N, K]

    gguf: 4.25 bits per weight
    planar: 4.25 bits per weight

Built from the spec mxfp4 (sha256 30ee6433a4669068) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import absmax_level
from qdsl.runtime import (Field, Format, Kernels, Lanes, Storage, Stored, Table, Variant, as_type, codebook, device,
        empty, lanes, many, pad)
from qdsl.runtime.gpu.triton import tl, triton
from qdsl.runtime.numbers import e8m0h


# -- reference -------------------------------------------------------------------------------------------------------


LEVEL = Table("f32", 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 17*K/32]."""
    r = blocks.unflatten(-1, (-1, 17))
    q_bytes = r[..., 1:17].contiguous()
    return {
        "e": r[..., 0:1].squeeze(-1),
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1),
    }


def pack_gguf(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((e.shape[0], e.shape[1], 17), torch.uint8, e.device)
    r[..., 0:1] = e.unsqueeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 1:17] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {
        "blocks": r.flatten(1),
    }


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; e uint8 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {
        "e": e,
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K],
    }


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, e of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {
        "q": as_type(r, torch.int32).flatten(1),
        "e": e,
    }


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * level[q].  e [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    e = e8m0h(e).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(e, LEVEL[q], out=out).flatten(1)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / largest level; of levels the
    nearest, of two the first.
    """
    q, e = absmax_level(weight, code="u4", scale="e8m0h", rows=1, columns=32, axes=2, level=LEVEL)
    return {"q": q, "e": e}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, level, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 17 * n.to(tl.int64) * (K // 32)
    out += n.to(tl.int64) * K
    t = u // 16
    i = u % 16
    live = (n < N) & (t < K // 32)
    e = device.e8m0h(tl.load(blocks + 17 * t, live, 0))
    q_word = tl.load(blocks + 17 * t + i + 1, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        w = e * tl.load(level + q)
        tl.store(out + 32 * t + 16 * h + i, w, live)


@triton.jit
def _linear_gguf(blocks, level, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 17 * n.to(tl.int64) * (K // 32)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 2, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        i = u % 16
        live = (n < N) & (t < K // 32)
        e = device.e8m0h(tl.load(blocks + 17 * t, live, 0))
        q_word = tl.load(blocks + 17 * t + i + 1, live, 0)
        for h in tl.static_range(2):
            q = (q_word >> 4 * h & 15).to(tl.int32)
            x_k = tl.load(x + 32 * t + 16 * h + i, live, 0).to(tl.float32)
            acc += e * tl.load(level + q) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, e, level, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    e += n.to(tl.int64) * (K // 32)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 128)
    out += n.to(tl.int64) * K
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = (n < N) & (128 * t + 32 * c + 2 * b < K)
    e1 = device.e8m0h(tl.load(e + 4 * t + c, live, 0))
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (n < N) & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                w = e1 * tl.load(level + q1)
                tl.store(out + 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, w, inside)


@triton.jit
def _linear_planar(q, e, level, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 8 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    e += n.to(tl.int64) * (K // 32)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 128)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 16 * tl.cdiv(K, 128), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        c = u // 4 % 4
        b = u % 4
        live = (n < N) & (128 * t + 32 * c + 2 * b < K)
        e1 = device.e8m0h(tl.load(e + 4 * t + c, live, 0))
        q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
        for h in tl.static_range(2):
            for i in tl.static_range(2):
                for j in tl.static_range(2):
                    inside = live & (n < N) & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                    q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                    x_k = tl.load(x + 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, inside, 0).to(tl.float32)
                    acc += e1 * tl.load(level + q1) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _words_planar(q, row, K, chunk, more: tl.constexpr = 0):
    """The words of level[q] in a chunk of 128 columns, or in one of those after it."""
    return lanes.words(q, row, K // 128, chunk, more),


@triton.jit
def _numbers_planar(
    words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr,
):
    """level[q] of pairs i in a half of a chunk, as numbers of type F."""
    if F == tl.float16:
        return codebook.bytes(words[0], half % 2, i, flip)
    else:
        return codebook.floats(words[0], half % 2, i, flip, F)




@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of level[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0xf0e0d0c, 0x18141210, 0x90a0b0c, 0x40608)
    else:
        return codebook.table(g, N, 0x40008000, 0x4000c080, 0x40008000, 0x4000c080, 0x40403f00, 0x41414040,
            -0x3f3f4100, -0x3e3e3f40)


@triton.jit
def _few_planar(
    q, e, x, bias, out, M, N, K, tiles,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = e * level[q].

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 12 if F == tl.float16 else 0
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N)
    if tiles is not None:
        if m >= M:
            return
    x = lanes.token_rows(x, m + g, M, K)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = _table_planar(g, N, F)
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
                e_g = lanes.by_group(e, row, lanes.count(K, 32), chunk, SIZE, 32, "e8m0h")
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 8, 0, SIZE, F)
                    if BASE != 0:
                        sum -= BASE * sums[u]
                    sum *= e_g[u]
                    total += sum
                new = new + (total,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_columns(sum * UNIT, bias, out, m, M, start, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _row_planar(
    q, e, x, bias, out, N, K,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = e * level[q].

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = 32
    TRIP: tl.constexpr = max(2, STEP // 16)
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    BASE: tl.constexpr = 12 if F == tl.float16 else 0
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = _table_planar(g, N, F)
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
                sum = lanes.product(_numbers_planar, words, columns, flip, 2 * j, STEP // 8, 8, 0, F)
                e_g = lanes.by_column(e, row, lanes.count(K, 32), chunk, K, STEP, 32, "e8m0h")
                if BASE != 0:
                    sum -= BASE * sums
                sum *= e_g
                new = new + (acc[r] + sum,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_row(sum * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _many_planar(
    q, e, x, bias, out, M, N, K,
    R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = e * level[q].

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    ZERO: tl.constexpr = -12 if F == tl.float16 else 0
    if WHOLE:
        K = WHOLE
    first = tl.program_id(0) * (16 * W * R)
    x, at = many.tile_of_x(x, M, K, BM, SIZE, W, WHOLE)
    flip = _table_planar(lanes.warps(W)[1], N, F)
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
                                         None, 8, 0, SIZE, F)
                e_g = many.of_rows(e, n, lanes.count(K, 32), chunk * 128 + u * SIZE, 32, "e8m0h")
                sum *= e_g
                total += sum
            new = new + (total,)
        acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        many.store_tile(sum * UNIT, bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "e": Field("e8m0h", "N", "K/32"),
        "q": Field("u4", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "17*K/32", bits=("e[1@0, 17@1]", "q+8[1@0, 16:1@1 2:4 17@1]")),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/2", last="k", tables=(LEVEL,)),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "16*ceil(K/128)", bits=("q[1@0, 2:8 4:4@1 2:4 2:16 4:1@1 16@1]",)),
                "e": Stored("e8m0h", "N", "K/32", bits=("e[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, reads=("K",),
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="16*ceil(K/128)", last="k",
                tables=(LEVEL,),
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("32",))),
        ),
    },
    decode=decode, encode=encode,
)

FORMAT = Format(
    name="mxfp4", title="GGML MXFP4, 4-bit floats with a power of two per 32",
    source="ggml-common.h block_mxfp4 and kvalues_mxfp4", formula="e * level[q]",
    variants={(): VARIANT},
    detect={"gguf": "MXFP4"},
    digest="30ee6433a4669068",
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
