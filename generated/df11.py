"""df11: DFloat11, bfloat16 without loss, exponents in a Huffman code of at most 32 bits.

    w = v
    float32, rounded after each operation

    v      bf16 [N, K]

    df11: 10.8 bits per weight where weights are normal

Built from the spec df11 (sha256 50436b7e141e11b8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import nearest
from qdsl.runtime import Format, Kernels, Storage, Variant
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_df11(exponents: Tensor, sign_mantissa: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of exponents uint8 [N*K]; sign_mantissa uint8 [N*K]."""
    v_high = (exponents)[:N * K].unflatten(0, (N, K))
    v_low = (sign_mantissa & 127)[:N * K].unflatten(0, (N, K))
    v_high2 = (sign_mantissa >> 7)[:N * K].unflatten(0, (N, K))
    return {
            "v": (v_low.to(torch.int32) | v_high.to(torch.int32) << 7 | v_high2.to(torch.int32)
                << 15).to(torch.int16).view(torch.bfloat16)}


def pack_df11(v: Tensor) -> dict[str, Tensor]:
    """exponents, sign_mantissa of the fields; the inverse of unpack_df11."""
    exponents_bytes = (v.view(torch.int16).flatten() >> 7 & 255).to(torch.uint8)
    sign_mantissa_bytes = torch.zeros(v.numel(), 1, dtype=torch.uint8, device=v.device)
    sign_mantissa_bytes[...] |= (v.view(torch.int16).flatten() & 127).to(torch.uint8).unsqueeze(-1)
    sign_mantissa_bytes[...] |= ((v.view(torch.int16).flatten() >> 15) << 7).to(torch.uint8).unsqueeze(-1)
    return {"exponents": exponents_bytes, "sign_mantissa": sign_mantissa_bytes.squeeze(-1)}


def decode(v: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = v.  v [N, K]."""
    return v.float() if out is None else out.copy_(v)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: each weight is rounded to nearest, ties to even."""
    v = nearest(weight, code="bf16")
    return {"v": v}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_df11(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    exponents, sign_mantissa = tensors
    exponents += n * K
    sign_mantissa += n * K
    v_low = (tl.load(sign_mantissa + k, live, 0) & 127).to(tl.int32)
    v_high = (tl.load(exponents + k, live, 0)).to(tl.int32)
    v_high1 = (tl.load(sign_mantissa + k, live, 0) >> 7 & 1).to(tl.int32)
    v = (v_low | v_high << 7 | v_high1 << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return use(state, k, v, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "df11": Storage(unpack_df11, pack_df11, Kernels(_decode_df11, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode,
)

PROGRAM = {
    "name": "df11", "title": "DFloat11, bfloat16 without loss, exponents in a Huffman code of at most 32 bits",
    "source": "dfloat11 0.5.0 dfloat11_utils.py, encode_weights and get_luts", "formula": "v", "bits": "10.8",
    "digest": "50436b7e141e11b8",
    "detect": {"parts": {
        "begins": "split_positions", "settings": "dfloat11_config", "names": "pattern_dict", "threads": "threads_per_block",
        "window": "bytes_per_thread", "inert": "version", "alone": "hlane",
    }},
    "variants": {(): {
        "fields": {"v": ("bf16", "N", "K")},
        "storages": {"df11": {
            "tensors": {
                "luts": ("u8", "?", "256"), "encoded_exponent": ("u8", "?"), "output_positions": ("u8", "?"), "gaps": ("u8", "?"),
                "sign_mantissa": ("u8", "N*K", {"slices": (("v", 0, [0], 0, 7), ("v", 7, [0], 15, 1))}),
            },
            "streams": {"exponents": ("huffman_windows", ("u8", "N*K", {"slices": (("v", 0, [0], 7, 8),)}),
                {"tables": "luts", "data": "encoded_exponent", "positions": "output_positions", "gaps": "gaps"})},
        }},
        "copies": "v",
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
