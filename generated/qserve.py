"""qserve: QServe W4A8 with groups, 4-bit codes, scales and zeros in 8 bits per group, and a scale for every row.

    w = (q * s2 + z) * s1
    float32, rounded after each operation

    s1     f16 [N]
    s2     i8  [N, K/128]
    z      i8  [N, K/128]
    q      u4  [N, K]

    qserve: 4.125 bits per weight
    planar: 4.125 bits per weight

Built from the spec qserve (sha256 a788ad9d1d8cb878) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import progressive
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q * s2 + z) * s1 */
#define BITS 4
#define FIELDS 3
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (0)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s1 = FIELD(0);
    const vf s2 = FIELD(1);
    const vf z = FIELD(2);
    *scale = s1 * s2;
    *offset = s1 * z;
}
"""


def unpack_qserve(qweight: Tensor, s1_scales: Tensor, s2_scales: Tensor, s2_zeros: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int8 [N/32, 512*K/32]; s1_scales float16 [N]; s2_scales int8 [K/128, 32*N/32]; s2_zeros int8 [K/128,
    32*N/32].
    """
    qweight_bytes = as_type(qweight, torch.uint8).unflatten(-1, (-1, 512))
    q_bytes = qweight_bytes.unflatten(-1, (8, 4, 2, 2, 4))
    s2_scales_bytes = as_type(s2_scales.unflatten(-1, (-1, 32)).permute(1, 0, 2), torch.uint8)
    s2_zeros_bytes = as_type(s2_zeros.unflatten(-1, (-1, 32)).permute(1, 0, 2), torch.uint8)
    return {
        "s1": s1_scales,
        "s2": as_type(s2_scales_bytes, torch.int8).unflatten(-1, (2, 8, 2)).permute(0, 2, 4, 3, 1).flatten(0, 3),
        "z": as_type(s2_zeros_bytes, torch.int8).unflatten(-1, (2, 8, 2)).permute(0, 2, 4, 3, 1).flatten(0, 3),
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -6).permute(0, 2, 6, 3, 1, 5, 4, 7).flatten(0, 3).flatten(1),
    }


def pack_qserve(s1: Tensor, s2: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qweight, s1_scales, s2_scales, s2_zeros of the fields; the inverse of unpack_qserve."""
    q_split = q.unflatten(-1, (-1, 2, 4, 4)).unflatten(0, (-1, 2, 2, 8))
    qweight_bytes = (q_split[:, 0] | q_split[:, 1] << 4).permute(0, 3, 2, 5, 4, 1, 6).flatten(2)
    s2_scales_bytes = s2.unflatten(0, (-1, 2, 2, 8)).permute(0, 4, 1, 3, 2).view(torch.uint8).flatten(2)
    s2_zeros_bytes = z.unflatten(0, (-1, 2, 2, 8)).permute(0, 4, 1, 3, 2).view(torch.uint8).flatten(2)
    return {"qweight": as_type(qweight_bytes, torch.int8).flatten(1), "s1_scales": s1,
            "s2_scales": as_type(s2_scales_bytes, torch.int8).permute(1, 0, 2).contiguous().flatten(1),
            "s2_zeros": as_type(s2_zeros_bytes, torch.int8).permute(1, 0, 2).contiguous().flatten(1)}


def unpack_planar(q: Tensor, s1: Tensor, s2: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s1 float16 [N]; s2 int8 [N, K/128]; z int8 [N, K/128]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s1": s1, "s2": s2, "z": z,
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)}


