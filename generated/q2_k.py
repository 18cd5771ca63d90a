"""q2_k: GGML Q2_K, 2-bit codes with 4-bit scales and minimums in super-blocks of 256.

    w = d * sc * q - dmin * mn
    float32, rounded after each operation

    d      f16 [N, K/256]
    dmin   f16 [N, K/256]
    sc     u4  [N, K/16]
    mn     u4  [N, K/16]
    q      u2  [N, K]

    gguf: 2.625 bits per weight
    planar: 2.625 bits per weight

Built from the spec q2_k (sha256 49aa82cb71f7a313) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kquant_minmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * sc * q - dmin * mn */
#define BITS 2
#define FIELDS 4
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (0)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    const vf dmin = FIELD(2);
    const vf mn = FIELD(3);
    *scale = d * sc;
    *offset = -dmin * mn;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 84*K/256]."""
    r = blocks.unflatten(-1, (-1, 84))
    q_bytes = r[..., 16:80].unflatten(-1, (2, 32)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 40], "dmin": as_type(r, torch.float16)[..., 41],
            "sc": (r[..., 0:16] & 15).flatten(1), "mn": (r[..., 0:16] >> 4).flatten(1),
            "q": torch.stack([q_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(1)}


def pack_gguf(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = torch.zeros(d.shape[0], d.shape[1], 84, dtype=torch.uint8, device=sc.device)
    r[..., 0:16] |= sc.unflatten(-1, (-1, 16))
    r[..., 0:16] |= mn.unflatten(-1, (-1, 16)) << 4
    q_split = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 16:80] = sum(q_split[:, :, :, i] << 2 * i for i in range(4)).flatten(2)
    r[..., 80:82] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 82:84] = as_type(dmin.unsqueeze(-1), torch.uint8)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor, dmin: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; d float16 [N, K/256]; sc uint8 [N, K/16]; dmin float16 [N, K/256]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    return {"d": d, "dmin": dmin, "sc": sc & 15, "mn": sc >> 4,
            "q": torch.stack([q_bytes2 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 6], -5).unflatten(2,
                (2, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)}


def pack_planar(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, sc, dmin of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4
        | q_split[:, :, 1, :, :, 1] << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] |= sc.unsqueeze(-1)
    sc_bytes[...] |= (mn << 4).unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1), "dmin": dmin}


def decode(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * sc * q - dmin * mn.  d [N, K/256], dmin [N, K/256], sc [N,
    K/16], mn [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    dmin = dmin.float()[..., None, None]
    sc = sc.unflatten(1, (-1, 16)).unsqueeze(-1)
    mn = mn.unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.unflatten(1, (-1, 16, 16))
    space = workspace(out)
    w = torch.mul(d * sc, as_float(q, out), out=space)
    return torch.sub(w, dmin * mn, out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale and min by search for the least error; both in steps of the super-block's
    largest.  importance: float32 [K].
    """
    q, sc, mn, d, dmin = kquant_minmax(weight, code="u2", scale="u4", min="u4", super_scale="f16", super_min="f16", columns=16,
            super_columns=256, first=-0.5, step=0.1, steps=15, errors="magnitudes", importance=importance)
    return {"q": q, "sc": sc, "mn": mn, "d": d, "dmin": dmin}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 84 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 64
    i = u // 32 % 2
    j = u % 32
    d = tl.load(blocks_f16 + 42 * t + 40, live, 0).to(tl.float32)
    dmin = tl.load(blocks_f16 + 42 * t + 41, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 84 * t + 32 * i + j + 16, live, 0)
    for h in tl.static_range(4):
        sc = tl.load(blocks + 84 * t + 8 * i + 2 * h + j // 16, live, 0) & 15
        mn = tl.load(blocks + 84 * t + 8 * i + 2 * h + j // 16, live, 0) >> 4 & 15
        q = q_word >> 2 * h & 3
        state = use(state, 256 * t + 128 * i + 32 * h + j, d * sc * q - dmin * mn, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, d, sc, dmin = tensors
    d += n * (K // 256)
    dmin += n * (K // 256)
    sc += n * (K // 16)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    d1 = tl.load(d + t, live, 0).to(tl.float32)
    dmin1 = tl.load(dmin + t, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            sc1 = tl.load(sc + 16 * t + 8 * h + 2 * b + i, live, 0) & 15
            mn = tl.load(sc + 16 * t + 8 * h + 2 * b + i, live, 0) >> 4 & 15
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, d1 * sc1 * q1 - dmin1 * mn, live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/4", last="k", digits=(2, 32), lanes=(4,),
                order=(0, 1, 2, 4, 3))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=group_sums.nested_with_minimum,
                    group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 4, at=0), GroupField("dmin", 1, 256),
                    GroupField("sc", 1, 16, 4, at=4)), blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("d", "sc", "dmin", "mn")),
)

PROGRAM = {
    "name": "q2_k", "title": "GGML Q2_K, 2-bit codes with 4-bit scales and minimums in super-blocks of 256",
    "source": "ggml-common.h block_q2_K", "formula": "d * sc * q - dmin * mn", "bits": "2.625", "digest": "49aa82cb71f7a313",
    "detect": {"gguf": "Q2_K"},
    "variants": {(): {
        "fields": {
            "d": ("f16", "N", "K/256"), "dmin": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/16"), "mn": ("u4", "N", "K/16"),
            "q": ("u2", "N", "K"),
        },
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "84*K/256",
                {"slices": (("sc", 0, [0, [(16, 1, 1), (0, 84, 1)]]), ("mn", 4, [0, [(16, 1, 1), (0, 84, 1)]]),
                ("q", 128, [0, [(32, 1, 1), (4, 2), (2, 32, 1), (0, 84, 1)]]), ("d", 640, [0, [(0, 84, 1)]]),
                ("dmin", 656, [0, [(0, 84, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"slices": (("sc", 0, [0, 1]), ("mn", 4, [0, 1]))}),
                "dmin": ("f16", "N", "K/256", {"field": "dmin"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
