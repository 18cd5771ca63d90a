"""q4_0: GGML Q4_0, 4-bit codes around 8 with one scale per 32.

    w = d * (q - 8)
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      u4  [N, K]

    gguf: 4.5 bits per weight
    q4_0_r8: 4.5 bits per weight
    q4_0_4_4: 4.5 bits per weight
    q4_0_4_8: 4.5 bits per weight
    q4_0_8_8: 4.5 bits per weight
    planar: 4.5 bits per weight

Built from the spec q4_0 (sha256 b4f403e71b9bb4d1) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import signmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, pad)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * (q - 8) */
#define BITS 4
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f,
        6.0f, 7.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-8)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    *scale = d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 18*K/32]."""
    r = blocks.unflatten(-1, (-1, 18))
    q_bytes = r[..., 2:18].contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 18), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 2:18] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {"blocks": r.flatten(1)}


def unpack_q4_0_r8(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N/8, 144*K/32]."""
    r = blocks.unflatten(-1, (-1, 144))
    q_bytes = r[..., 16:144].unflatten(-1, (4, 8, 4)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0:8].permute(0, 2, 1).flatten(0, 1),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1)}


def pack_q4_0_r8(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_q4_0_r8."""
    r = empty((d.shape[0] // 8, d.shape[1], 144), torch.uint8, d.device)
    r[..., 0:16] = as_type(d.unflatten(0, (-1, 8)).permute(0, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    q_split = q.unflatten(-1, (-1, 2, 4, 4)).unflatten(0, (-1, 8))
    r[..., 16:144] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_q4_0_4_4(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N/4, 72*K/32]."""
    r = blocks.unflatten(-1, (-1, 72))
    q_bytes = r[..., 8:72].unflatten(-1, (4, 4, 4)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0:4].permute(0, 2, 1).flatten(0, 1),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1) + 8 & 15}


def pack_q4_0_4_4(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_q4_0_4_4."""
    r = empty((d.shape[0] // 4, d.shape[1], 72), torch.uint8, d.device)
    r[..., 0:8] = as_type(d.unflatten(0, (-1, 4)).permute(0, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    q_split = (q - 8 & 15).unflatten(-1, (-1, 2, 4, 4)).unflatten(0, (-1, 4))
    r[..., 8:72] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_q4_0_4_8(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N/4, 72*K/32]."""
    r = blocks.unflatten(-1, (-1, 72))
    q_bytes = r[..., 8:72].unflatten(-1, (2, 4, 8)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0:4].permute(0, 2, 1).flatten(0, 1),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1) + 8 & 15}


def pack_q4_0_4_8(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_q4_0_4_8."""
    r = empty((d.shape[0] // 4, d.shape[1], 72), torch.uint8, d.device)
    r[..., 0:8] = as_type(d.unflatten(0, (-1, 4)).permute(0, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    q_split = (q - 8 & 15).unflatten(-1, (-1, 2, 2, 8)).unflatten(0, (-1, 4))
    r[..., 8:72] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_q4_0_8_8(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N/8, 144*K/32]."""
    r = blocks.unflatten(-1, (-1, 144))
    q_bytes = r[..., 16:144].unflatten(-1, (2, 8, 8)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0:8].permute(0, 2, 1).flatten(0, 1),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1) + 8 & 15}


def pack_q4_0_8_8(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_q4_0_8_8."""
    r = empty((d.shape[0] // 8, d.shape[1], 144), torch.uint8, d.device)
    r[..., 0:16] = as_type(d.unflatten(0, (-1, 8)).permute(0, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    q_split = (q - 8 & 15).unflatten(-1, (-1, 2, 2, 8)).unflatten(0, (-1, 8))
    r[..., 16:144] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"d": d, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "d": d}


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (q - 8).  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d, as_float(q - 8, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = the value of largest magnitude, sign and all, / divisor.  importance: float32
    [K].  options: by, ties.
    """
    q, d = signmax(weight, code="u4", scale="f16", rows=1, columns=32, axes=2, divisor=-8, offset=8, importance=importance,
            **{"by": "exact", "ties": "up", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 18 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 16
    i = u % 16
    d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 32 * t + 16 * h + i, d * (q - 8), live)
    return state


@triton.jit
def _decode_q4_0_r8(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 144 * (n // 8 * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 72 * (k // 32) + n % 8, live, 0).to(tl.float32)
    q = (tl.load(blocks + 144 * (k // 32) + 32 * (k % 32 // 4 % 4) + 4 * (n % 8) + k % 32 % 4 + 16, live, 0) >> 4
        * (k % 32 // 16) & 15).to(tl.int32)
    return use(state, k, d * (q - 8), live)


@triton.jit
def _decode_q4_0_4_4(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 72 * (n // 4 * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 36 * (k // 32) + n % 4, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 72 * (k // 32) + 16 * (k % 32 // 4 % 4) + 4 * (n % 4) + k % 32 % 4 + 8, live, 0).to(tl.int32)
    q = ((q_word >> 4 * (k % 32 // 16) & 15) + 8 & 15).to(tl.int32)
    return use(state, k, d * (q - 8), live)


@triton.jit
def _decode_q4_0_4_8(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 72 * (n // 4 * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 36 * (k // 32) + n % 4, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 72 * (k // 32) + 32 * (k % 32 // 8 % 2) + 8 * (n % 4) + k % 32 % 8 + 8, live, 0).to(tl.int32)
    q = ((q_word >> 4 * (k % 32 // 16) & 15) + 8 & 15).to(tl.int32)
    return use(state, k, d * (q - 8), live)


@triton.jit
def _decode_q4_0_8_8(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 144 * (n // 8 * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 72 * (k // 32) + n % 8, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 144 * (k // 32) + 64 * (k % 32 // 8 % 2) + 8 * (n % 8) + k % 32 % 8 + 16, live, 0).to(tl.int32)
    q = ((q_word >> 4 * (k % 32 // 16) & 15) + 8 & 15).to(tl.int32)
    return use(state, k, d * (q - 8), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d = tensors
    d += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    d1 = tl.load(d + 4 * t + j, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, d1 * (q1 - 8), inside)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = d * (q - 8.0)."""
    d, = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-8.0 - BASE) * ones
    return lanes.plus(total, sum * d)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(16,), lanes=(2,),
                order=(0, 1, 3, 2))),
        "q4_0_r8": Storage(unpack_q4_0_r8, pack_q4_0_r8, Kernels(_decode_q4_0_r8, rows="N", units="K", last="k")),
        "q4_0_4_4": Storage(unpack_q4_0_4_4, pack_q4_0_4_4, Kernels(_decode_q4_0_4_4, rows="N", units="K", last="k")),
        "q4_0_4_8": Storage(unpack_q4_0_4_8, pack_q4_0_4_8, Kernels(_decode_q4_0_4_8, rows="N", units="K", last="k")),
        "q4_0_8_8": Storage(unpack_q4_0_8_8, pack_q4_0_8_8, Kernels(_decode_q4_0_8_8, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 32),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-8, -136), "exact": True}}))),
    },
    decode=decode, encode=encode, importance=True, scheme="signmax", roles={"code": "q", "scale": "d"},
    settings={"divisor": -8, "by": "exact", "ties": "up", "offset": 8}, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d",)),
)

PROGRAM = {
    "name": "q4_0", "title": "GGML Q4_0, 4-bit codes around 8 with one scale per 32", "source": "ggml-common.h block_q4_0",
    "formula": "d * (q - 8)", "bits": "4.5", "digest": "b4f403e71b9bb4d1",
    "detect": {
        "gguf": "Q4_0",
        "repacked": {"Q4_0_R8": "q4_0_r8", "Q4_0_4_4": "q4_0_4_4", "Q4_0_4_8": "q4_0_4_8", "Q4_0_8_8": "q4_0_8_8"},
    },
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "18*K/32",
                {"slices": (("d", 0, [0, [(0, 18, 1)]]), ("q", 16, [0, [(16, 1, 1), (2, 4), (0, 18, 1)]]))})}},
            "q4_0_r8": {"tensors": {"blocks": ("u8", "N/8", "144*K/32",
                {"seen": ("N", "18*K/32"),
                "slices": (("d", 0, [[(8, 2, 1), (0, 1, 0)], [(0, 144, 1)]]),
                ("q", 128, [[(8, 4, 1), (0, 1, 0)], [(4, 1, 1), (4, 32, 1), (2, 4), (0, 144, 1)]]))})}},
            "q4_0_4_4": {"tensors": {"blocks": ("u8", "N/4", "72*K/32",
                {"seen": ("N", "18*K/32"),
                "slices": (("d", 0, [[(4, 2, 1), (0, 1, 0)], [(0, 72, 1)]]),
                ("q", 64, [[(4, 4, 1), (0, 1, 0)], [(4, 1, 1), (4, 16, 1), (2, 4), (0, 72, 1)]], {"adds": -8}))})}},
            "q4_0_4_8": {"tensors": {"blocks": ("u8", "N/4", "72*K/32",
                {"seen": ("N", "18*K/32"),
                "slices": (("d", 0, [[(4, 2, 1), (0, 1, 0)], [(0, 72, 1)]]),
                ("q", 64, [[(4, 8, 1), (0, 1, 0)], [(8, 1, 1), (2, 32, 1), (2, 4), (0, 72, 1)]], {"adds": -8}))})}},
            "q4_0_8_8": {"tensors": {"blocks": ("u8", "N/8", "144*K/32",
                {"seen": ("N", "18*K/32"),
                "slices": (("d", 0, [[(8, 2, 1), (0, 1, 0)], [(0, 144, 1)]]),
                ("q", 128, [[(8, 8, 1), (0, 1, 0)], [(8, 1, 1), (2, 64, 1), (2, 4), (0, 144, 1)]], {"adds": -8}))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/32", {"field": "d"}),
            }},
        },
        "options": {"by": ("stored", "exact", "inverse", "ratio"), "ties": ("even", "away", "up")},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
