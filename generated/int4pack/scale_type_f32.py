"""int4pack at scale_type = f32: torch's int4pack, 4-bit codes with a scale and a zero in floats per group.

    w = (q - 8) * s + z

Built from the spec int4pack (sha256 4c5af078cde936ea) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, cdiv, empty,
        pad)
from qdsl.runtime.gpu.kernels import bitplanes

from .scale_type_bf16 import (unpack_cpu_avx512, unpack_cpu_avx2, unpack_cpu_scalar, unpack_cpu_rest, pack_cpu_rest,
        unpack_planar, pack_planar, decode, encode, _decode_cpu_avx512, _decode_cpu_avx2, _decode_cpu_scalar, _decode_cpu_rest,
        _decode_planar, _scale_planar)


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - 8) * s + z */
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
    *offset = -8.0f * s + z;
}
"""


def pack_cpu_avx512(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_avx512."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 64)).unflatten(0, (-1, 2, 32))
    weight_bytes = (q_split[:, 0] | q_split[:, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((64 * cdiv(N, 64), s.shape[1], 8), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:4] = as_type(pad(s, (0, 0, 0, 64 * cdiv(N, 64) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 4:8] = as_type(pad(z, (0, 0, 0, 64 * cdiv(N, 64) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def pack_cpu_avx2(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_avx2."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 32)).unflatten(0, (-1, 2, 16))
    weight_bytes = (q_split[:, 0] | q_split[:, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((32 * cdiv(N, 32), s.shape[1], 8), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:4] = as_type(pad(s, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 4:8] = as_type(pad(z, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def pack_cpu_scalar(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_scalar."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 32)).unflatten(0, (-1, 16, 2))
    weight_bytes = (q_split[:, :, 0] | q_split[:, :, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((32 * cdiv(N, 32), s.shape[1], 8), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:4] = as_type(pad(s, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 4:8] = as_type(pad(z, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "cpu_avx512": Storage(unpack_cpu_avx512, pack_cpu_avx512, Kernels(_decode_cpu_avx512, rows="N", units="K", last="k")),
        "cpu_avx2": Storage(unpack_cpu_avx2, pack_cpu_avx2, Kernels(_decode_cpu_avx2, rows="N", units="K", last="k")),
        "cpu_scalar": Storage(unpack_cpu_scalar, pack_cpu_scalar, Kernels(_decode_cpu_scalar, rows="N", units="K", last="k")),
        "cpu_rest": Storage(unpack_cpu_rest, pack_cpu_rest, Kernels(_decode_cpu_rest, rows="N/2", units="K", last="n", sums=2,
                lanes=(2,), order=(0, 2, 1))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, scheme="float_middle", roles={"code": "q", "zero": "z", "scale": "s"}, settings={"offset": 8},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)