def pack_planar(s1: Tensor, s2: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s1, s2, z of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s1": s1, "s2": s2, "z": z}


def decode(s1: Tensor, s2: Tensor, z: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q * s2 + z) * s1.  s1 [N], s2 [N, K/128], z [N, K/128], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (-1, 128))
    s1 = s1.float()[..., None, None]
    s2 = s2.to(torch.int16).unsqueeze(-1)
    z = z.to(torch.int16).unsqueeze(-1)
    q = q.to(torch.int16).unflatten(1, (-1, 128))
    return torch.mul(as_float(q * s2 + z, out), s1, out=out).flatten(1)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: weights in units of largest magnitude of the row / divisor are rounded, and these
    integers again by their range.
    """
    q, s2, z, s1 = progressive(weight, code="u4", scale="i8", zero="i8", super_scale="f16", columns=128, super_axes=1,
            super_columns=weight.shape[1], divisor=119)
    return {"q": q, "s2": s2, "z": z, "s1": s1}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_qserve(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qweight, s1_scales, s2_scales, s2_zeros = tensors
    s1_scales += n
    s1 = tl.load(s1_scales, n < N, 0).to(tl.float32)
    s2_scales += 32 * (n // 32)
    s2_zeros += 32 * (n // 32)
    qweight += 512 * (n // 32 * (K // 32))
    s2 = tl.load(s2_scales + 32 * (k // 128 * (N // 32)) + 16 * (n % 32 // 16) + 2 * (n % 32 % 8)
        + n % 32 // 8 % 2, live, 0).to(tl.int32)
    z = tl.load(s2_zeros + 32 * (k // 128 * (N // 32)) + 16 * (n % 32 // 16) + 2 * (n % 32 % 8)
        + n % 32 // 8 % 2, live, 0).to(tl.int32)
    q = (tl.load(qweight + 512 * (k // 32) + 64 * (n % 32 % 8) + 16 * (k % 32 // 4 % 4) + 8 * (k % 32 // 16) + 4
        * (n % 32 // 8 % 2) + k % 32 % 4, live, 0) >> 4 * (n % 32 // 16) & 15).to(tl.int32)
    return use(state, k, (q * s2 + z) * s1, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s1, s2, z = tensors
    s1 += n
    s11 = tl.load(s1, n < N, 0).to(tl.float32)
    s2 += n * (K // 128)
    z += n * (K // 128)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    s21 = tl.load(s2 + t, live, 0).to(tl.int32)
    z1 = tl.load(z + t, live, 0).to(tl.int32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, (q1 * s21 + z1) * s11, live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "qserve": Storage(unpack_qserve, pack_qserve, Kernels(_decode_qserve, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.with_offset, finish=group_sums.scaled,
                    group_fields=(GroupField("s2", 1, 128, 8), GroupField("z", 1, 128, 8)), row_fields=(GroupField("s1", 1, 0),),
                    blocks=("128",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s1", "s2", "z")),
)

PROGRAM = {
    "name": "qserve",
    "title": "QServe W4A8 with groups, 4-bit codes, scales and zeros in 8 bits per group, and a scale for every row",
    "source": "deepcompressor backend/qserve/utils.py QServePacker, OmniServe W4A8OF16LinearDynamicInputScale",
    "formula": "(q * s2 + z) * s1", "bits": "4.125", "digest": "a788ad9d1d8cb878",
    "variants": {(): {
        "fields": {"s1": ("f16", "N"), "s2": ("i8", "N", "K/128"), "z": ("i8", "N", "K/128"), "q": ("u4", "N", "K")},
        "storages": {
            "qserve": {"tensors": {
                "qweight": ("i8", "N/32", "512*K/32",
                    {"seen": ("N", "K/2"),
                    "slices": (("q", 0,
                    [[(8, 64, 1), (2, 4, 1), (2, 4), (0, 1, 0)], [(4, 1, 1), (4, 16, 1), (2, 8, 1), (0, 512, 1)]]),)}),
                "s1_scales": ("f16", "N", {"field": "s1"}),
                "s2_scales": ("i8", "K/128", "32*N/32",
                    {"slices": (("s2", 0, [[(8, 2, 1), (2, 1, 1), (2, 16, 1), (0, 32, 1)], 0]),)}),
                "s2_zeros": ("i8", "K/128", "32*N/32",
                    {"slices": (("z", 0, [[(8, 2, 1), (2, 1, 1), (2, 16, 1), (0, 32, 1)], 0]),)}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "s1": ("f16", "N", {"field": "s1"}),
                "s2": ("i8", "N", "K/128", {"field": "s2"}),
                "z": ("i8", "N", "K/128", {"field": "z"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
