"""fix3: bfloat16 without loss, exponents in 3 bits from a base of each row, and a list of those that are further away.

    w = v
    float32, rounded after each operation

    v      bf16 [N, K]

    fix3: 11.3 bits per weight where weights are normal

Built from the spec fix3 (sha256 51dbe898d0ddae3e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import nearest
from qdsl.runtime import Format, Kernels, Pairs, Storage, Variant, cdiv, pad
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_fix3(exponents: Tensor, sign_mantissa: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of exponents uint8 [N, K]; sign_mantissa uint8 [N, 8*ceil(K/8)]."""
    sign_mantissa_bytes = sign_mantissa.unflatten(-1, (-1, 8))
    v_low = (sign_mantissa_bytes.unflatten(-1, (2, 2, 2)) & 127).permute(0, 1, 2, 4, 3).flatten(1)[:, :K]
    v_high = (sign_mantissa_bytes.unflatten(-1, (2, 2, 2)) >> 7).permute(0, 1, 2, 4, 3).flatten(1)[:, :K]
    return {
            "v": (v_low.to(torch.int32) | exponents.to(torch.int32) << 7 | v_high.to(torch.int32)
                << 15).to(torch.int16).view(torch.bfloat16)}


def pack_fix3(v: Tensor) -> dict[str, Tensor]:
    """exponents, sign_mantissa of the fields; the inverse of unpack_fix3."""
    exponents_bytes = (v.view(torch.int16) >> 7 & 255).to(torch.uint8)
    sign_mantissa_bytes = torch.zeros(v.shape[0], cdiv(v.shape[1], 8), 8, dtype=torch.uint8, device=v.device)
    sign_mantissa_bytes[...] |= (pad(v.view(torch.int16), (0, -v.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 2, 2, 2))
        & 127).permute(0, 1, 2, 4, 3).to(torch.uint8).flatten(2)
    sign_mantissa_bytes[...] |= ((pad(v.view(torch.int16), (0, -v.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 2, 2, 2)) >> 15)
        << 7).permute(0, 1, 2, 4, 3).to(torch.uint8).flatten(2)
    return {"exponents": exponents_bytes, "sign_mantissa": sign_mantissa_bytes.flatten(1)}


def decode(v: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = v.  v [N, K]."""
    return v.float() if out is None else out.copy_(v)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: each weight is rounded to nearest, ties to even."""
    v = nearest(weight, code="bf16")
    return {"v": v}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_fix3(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    exponents, sign_mantissa = tensors
    exponents += n * K
    sign_mantissa += 8 * (n * tl.cdiv(K, 8))
    v_low = (tl.load(sign_mantissa + 8 * (k // 8) + 4 * (k % 8 // 4) + 2 * (k % 8 % 2) + k % 8 // 2 % 2, live, 0)
        & 127).to(tl.int32)
    v_high = (tl.load(exponents + k, live, 0)).to(tl.int32)
    v_high1 = (tl.load(sign_mantissa + 8 * (k // 8) + 4 * (k % 8 // 4) + 2 * (k % 8 % 2) + k % 8 // 2 % 2, live, 0) >> 7
        & 1).to(tl.int32)
    v = (v_low | v_high << 7 | v_high1 << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return use(state, k, v, live)


@triton.jit
def _pairs_fix3(exponents, sign_mantissa0, sign_mantissa1):
    """v of eight columns: of 2j and 2j + 1 in the halves of word j.

    exponents: four words, with the symbols at bit 7 of each half.  sign_mantissa0, sign_mantissa1: the words of sign_mantissa.
    """
    v0 = (sign_mantissa0 & 0x007f007f) | ((sign_mantissa0 << 8) & 0x80008000) | exponents[0]
    v1 = ((sign_mantissa0 >> 8) & 0x007f007f) | (sign_mantissa0 & 0x80008000) | exponents[1]
    v2 = (sign_mantissa1 & 0x007f007f) | ((sign_mantissa1 << 8) & 0x80008000) | exponents[2]
    v3 = ((sign_mantissa1 >> 8) & 0x007f007f) | (sign_mantissa1 & 0x80008000) | exponents[3]
    return v0, v1, v2, v3


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "fix3": Storage(unpack_fix3, pack_fix3, Kernels(_decode_fix3, rows="N", units="K", last="k",
                pairs=Pairs(_pairs_fix3, "bf16", "exponents", 7, "sign_mantissa"))),
    },
    decode=decode, encode=encode,
)

PROGRAM = {
    "name": "fix3",
    "title": "bfloat16 without loss, exponents in 3 bits from a base of each row, and a list of those that are further away",
    "source": "this project; the code is described in qdsl/codecs/row_window/reference.py", "formula": "v", "bits": "11.3",
    "digest": "51dbe898d0ddae3e",
    "variants": {(): {
        "fields": {"v": ("bf16", "N", "K")},
        "storages": {"fix3": {
            "tensors": {
                "codes": ("i32", "N", "2*ceil(K/32)"), "upper": ("i32", "N", "ceil(K/32)"), "base": ("i16", "N"),
                "patch_start": ("i32", "?"), "patch_column": ("i16", "?"), "patch_exponent": ("u8", "?"),
                "sign_mantissa": ("u8", "N", "8*ceil(K/8)",
                    {"slices": (("v", 0, [0, [(2, 2, 1), (2, 1, 1), (2, 4, 1), (0, 8, 1)]], 0, 7),
                    ("v", 7, [0, [(2, 2, 1), (2, 1, 1), (2, 4, 1), (0, 8, 1)]], 15, 1))}),
                "weight_shape": ("shape", "2"),
            },
            "streams": {"exponents": ("row_window", ("u8", "N", "K", {"slices": (("v", 0, [0, 1], 7, 8),)}),
                {"codes": "codes", "upper": "upper", "base": "base", "start": "patch_start", "column": "patch_column",
                "value": "patch_exponent"})},
            "shape": "weight_shape",
        }},
        "copies": "v",
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
