"""q6_k: GGML Q6_K, 6-bit codes around 32 with 8-bit scales in super-blocks of 256.

    w = d * sc * (q - 32)
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     i8  [N, K/16]
    q      u6  [N, K]

    gguf: 6.5625 bits per weight

Built from the spec q6_k (sha256 04c6c0edaba443c8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_type, device, empty


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 210*K/256]."""
    r = blocks.unflatten(-1, (-1, 210))
    q_bytes = r[..., 0:128].unflatten(-1, (2, 64)).contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_bytes2 = r[..., 128:192].unflatten(-1, (2, 32)).contiguous()
    q_high = torch.stack([q_bytes2 >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    return {
        "d": as_type(r, torch.float16)[..., 104],
        "sc": r[..., 192:208].view(torch.int8).flatten(1),
        "q": q_low | q_high << 4,
    }


def pack_gguf(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 210), torch.uint8, q.device)
    q_split = q.unflatten(-1, (-1, 2, 2, 64))
    r[..., 0:128] = ((q_split[:, :, :, 0] & 15) | (q_split[:, :, :, 1] & 15) << 4).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 128:192] = sum((q_split2[:, :, :, i] >> 4) << 2 * i for i in range(4)).flatten(2)
    r[..., 192:208] = sc.unflatten(-1, (-1, 16)).view(torch.uint8)
    r[..., 208:210] = as_type(d.unsqueeze(-1), torch.uint8)
    return {
        "blocks": r.flatten(1),
    }


def decode(d: Tensor, sc: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * sc * (q - 32).  d [N, K/256], sc [N, K/16], q
    [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * sc, q - 32, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 210 * n.to(tl.int64) * (K // 256)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    out += n.to(tl.int64) * K
    t = u // 64
    j = u // 32 % 2
    c = u % 32
    live = (n < N) & (t < K // 256)
    d = tl.load(blocks_f16 + 105 * t + 104, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 210 * t + 32 * j + c + 128, live, 0)
    for h in tl.static_range(2):
        q_word = tl.load(blocks + 210 * t + 64 * j + 32 * h + c, live, 0)
        for i in tl.static_range(2):
            sc = tl.load(blocks + 210 * t + 8 * j + 4 * i + 2 * h + c // 16 + 192, live, 0).to(tl.int8, bitcast=True)
            q_low = q_word >> 4 * i & 15
            q_high = q_word1 >> 4 * i + 2 * h & 3
            q = (q_low | q_high << 4).to(tl.int32)
            w = d * sc * (q - 32)
            tl.store(out + 256 * t + 128 * j + 64 * i + 32 * h + c, w, live)


@triton.jit
def _linear_gguf(blocks, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 4 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 210 * n.to(tl.int64) * (K // 256)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 4, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 64
        j = u // 32 % 2
        c = u % 32
        live = (n < N) & (t < K // 256)
        d = tl.load(blocks_f16 + 105 * t + 104, live, 0).to(tl.float32)
        q_word1 = tl.load(blocks + 210 * t + 32 * j + c + 128, live, 0)
        for h in tl.static_range(2):
            q_word = tl.load(blocks + 210 * t + 64 * j + 32 * h + c, live, 0)
            for i in tl.static_range(2):
                sc = tl.load(blocks + 210 * t + 8 * j + 4 * i + 2 * h + c // 16 + 192, live, 0).to(tl.int8, bitcast=True)
                q_low = q_word >> 4 * i & 15
                q_high = q_word1 >> 4 * i + 2 * h & 3
                q = (q_low | q_high << 4).to(tl.int32)
                x_k = tl.load(x + 256 * t + 128 * j + 64 * i + 32 * h + c, live, 0).to(tl.float32)
                acc += d * sc * (q - 32) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "d": Field("f16", "N", "K/256"),
        "sc": Field("i8", "N", "K/16"),
        "q": Field("u6", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "210*K/256"),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/4", last="k"),
        ),
    },
    decode=decode,
)

FORMAT = Format(
    name="q6_k", title="GGML Q6_K, 6-bit codes around 32 with 8-bit scales in super-blocks of 256",
    source="ggml-common.h block_q6_K", formula="d * sc * (q - 32)",
    variants={(): VARIANT},
    detect={"gguf": "Q6_K"},
    digest="04c6c0edaba443c8",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
linear = FORMAT.linear
Linear = FORMAT.Linear
