"""ocp_mxfp8 at code = e5m2: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors: 8.25 bits per weight
    torchao: 8.25 bits per weight
    torchao_swizzled: 8.25 bits per weight
    planar: 8.25 bits per weight

Built from the spec ocp_mxfp8 (sha256 93c43500cf6cd093) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Field, Kernels, Lanes, Storage, Stored, Variant, as_type, cdiv, device, lanes, many, pad
from qdsl.runtime.gpu.triton import tl, triton
from qdsl.runtime.numbers import e5m2, e8m0


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_compressed_tensors(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight code [N, K]; weight_scale uint8 [N, K/32]."""
    return {
        "e": as_type(weight_scale, torch.float8_e8m0fnu),
        "q": weight,
    }


def pack_compressed_tensors(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_compressed_tensors."""
    return {
        "weight": q,
        "weight_scale": e.view(torch.uint8),
    }


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata code [N, K]; scale float8_e8m0fnu [N, K/32]."""
    return {
        "e": scale,
        "q": qdata,
    }


def pack_torchao(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    return {
        "qdata": q,
        "scale": e,
    }


def unpack_torchao_swizzled(qdata: Tensor, scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of qdata code [N, K]; scale float8_e8m0fnu [ceil(N/128), ceil(K/128), 512]."""
    r = as_type(scale, torch.uint8)
    return {
        "e": as_type(r, torch.float8_e8m0fnu).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0,
            2).flatten(1)[:N, :cdiv(K, 32)],
        "q": qdata,
    }


def pack_torchao_swizzled(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao_swizzled."""
    r = pad(e, (0, -e.shape[1] % 4, 0, -e.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0,
        3, 2, 1, 4).view(torch.uint8).flatten(2)
    return {
        "qdata": q,
        "scale": as_type(r, torch.float8_e8m0fnu),
    }


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; e float8_e8m0fnu [N, ceil(K/32)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {
        "e": e,
        "q": as_type(r, torch.float8_e5m2).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K],
    }


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, e of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {
        "q": as_type(r, torch.int32).flatten(1),
        "e": e,
    }


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, ceil(K/32)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (e.shape[1], -1))
    q = e5m2(q).unflatten(1, (e.shape[1], -1))
    e = e8m0(e).unsqueeze(-1)
    return torch.mul(e, q, out=out).flatten(1)


def encode(weight: Tensor, *, code: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by,
    ties, least, power, zeros.
    """
    q, e = absmax(weight, code=code, scale="e8m0", rows=1, columns=32, axes=2, **{"power": "floor", **options})
    return {"q": q, "e": e}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_compressed_tensors(weight, weight_scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    weight_scale += n.to(tl.int64) * (K // 32)
    weight += n.to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
    q = device.e5m2(tl.load(weight + k, live, 0))
    w = e * q
    tl.store(out + k, w, live)


@triton.jit
def _linear_compressed_tensors(weight, weight_scale, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    weight_scale += n.to(tl.int64) * (K // 32)
    weight += n.to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
        q = device.e5m2(tl.load(weight + k, live, 0))
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += e * q * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_torchao(qdata, scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    scale += n.to(tl.int64) * (K // 32)
    qdata += n.to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    e = device.e8m0(tl.load(scale + k // 32, live, 0))
    q = device.e5m2(tl.load(qdata + k, live, 0))
    w = e * q
    tl.store(out + k, w, live)


@triton.jit
def _linear_torchao(qdata, scale, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    scale += n.to(tl.int64) * (K // 32)
    qdata += n.to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        e = device.e8m0(tl.load(scale + k // 32, live, 0))
        q = device.e5m2(tl.load(qdata + k, live, 0))
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += e * q * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_torchao_swizzled(qdata, scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    scale += 512 * (n // 128).to(tl.int64) * tl.cdiv(K, 128)
    qdata += n.to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32)
        + k // 32 % 4, live, 0))
    q = device.e5m2(tl.load(qdata + k, live, 0))
    w = e * q
    tl.store(out + k, w, live)


@triton.jit
def _linear_torchao_swizzled(qdata, scale, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    scale += 512 * (n // 128).to(tl.int64) * tl.cdiv(K, 128)
    qdata += n.to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32)
            + k // 32 % 4, live, 0))
        q = device.e5m2(tl.load(qdata + k, live, 0))
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += e * q * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


@triton.jit
def _dequantize_planar(q, e, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    e += n.to(tl.int64) * tl.cdiv(K, 32)
    q += 32 * n.to(tl.int64) * tl.cdiv(K, 128)
    out += n.to(tl.int64) * K
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = (n < N) & (128 * t + 32 * j + 2 * c < K)
    e1 = device.e8m0(tl.load(e + 4 * t + j, live, 0))
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (n < N) & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = device.e5m2(q_word >> 16 * i + 8 * h & 255)
            w = e1 * q1
            tl.store(out + 128 * t + 32 * j + 16 * h + 2 * c + i, w, inside)


@triton.jit
def _linear_planar(q, e, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    e += n.to(tl.int64) * tl.cdiv(K, 32)
    q += 32 * n.to(tl.int64) * tl.cdiv(K, 128)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, 32 * tl.cdiv(K, 128), BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 32
        j = u // 8 % 4
        c = u % 8
        live = (n < N) & (128 * t + 32 * j + 2 * c < K)
        e1 = device.e8m0(tl.load(e + 4 * t + j, live, 0))
        q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
        for h in tl.static_range(2):
            for i in tl.static_range(2):
                inside = live & (n < N) & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
                q1 = device.e5m2(q_word >> 16 * i + 8 * h & 255)
                x_k = tl.load(x + 128 * t + 32 * j + 16 * h + 2 * c + i, inside, 0).to(tl.float32)
                acc += e1 * q1 * x_k
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
    return lanes.float_numbers(words[half % 2], 8 * i, 5, 2, F)




@triton.jit
def _few_planar(
    q, e, x, bias, out, M, N, K, tiles,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = e * q.

    A program takes up to 8 rows of x, pairs of columns in an int32, and 16 * R * WN rows of w; WK warps share K,
    EVEN says that they all have as much to do.  With tiles [T, 3] of (expert, first row of x, one past the last),
    w and bias have N rows for every expert, and a row of x meets those of its own.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 1.0
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N)
    if tiles is not None:
        if m >= M:
            return
    x = lanes.token_rows(x, m + g, M, K)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 8, 0, False, F)
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
                e_g = lanes.by_group(e, row, lanes.count(K, 32), chunk, SIZE, 32, "e8m0")
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    sum = lanes.part(_numbers_planar, words, columns, u, j, flip, 8, 0, SIZE, F)
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
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32, with w = e * q.

    One row of x.  The columns of the matrix instruction are eight groups of STEP columns of w.
    """
    STEP: tl.constexpr = 32
    TRIP: tl.constexpr = max(2, STEP // 16)
    UNIT: tl.constexpr = 1.0
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    flip = lanes.flips(N, 8, 0, False, F)
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
                e_g = lanes.by_column(e, row, lanes.count(K, 32), chunk, K, STEP, 32, "e8m0")
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
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, with w = e * q.

    A program multiplies R tiles of 16 * W rows of w, which stay in registers, with BM rows of x; a trip of its loop takes
    UNROLL chunks of 128 columns.  WHOLE is K where all tiles have all their rows, or 0: addresses differ by constants then.
    """
    SIZE: tl.constexpr = 32
    UNIT: tl.constexpr = 1.0
    ZERO: tl.constexpr = 0
    if WHOLE:
        K = WHOLE
    first = tl.program_id(0) * (16 * W * R)
    x, at = many.tile_of_x(x, M, K, BM, SIZE, W, WHOLE)
    flip = lanes.flips(N, 8, 0, False, F)
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
                e_g = many.of_rows(e, n, lanes.count(K, 32), chunk * 128 + u * SIZE, 32, "e8m0")
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
        "e": Field("e8m0", "N", "ceil(K/32)"),
        "q": Field("code", "N", "K"),
    },
    storages={
        "compressed_tensors": Storage(
            tensors={
                "weight": Stored("code", "N", "K", bits=("q[1@0, 1@1]",)),
                "weight_scale": Stored("u8", "N", "K/32", bits=("e[1@0, 1@1]",)),
            },
            unpack=unpack_compressed_tensors, pack=pack_compressed_tensors,
            kernels=Kernels(_dequantize_compressed_tensors, _linear_compressed_tensors, rows="N", units="K", last="k"),
        ),
        "torchao": Storage(
            tensors={
                "qdata": Stored("code", "N", "K", aliases=("_weight_qdata",), bits=("q[1@0, 1@1]",)),
                "scale": Stored("e8m0", "N", "K/32", aliases=("_weight_scale",), bits=("e[1@0, 1@1]",)),
            },
            unpack=unpack_torchao, pack=pack_torchao,
            kernels=Kernels(_dequantize_torchao, _linear_torchao, rows="N", units="K", last="k"),
        ),
        "torchao_swizzled": Storage(
            tensors={
                "qdata": Stored("code", "N", "K", aliases=("_weight_qdata",), bits=("q[1@0, 1@1]",)),
                "scale": Stored("e8m0", "ceil(N/128)", "ceil(K/128)", "512", aliases=("_weight_scale",),
                    seen=("32*ceil(N/128)", "16*ceil(K/128)"), bits=("e[32:16@2 4:4@2 1@0, 4:1@2 1@1]",)),
            },
            unpack=unpack_torchao_swizzled, pack=pack_torchao_swizzled, reads=("N", "K"),
            kernels=Kernels(_dequantize_torchao_swizzled, _linear_torchao_swizzled, rows="N", units="K", last="k"),
        ),
        "planar": Storage(
            tensors={
                "q": Stored("i32", "N", "32*ceil(K/128)", bits=("q[1@0, 2:16 8:4@1 2:8 4:1@1 32@1]",)),
                "e": Stored("e8m0", "N", "ceil(K/32)", bits=("e[1@0, 1@1]",)),
            },
            unpack=unpack_planar, pack=pack_planar, reads=("K",),
            kernels=Kernels(_dequantize_planar, _linear_planar, rows="N", units="32*ceil(K/128)", last="k",
                    lanes=Lanes(_few_planar, row=_row_planar, many=_many_planar, blocks=("32",), codes="q",
                        special=124)),
        ),
    },
    decode=decode, encode=encode,
    options={"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
        "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive")},
    cuts=("N", "ceil(K/32)"),
)
