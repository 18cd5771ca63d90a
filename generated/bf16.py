"""bf16: plain bfloat16, the upper half of float32.

    w = v
    float32, rounded after each operation

    v      bf16 [N, K]

    plain: 16 bits per weight

Built from the spec bf16 (sha256 7dc8a2bcc65c4b51) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from torch import Tensor

from qdsl.encode import nearest
from qdsl.runtime import Format, Kernels, Storage, Variant
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_plain(weight: Tensor) -> dict[str, Tensor]:
    """Fields of weight bfloat16 [N, K]."""
    return {"v": weight}


def pack_plain(v: Tensor) -> dict[str, Tensor]:
    """weight of the fields; the inverse of unpack_plain."""
    return {"weight": v}


def decode(v: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = v.  v [N, K]."""
    return v.float() if out is None else out.copy_(v)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: each weight is rounded to nearest, ties to even."""
    v = nearest(weight, code="bf16")
    return {"v": v}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_plain(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, = tensors
    weight += n * K
    v = tl.load(weight + k, live, 0)
    return use(state, k, v, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "plain": Storage(unpack_plain, pack_plain, Kernels(_decode_plain, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode,
)

PROGRAM = {
    "name": "bf16", "title": "plain bfloat16, the upper half of float32", "source": "safetensors BF16, GGUF BF16", "formula": "v",
    "bits": "16", "digest": "7dc8a2bcc65c4b51",
    "detect": {"safetensors": "BF16", "gguf": "BF16"},
    "variants": {(): {
        "fields": {"v": ("bf16", "N", "K")},
        "storages": {"plain": {"tensors": {"weight": ("bf16", "N", "K", {"field": "v"})}}},
        "copies": "v",
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
