"""f32: plain IEEE single precision.

    w = v
    float32, rounded after each operation

    v      f32 [N, K]

    plain: 32 bits per weight

Built from the spec f32 (sha256 ec3a944af1242397) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from torch import Tensor

from qdsl.encode import nearest
from qdsl.runtime import Format, Kernels, Storage, Variant
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_plain(weight: Tensor) -> dict[str, Tensor]:
    """Fields of weight float32 [N, K]."""
    return {"v": weight}


def pack_plain(v: Tensor) -> dict[str, Tensor]:
    """weight of the fields; the inverse of unpack_plain."""
    return {"weight": v}


def decode(v: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = v.  v [N, K]."""
    return v if out is None else out.copy_(v)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: each weight is rounded to nearest, ties to even."""
    v = nearest(weight, code="f32")
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
    "name": "f32", "title": "plain IEEE single precision", "source": "safetensors F32, GGUF F32", "formula": "v", "bits": "32",
    "digest": "ec3a944af1242397",
    "detect": {"safetensors": "F32", "gguf": "F32"},
    "variants": {(): {
        "fields": {"v": ("f32", "N", "K")},
        "storages": {"plain": {"tensors": {"weight": ("f32", "N", "K", {"field": "v"})}}},
        "copies": "v",
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
