"""q4_k: GGML Q4_K, 4-bit codes with 6-bit scales and mins in super-blocks of 256.

    w = d * sc * q - dmin * mn
    float32, rounded after each operation

    d      f16 [N, K/256]
    dmin   f16 [N, K/256]
    sc     u6  [N, K/32]
    mn     u6  [N, K/32]
    q      u4  [N, K]

    gguf: 4.5 bits per weight
    planar: 4.625 bits per weight

Built from the spec q4_k (sha256 a68099267625c83b) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kquant_minmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, Records, RowLoops, Storage, Sums, Variant,
        as_float, as_type, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums, records
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * sc * q - dmin * mn */
#define BITS 4
#define FIELDS 4
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
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
    """Fields of blocks uint8 [N, 144*K/256]."""
    r = blocks.unflatten(-1, (-1, 144))
    sc_low = (r[..., 4:20].unflatten(-1, (2, 8))[..., :4] & 15).flatten(1)
    sc_bytes = r[..., 4:8].contiguous()
    sc_high = torch.stack([sc_bytes >> 4 & 3, sc_bytes >> 6], -2).flatten(1)
    mn_low = torch.stack([r[..., 8:12] & 15, r[..., 12:16] >> 4], -2).flatten(1)
    mn_bytes = r[..., 8:12].contiguous()
    mn_high = torch.stack([mn_bytes >> 4 & 3, mn_bytes >> 6], -2).flatten(1)
    q_bytes = r[..., 16:144].unflatten(-1, (4, 32)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "dmin": as_type(r, torch.float16)[..., 1], "sc": sc_low | sc_high << 4,
            "mn": mn_low | mn_high << 4, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


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
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor, dmin: Tensor, mn: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/256]; sc uint8 [N, K/32]; dmin float16 [N, K/256]; mn uint8 [N,
    K/32].
    """
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    return {"d": d, "dmin": dmin, "sc": sc & 63, "mn": mn & 63,
            "q": torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)}


def pack_planar(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, sc, dmin, mn of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    mn_bytes = torch.zeros(mn.shape[0], mn.shape[1], 1, dtype=torch.uint8, device=mn.device)
    mn_bytes[...] = mn.unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1), "dmin": dmin,
            "mn": mn_bytes.squeeze(-1)}


def decode(d: Tensor, dmin: Tensor, sc: Tensor, mn: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * sc * q - dmin * mn.  d [N, K/256], dmin [N, K/256], sc [N,
    K/32], mn [N, K/32], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 32))
    d = d.float()[..., None, None]
    dmin = dmin.float()[..., None, None]
    sc = sc.unflatten(1, (-1, 8)).unsqueeze(-1)
    mn = mn.unflatten(1, (-1, 8)).unsqueeze(-1)
    q = q.unflatten(1, (-1, 8, 32))
    space = workspace(out)
    w = torch.mul(d * sc, as_float(q, out), out=space)
    return torch.sub(w, dmin * mn, out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale and min by search for the least error; both in steps of the super-block's
    largest.  importance: float32 [K].
    """
    q, sc, mn, d, dmin = kquant_minmax(weight, code="u4", scale="u6", min="u6", super_scale="f16", super_min="f16", columns=32,
            super_columns=256, first=-1, step=0.1, steps=20, spread=2, importance=importance)
    return {"q": q, "sc": sc, "mn": mn, "d": d, "dmin": dmin}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 144 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 128
    i = u // 32 % 4
    j = u % 32
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
        state = use(state, 256 * t + 64 * i + 32 * h + j, d * sc * q - dmin * mn, live)
    return state


@triton.jit
def _start_gguf(g):
    """The pair of columns at which run g of a record begins."""
    return 16 * g


@triton.jit
def _fields_gguf(head, lane):
    """The numbers of a record's runs, from the words of its head."""
    d_g = records.floats(tl.float16, head[0], head[0])
    both = tl.where(lane < 2, head[1], head[3]) >> 16 * (lane % 2) & 0x0F0F
    both |= head[1] >> 16 * (lane % 2) + 2 * (lane // 2) & 0x3030
    sc_g = records.integers(6, both, both >> 8)
    dmin_g = records.floats(tl.float16, head[0] >> 16, head[0] >> 16)
    both = tl.where(lane < 2, head[2], head[3]) >> 16 * (lane % 2) + 4 * (lane // 2) & 0x0F0F
    both |= head[2] >> 16 * (lane % 2) + 2 * (lane // 2) & 0x3030
    mn_g = records.integers(6, both, both >> 8)
    return d_g, sc_g, dmin_g, mn_g


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, sc, dmin, mn = tensors
    d += n * (K // 256)
    dmin += n * (K // 256)
    sc += n * (K // 32)
    mn += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    d1 = tl.load(d + t // 2, live, 0).to(tl.float32)
    dmin1 = tl.load(dmin + t // 2, live, 0).to(tl.float32)
    sc1 = tl.load(sc + 4 * t + j, live, 0) & 63
    mn1 = tl.load(mn + 4 * t + j, live, 0) & 63
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, d1 * sc1 * q1 - dmin1 * mn1, live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(4, 32), lanes=(2,),
                order=(0, 1, 2, 4, 3),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4),
                    Sums(scale=group_sums.nested_with_minimum, blocks=("256", "32")), {"gemv": {}},
                    records=Records("blocks", _fields_gguf, _start_gguf, size=36, codes=4, head=(0,))))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.nested_with_minimum,
                    group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 32, 6), GroupField("dmin", 1, 256),
                    GroupField("mn", 1, 32, 6)), blocks=("256", "32")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d", "sc", "dmin", "mn")),
)

PROGRAM = {
    "name": "q4_k", "title": "GGML Q4_K, 4-bit codes with 6-bit scales and mins in super-blocks of 256",
    "source": "ggml-common.h block_q4_K", "formula": "d * sc * q - dmin * mn", "bits": "4.5 to 4.625",
    "digest": "a68099267625c83b",
    "detect": {"gguf": "Q4_K"},
    "variants": {(): {
        "fields": {
            "d": ("f16", "N", "K/256"), "dmin": ("f16", "N", "K/256"), "sc": ("u6", "N", "K/32"), "mn": ("u6", "N", "K/32"),
            "q": ("u4", "N", "K"),
        },
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "144*K/256",
                {"slices": (("d", 0, [0, [(0, 144, 1)]]), ("dmin", 16, [0, [(0, 144, 1)]]),
                ("sc", 32, [0, [(4, 1, 1), (2, 8, 1), (0, 144, 1)]], 0, 4),
                ("sc", 36, [0, [(4, 1, 1), (2, 2), (0, 144, 1)]], 4, 2),
                ("mn", 64, [0, [(4, 1, 1), (2, 36), (0, 144, 1)]], 0, 4),
                ("mn", 68, [0, [(4, 1, 1), (2, 2), (0, 144, 1)]], 4, 2),
                ("q", 128, [0, [(32, 1, 1), (2, 4), (4, 32, 1), (0, 144, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/32", {"padding": 192, "field": "sc"}),
                "dmin": ("f16", "N", "K/256", {"field": "dmin"}),
                "mn": ("u8", "N", "K/32", {"padding": 192, "field": "mn"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
