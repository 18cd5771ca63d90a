"""fp8_ds_mla: Cache rows of multi-head latent attention, 512 codes of E4M3 with 4 scales, and 64 rotary numbers.

    w = q * s
    float32, rounded after each operation

    s      f32  [N, ceil(K/128)]
    rope   bf16 [N, 64]
    q      e4m3 [N, K]

    rows: 10.25 bits per weight

Built from the spec fp8_ds_mla (sha256 ef332b69ec89a87e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Format, Kernels, Storage, Variant, as_type
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e4m3


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_rows(kv_c_and_k_pe: Tensor) -> dict[str, Tensor]:
    """Fields of kv_c_and_k_pe uint8 [N, 512 + 16 + 128]."""
    codes = kv_c_and_k_pe[..., :512]
    scales = kv_c_and_k_pe[..., 512:528]
    rotary = kv_c_and_k_pe[..., 528:]
    return {"s": as_type(scales, torch.float32), "rope": as_type(rotary, torch.bfloat16),
            "q": as_type(codes, torch.float8_e4m3fn)}


def pack_rows(s: Tensor, rope: Tensor, q: Tensor) -> dict[str, Tensor]:
    """kv_c_and_k_pe of the fields; the inverse of unpack_rows."""
    scales_bytes = as_type(s.unsqueeze(-1), torch.uint8).flatten(1)
    rotary_bytes = as_type(rope.unsqueeze(-1), torch.uint8).flatten(1)
    return {"kv_c_and_k_pe": torch.cat([q.view(torch.uint8), scales_bytes, rotary_bytes], -1)}


def decode(s: Tensor, rope: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  s [N, ceil(K/128)], rope [N, 64], q [N, K]."""
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = e4m3(q).unflatten(1, (s.shape[1], -1))
    s = s.unsqueeze(-1)
    return torch.mul(q, s, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, s = absmax(weight, code="e4m3", scale="f32", rows=1, columns=128, axes=2, **{"least": 1.1754943508222875e-38, **options})
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_rows(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    kv_c_and_k_pe, = tensors
    kv_c_and_k_pe += 656 * n
    kv_c_and_k_pe_f32 = kv_c_and_k_pe.to(tl.pointer_type(tl.float32))
    s = tl.load(kv_c_and_k_pe_f32 + k // 128 + 128, live, 0)
    q = device.e4m3(tl.load(kv_c_and_k_pe + k, live, 0))
    return use(state, k, q * s, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "rows": Storage(unpack_rows, pack_rows, Kernels(_decode_rows, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"}, settings={"least": 1.1754943508222875e-38},
)

PROGRAM = {
    "name": "fp8_ds_mla",
    "title": "Cache rows of multi-head latent attention, 512 codes of E4M3 with 4 scales, and 64 rotary numbers",
    "source": "vLLM concat_and_cache_ds_mla_kernel (kv_cache_dtype fp8_ds_mla), FlashMLA tests/quant.py V32_FP8Sparse",
    "formula": "q * s", "bits": "10.25", "digest": "ef332b69ec89a87e",
    "fixed": {"K": 512},
    "variants": {(): {
        "fields": {"s": ("f32", "N", "ceil(K/128)"), "rope": ("bf16", "N", "64"), "q": ("e4m3", "N", "K")},
        "cuts": ("N", "ceil(K/128)"),
        "storages": {"rows": {
            "tensors": {"kv_c_and_k_pe": ("u8", "N", "512 + 16 + 128",
                {"slices": (("q", 0, [0, 1]), ("s", 4096, [0, [(4, 4, 1)]]), ("rope", 4224, [0, [(64, 2, 1)]]))})},
            "fixed": {"K": 512},
        }},
        "options": {
            "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
            "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
        },
        "appended": ("rope",),
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
