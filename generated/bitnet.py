"""bitnet: BitNet b1.58 of transformers, codes of three values and a scale that divides.

    w = (q - 1) / s
    float32, rounded after each operation

    s      scale_type []
    q      u2         [N, K]

    transformers: 2 bits per weight
    planar: 2 bits per weight

Built from the spec bitnet (sha256 0fc28cfbff78079d) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import ternary
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - 1) / s */
#define BITS 2
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {-1.0f, 0.0f, 1.0f, 2.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-1)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = 1.0f / s;
}
"""


def unpack_transformers(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N/4, K]; weight_scale scale_type [1]."""
    return {"s": weight_scale.squeeze(0), "q": spread(weight, 2).permute(2, 0, 1).flatten(0, 1)}


def pack_transformers(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_transformers."""
    q_split = q.unflatten(0, (4, -1))
    r = sum(q_split[i] << 2 * i for i in range(4))
    return {"weight": r, "weight_scale": s.unsqueeze(-1)}


def unpack_planar(q: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type []."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s,
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s}


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - 1) / s.  s [], q [N, K]."""
    s = s.float()
    q = q.view(torch.int8)
    return torch.div(as_float(q - 1, out), s, out=out)


def encode(weight: Tensor, *, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = the mean magnitude of the block, or its inverse; codes of the nearest of -1, 0
    and 1 times that.
    """
    q, s = ternary(weight, code="u2", scale=scale_type, rows=weight.shape[0], columns=weight.shape[1], axes=0, divided=1)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_transformers(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale = tensors
    s = tl.load(weight_scale).to(tl.float32)
    weight += n % (N // 4) * K
    q = (tl.load(weight + k, live, 0) >> 2 * (n // (N // 4)) & 3).to(tl.int32)
    return use(state, k, tl.div_rn((q - 1).to(tl.float32), s), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s = tensors
    s1 = tl.load(s).to(tl.float32)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (256 * t + 32 * b + 2 * a < K)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                    q1 = (q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3).to(tl.int32)
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a
                        + c, tl.div_rn((q1 - 1).to(tl.float32), s1), inside)
    return state


@triton.jit
def _finish_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a row adds up to, with w = 1.0 / s * (q - 1.0)."""
    s, = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-1.0 - BASE) * ones
    return lanes.plus(total, sum * (1.0 / s))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "transformers": Storage(unpack_transformers, pack_transformers, Kernels(_decode_transformers, rows="N", units="K",
                last="k", divides=True)),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7), divides=True,
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(finish=_finish_planar, row_fields=(GroupField("s", 0, 0),), ones=True),
                    {"skinny": {}, "tile_gemm": {"zero": (-1, -129), "exact": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s",)),
)

PROGRAM = {
    "name": "bitnet", "title": "BitNet b1.58 of transformers, codes of three values and a scale that divides",
    "source": "transformers integrations/bitnet.py pack_weights, BitLinear", "formula": "(q - 1) / s", "bits": "2",
    "digest": "0fc28cfbff78079d",
    "params": {"scale_type": ("bf16", "f16", "f32")},
    "variants": {(): {
        "fields": {"s": ("scale_type",), "q": ("u2", "N", "K")},
        "storages": {
            "transformers": {
                "tensors": {
                    "weight": ("u8", "N/4", "K", {"slices": (("q", 0, [[(0, 1, 0), (4, 2)], 1]),)}),
                    "weight_scale": ("scale_type", "1", {"slices": (("s", 0, []),)}),
                },
                "whole": True,
            },
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                "s": ("scale_type", {"field": "s"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
