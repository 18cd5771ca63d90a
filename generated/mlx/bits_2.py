"""mlx at bits = 2: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b
    float32, rounded after each operation

    s      scale_type [N, ceil(K/group)]
    b      scale_type [N, ceil(K/group)]
    q      u2         [N, K]

    mlx: 2.5 bits per weight with group = 64
    planar: 2.5 bits per weight with group = 64

Built from the spec mlx (sha256 e4537dc472b2d4fd) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import edge_affine
from qdsl.runtime import (Field, Kernels, Lanes, Storage, Stored, Variant, as_float, as_type, device, joined, lanes,
        many, pad, spread, workspace)
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_mlx(weight: Tensor, scales: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/16]; scales scale_type [N, K/group]; biases scale_type [N, K/group]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {
        "s": scales,
        "b": biases,
        "q": spread(r, 2).flatten(1),
    }


def pack_mlx(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales, biases of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    r = joined(q_split, 2).squeeze(-1)
    return {
        "weight": as_type(r, torch.uint32).squeeze(-1),
        "scales": s,
        "biases": b,
    }


def unpack_planar(q: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [N, ceil(K/group)]; b scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {
        "s": s,
        "b": b,
        "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2,
            (2, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K],
    }


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4
        | q_split[:, :, 1, :, :, 1] << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {
        "q": as_type(r, torch.int32).flatten(1),
        "s": s,
        "b": b,
    }


def decode(s: Tensor, b: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s + b.  s [N, ceil(K/group)], b [N,
    ceil(K/group)], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.unflatten(1, (s.shape[1], -1))
    s = s.float().unsqueeze(-1)
    b = b.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.add(w, b, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the end of the block of larger magnitude; scale = what makes 0 a code."""
    q, s, b = edge_affine(weight, code="u2", scale=scale_type, min=scale_type, rows=1, columns=group, axes=2)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_mlx(weight, scales, biases, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    t = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    scales += n.to(tl.int64) * (K // group)
    biases += n.to(tl.int64) * (K // group)
    weight += n.to(tl.int64) * (K // 16)
    out += n.to(tl.int64) * K
    live = (n < N) & (t < K // 16)
    s = tl.load(scales + t // (group // 16), live, 0).to(tl.float32)
    b = tl.load(biases + t // (group // 16), live, 0).to(tl.float32)
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(16):
        q = q_word >> 2 * h & 3
        w = q * s + b
        tl.store(out + 16 * t + h, w, live)


@triton.jit
def _linear_mlx(weight, scales, biases, x, bias, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    scales += n.to(tl.int64) * (K // group)
    biases += n.to(tl.int64) * (K // group)
    weight += n.to(tl.int64) * (K // 16)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 16, BK):
        t = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (t < K // 16)
        s = tl.load(scales + t // (group // 16), live, 0).to(tl.float32)
        b = tl.load(biases + t // (group // 16), live, 0).to(tl.float32)
        q_word = tl.load(weight + t, live, 0)
        for h in tl.static_range(16):
            q = q_word >> 2 * h & 3
            x_k = tl.load(x + 16 * t + h, live, 0).to(tl.float32)
            acc += (q * s + b) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, s, b, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    s += n.to(tl.int64) * tl.cdiv(K, group)
    b += n.to(tl.int64) * tl.cdiv(K, group)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 256)
    out += n.to(tl.int64) * K
    t = u // 16
    a = u // 4 % 4
    e = u % 4
    live = (n < N) & (256 * t + 32 * a + 2 * e < K)
    q_word = tl.load(q + 16 * t + 4 * e + a, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (n < N) & (256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e + c < K)
                    s1 = tl.load(s + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                    b1 = tl.load(b + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    w = q1 * s1 + b1
                    tl.store(out + 256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e + c, w, inside)


@triton.jit
def _linear_planar(q, s, b, x, bias, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    s += n.to(tl.int64) * tl.cdiv(K, group)
    b += n.to(tl.int64) * tl.cdiv(K, group)
    q += 16 * n.to(tl.int64) * tl.cdiv(K, 256)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 16 * tl.cdiv(K, 256), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        a = u // 4 % 4
        e = u % 4
        live = (n < N) & (256 * t + 32 * a + 2 * e < K)
        q_word = tl.load(q + 16 * t + 4 * e + a, live, 0)
        for h in tl.static_range(2):
            for i in tl.static_range(2):
                for j in tl.static_range(2):
                    for c in tl.static_range(2):
                        inside = live & (n < N) & (256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e + c < K)
                        s1 = tl.load(s + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                        b1 = tl.load(b + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                        q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                        x_k = tl.load(x + 256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e
                            + c, inside, 0).to(tl.float32)
                        acc += (q1 * s1 + b1) * x_k
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
    q, s, b, x, bias, out, M, N, K, tiles,
    group: tl.constexpr, R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = s * q + b.

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 128 if group >= 128 else 32
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
                s_g = lanes.by_group(s, row, lanes.count(K, group), chunk, SIZE, group, 0)
                b_g = lanes.by_group(b, row, lanes.count(K, group), chunk, SIZE, group, 0)
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 2, 2, SIZE, F)
                    if BASE != 0:
                        sum -= BASE * sums[u]
                    sum *= s_g[u]
                    sum += sums[u] * b_g[u]
                    total += sum
                new = new + (total,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_columns(sum * UNIT, bias, out, m, M, start, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _row_planar(
    q, s, b, x, bias, out, N, K,
    group: tl.constexpr, R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = s * q + b.

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = min(64, group)
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
                s_g = lanes.by_column(s, row, lanes.count(K, group), chunk, K, STEP, group, 0)
                b_g = lanes.by_column(b, row, lanes.count(K, group), chunk, K, STEP, group, 0)
                if BASE != 0:
                    sum -= BASE * sums
                sum *= s_g
                sum += sums * b_g
                new = new + (acc[r] + sum,)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        lanes.store_row(sum * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)


@triton.jit
def _many_planar(
    q, s, b, x, bias, out, M, N, K,
    group: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = s * q + b.

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 128 if group >= 128 else 32
    UNIT: tl.constexpr = 16777216.0 if F == tl.float16 else 1.0
    ZERO: tl.constexpr = 0 if F == tl.float16 else -128
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
                sums = many.column_sums(columns[u], 16 * W, UNIT, F)
                s_g = many.of_rows(s, n, lanes.count(K, group), chunk * 128 + u * SIZE, group, 0)
                b_g = many.of_rows(b, n, lanes.count(K, group), chunk * 128 + u * SIZE, group, 0)
                sum *= s_g
                sum += sums * b_g
                total += sum
            new = new + (total,)
        acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        many.store_tile(sum * UNIT, bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "s": Field("scale_type", "N", "ceil(K/group)"),
        "b": Field("scale_type", "N", "ceil(K/group)"),
        "q": Field("u2", "N", "K"),
    },
    storages={
        "mlx": Storage(
            tensors={
                "weight": Stored("u32", "N", "K/16", bits=("q[1@0, 16:2 1@1]",)),
                "scales": Stored("scale_type", "N", "K/group", bits=("s[1@0, 1@1]",)),
                "biases": Stored("scale_type", "N", "K/group", bits=("b[1@0, 1@1]",)),
            },
            unpack=unpack_mlx, pack=pack_mlx,
            kernels=Kernels(_dequantize_mlx, _linear_mlx, rows="N", units="K/16", last="k"),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "16*ceil(K/256)", bits=("q[1@0, 2:16 4:4@1 2:2 2:8 4:1@1 2:4 16@1]",)),
                "s": Stored("scale_type", "N", "ceil(K/group)", bits=("s[1@0, 1@1]",)),
                "b": Stored("scale_type", "N", "ceil(K/group)", bits=("b[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, reads=("K",),
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="16*ceil(K/256)", last="k",
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("group",))),
        ),
    },
    decode=decode, encode=encode, cuts=("N", "ceil(K/group)"),
)
