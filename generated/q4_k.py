"""q4_k: GGML Q4_K, 4-bit codes with 6-bit scales and mins in super-blocks of 256.

    w = d * sc * q - dmin * mn
    float32, rounded after each operation

    d      f16 [N, K/256]
    dmin   f16 [N, K/256]
    sc     u6  [N, K/32]
    mn     u6  [N, K/32]
    q      u4  [N, K]

    gguf: 4.5 bits per weight

Built from the spec q4_k (sha256 b6b16ae16056c384) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_type, device


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 144*K/256]."""
    r = blocks.unflatten(-1, (-1, 144))
    sc_low = (r[..., 4:20].unflatten(-1, (2, 8))[..., :4] & 15).flatten(1)
    sc_bytes = r[..., 4:8].contiguous()
    sc_high = torch.stack([sc_bytes >> 4 & 3, sc_bytes >> 6], -2).flatten(1)
    mn_low = torch.stack([r[..., 8:12] & 15, r[..., 12:16] >> 4], -2).flatten(1)
    mn_bytes = r[..., 8:12].contiguous()
    mn_high = torch.stack([mn_bytes >> 4 & 3, mn_bytes >> 6], -2).flatten(1)
    q_bytes = r[..., 16:144].unflatten(-1, (4, 32)).contiguous()
    return {
        "d": as_type(r, torch.float16)[..., 0],
        "dmin": as_type(r, torch.float16)[..., 1],
        "sc": sc_low | sc_high << 4,
        "mn": mn_low | mn_high << 4,
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1),
    }


def pack_gguf(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = torch.zeros(d.shape[0], d.shape[1], 144, dtype=torch.uint8, device=d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:4] = as_type(dmin.unsqueeze(-1), torch.uint8)
    r[..., 4:20].unflatten(-1, (2, 8))[..., :4] |= sc.unflatten(-1, (-1, 2, 4)) & 15
    sc_split = sc.unflatten(-1, (-1, 2, 4))
    r[..., 4:8] |= (sc_split[:, :, 0] >> 4) << 4 | (sc_split[:, :, 1] >> 4) << 6
    mn_split = mn.unflatten(-1, (-1, 2, 4))
    r[..., 8:12] |= mn_split[:, :, 0] & 15
    r[..., 12:16] |= (mn_split[:, :, 1] & 15) << 4
    r[..., 8:12] |= (mn_split[:, :, 0] >> 4) << 4 | (mn_split[:, :, 1] >> 4) << 6
    q_split = q.unflatten(-1, (-1, 4, 2, 32))
    r[..., 16:144] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).flatten(2)
    return {
        "blocks": r.flatten(1),
    }


def decode(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * sc * q - dmin * mn.  d [N, K/256], dmin [N,
    K/256], sc [N, K/32], mn [N, K/32], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 32))
    d = d.float()[..., None, None]
    dmin = dmin.float()[..., None, None]
    sc = sc.unflatten(1, (-1, 8)).unsqueeze(-1)
    mn = mn.unflatten(1, (-1, 8)).unsqueeze(-1)
    q = q.unflatten(1, (-1, 8, 32))
    return torch.sub(d * sc * q, dmin * mn, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 144 * n.to(tl.int64) * (K // 256)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    out += n.to(tl.int64) * K
    t = u // 128
    i = u // 32 % 4
    j = u % 32
    live = (n < N) & (t < K // 256)
    d = tl.load(blocks_f16 + 72 * t, live, 0).to(tl.float32)
    dmin = tl.load(blocks_f16 + 72 * t + 1, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 144 * t + 32 * i + j + 16, live, 0)
    for h in tl.static_range(2):
        sc_low = tl.load(blocks + 144 * t + 8 * (i // 2) + 2 * (i % 2) + h + 4, live, 0) & 15
        sc_high = tl.load(blocks + 144 * t + 2 * (i % 2) + h + 4, live, 0) >> 2 * (i // 2) + 4 & 3
        sc = sc_low | sc_high << 4
        mn_low = tl.load(blocks + 144 * t + 4 * (i // 2) + 2 * (i % 2) + h + 8, live, 0) >> 4 * (i // 2) & 15
        mn_high = tl.load(blocks + 144 * t + 2 * (i % 2) + h + 8, live, 0) >> 2 * (i // 2) + 4 & 3
        mn = mn_low | mn_high << 4
        q = q_word >> 4 * h & 15
        w = d * sc * q - dmin * mn
        tl.store(out + 256 * t + 64 * i + 32 * h + j, w, live)


@triton.jit
def _linear_gguf(blocks, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 144 * n.to(tl.int64) * (K // 256)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 2, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 128
        i = u // 32 % 4
        j = u % 32
        live = (n < N) & (t < K // 256)
        d = tl.load(blocks_f16 + 72 * t, live, 0).to(tl.float32)
        dmin = tl.load(blocks_f16 + 72 * t + 1, live, 0).to(tl.float32)
        q_word = tl.load(blocks + 144 * t + 32 * i + j + 16, live, 0)
        for h in tl.static_range(2):
            sc_low = tl.load(blocks + 144 * t + 8 * (i // 2) + 2 * (i % 2) + h + 4, live, 0) & 15
            sc_high = tl.load(blocks + 144 * t + 2 * (i % 2) + h + 4, live, 0) >> 2 * (i // 2) + 4 & 3
            sc = sc_low | sc_high << 4
            mn_low = tl.load(blocks + 144 * t + 4 * (i // 2) + 2 * (i % 2) + h + 8, live, 0) >> 4 * (i // 2) & 15
            mn_high = tl.load(blocks + 144 * t + 2 * (i % 2) + h + 8, live, 0) >> 2 * (i // 2) + 4 & 3
            mn = mn_low | mn_high << 4
            q = q_word >> 4 * h & 15
            x_k = tl.load(x + 256 * t + 64 * i + 32 * h + j, live, 0).to(tl.float32)
            acc += (d * sc * q - dmin * mn) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "d": Field("f16", "N", "K/256"),
        "dmin": Field("f16", "N", "K/256"),
        "sc": Field("u6", "N", "K/32"),
        "mn": Field("u6", "N", "K/32"),
        "q": Field("u4", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "144*K/256"),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/2", last="k"),
        ),
    },
    decode=decode,
)

FORMAT = Format(
    name="q4_k", title="GGML Q4_K, 4-bit codes with 6-bit scales and mins in super-blocks of 256",
    source="ggml-common.h block_q4_K", formula="d * sc * q - dmin * mn",
    variants={(): VARIANT},
    detect={"gguf": "Q4_K"},
    digest="b6b16ae16056c384",
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
