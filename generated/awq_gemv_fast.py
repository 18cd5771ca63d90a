"""awq_gemv_fast: AWQ for fast gemv kernels and llm-awq, 4-bit codes with a scale and a scaled zero in floats per group.

    w = q * s + z
    float32, rounded after each operation

    z      f16 [N, ceil(K/group)]
    s      f16 [N, ceil(K/group)]
    q      u4  [N, K]

    gemv_fast: 4.25 bits per weight with group = 128
    planar: 4.25 bits per weight with group = 128

Built from the spec awq_gemv_fast (sha256 52af33d6fa67f954) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import scaled_zero
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, cdiv, pad, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s + z */
#define BITS 4
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (0)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    const vf z = FIELD(1);
    *scale = s;
    *offset = z;
}
"""


def unpack_gemv_fast(qweight: Tensor, scales: Tensor, qzeros: Tensor, *, K: int, group: int) -> dict[str, Tensor]:
    """Fields of qweight int16 [N/4, 64*K/64]; scales float16 [1024*ceil(K/1024)/group, N]; qzeros float16
    [1024*ceil(K/1024)/group, N].
    """
    r = as_type(qweight, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes = r.unflatten(-1, (4, 2, 8, 2))
    return {"z": qzeros.t()[:, :cdiv(K, group)], "s": scales.t()[:, :cdiv(K, group)],
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -3).permute(0, 2, 1, 3, 6, 4, 5).flatten(0, 1).flatten(1)}


def pack_gemv_fast(z: Tensor, s: Tensor, q: Tensor, *, K: int, group: int) -> dict[str, Tensor]:
    """qweight, scales, qzeros of the fields; the inverse of unpack_gemv_fast."""
    q_split = q.unflatten(-1, (-1, 2, 2, 2, 8)).unflatten(0, (-1, 4))
    r = (q_split[:, :, :, :, :, 0] | q_split[:, :, :, :, :, 1] << 4).permute(0, 2, 1, 3, 5, 4).flatten(2)
    return {"qweight": as_type(r, torch.int16).flatten(1),
            "scales": pad(s, (0, 1024 * cdiv(K, 1024) // group - cdiv(K, group), 0, 0)).t().contiguous(),
            "qzeros": pad(z, (0, 1024 * cdiv(K, 1024) // group - cdiv(K, group), 0, 0)).t().contiguous()}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s float16 [N, ceil(K/group)]; z float16 [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"z": z, "s": s, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(z: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(z: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s + z.  z [N, ceil(K/group)], s [N, ceil(K/group)], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (z.shape[1], -1))
    q = q.unflatten(1, (z.shape[1], -1))
    z = z.float().unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.add(w, z, out=out).flatten(1)


def encode(weight: Tensor, *, group: int) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = -scale * the code of 0."""
    q, z, s = scaled_zero(weight, code="u4", zero="f16", scale="f16", rows=1, columns=group, axes=2)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gemv_fast(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qweight, scales, qzeros = tensors
    group, = sizes
    qzeros += n
    scales += n
    qweight += 64 * (n // 4 * (K // 64))
    z = tl.load(qzeros + k // group * N, live, 0).to(tl.float32)
    s = tl.load(scales + k // group * N, live, 0).to(tl.float32)
    q = tl.load(qweight + 64 * (k // 64) + 16 * (n % 4) + 8 * (k % 64 // 32) + k % 64 % 8, live, 0) >> 4 * (k % 64 // 8 % 4) & 15
    return use(state, k, q * s + z, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    z1 = tl.load(z + (4 * t + j) // (group // 32), live, 0).to(tl.float32)
    s1 = tl.load(s + (4 * t + j) // (group // 32), live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, q1 * s1 + z1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gemv_fast": Storage(unpack_gemv_fast, pack_gemv_fast, Kernels(_decode_gemv_fast, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)

PROGRAM = {
    "name": "awq_gemv_fast",
    "title": "AWQ for fast gemv kernels and llm-awq, 4-bit codes with a scale and a scaled zero in floats per group",
    "source": "autoawq WQLinear_GEMVFast.from_linear, llm-awq quantize/qmodule.py pack_intweight", "formula": "q * s + z",
    "bits": "4.25", "digest": "52af33d6fa67f954",
    "params": {"group": (128, 64, 32, "any")},
    "sizes": {"group": "K"},
    "variants": {(): {
        "fields": {"z": ("f16", "N", "ceil(K/group)"), "s": ("f16", "N", "ceil(K/group)"), "q": ("u4", "N", "K")},
        "cuts": ("N", "ceil(K/group)"),
        "storages": {
            "gemv_fast": {"tensors": {
                "qweight": ("i16", "N/4", "64*K/64",
                    {"slices": (("q", 0, [[(4, 16, 1), (0, 1, 0)], [(8, 1, 1), (4, 4), (2, 8, 1), (0, 64, 1)]]),)}),
                "scales": ("f16", "1024*ceil(K/1024)/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                "qzeros": ("f16", "1024*ceil(K/1024)/group", "N", {"aliases": ("scaled_zeros",), "slices": (("z", 0, [1, 0]),)}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "s": ("f16", "N", "ceil(K/group)", {"field": "s"}),
                "z": ("f16", "N", "ceil(K/group)", {"field": "z"}),
            }},
        },
        "codes": {"z": 0},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
