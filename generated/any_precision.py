"""any_precision: any-precision LLM at 4 bits, planes of bits and for every row a table of levels.

    w = lut[n, q]
    float32, rounded after each operation

    lut    f16 [N, 16]
    q      u4  [N, K]

    any_precision: 4 bits per weight

Built from the spec any_precision (sha256 54ab48888bf9f3c4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_type, lookup
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_any_precision(qweight: Tensor, lut4: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [4, N, 32*K/1024]; lut4 float16 [N, 16]."""
    qweight_0 = qweight[0]
    qweight_1 = qweight[1]
    qweight_2 = qweight[2]
    qweight_3 = qweight[3]
    qweight_0_bytes = as_type(qweight_0, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes = qweight_0_bytes.unflatten(-1, (32, 4))
    q_high = torch.stack([q_bytes >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_1_bytes = as_type(qweight_1, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes2 = qweight_1_bytes.unflatten(-1, (32, 4))
    q_high2 = torch.stack([q_bytes2 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_2_bytes = as_type(qweight_2, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes3 = qweight_2_bytes.unflatten(-1, (32, 4))
    q_high3 = torch.stack([q_bytes3 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_3_bytes = as_type(qweight_3, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes4 = qweight_3_bytes.unflatten(-1, (32, 4))
    q_low = torch.stack([q_bytes4 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    return {"lut": lut4, "q": q_low | q_high3 << 1 | q_high2 << 2 | q_high << 3}


def pack_any_precision(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qweight, lut4 of the fields; the inverse of unpack_any_precision."""
    q_split = q.unflatten(-1, (-1, 4, 32, 8)).flip(2)
    qweight_0_bytes = sum((q_split[..., i] >> 3) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_1_bytes = sum((q_split[..., i] >> 2 & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_2_bytes = sum((q_split[..., i] >> 1 & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_3_bytes = sum((q_split[..., i] & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    return {
            "qweight": torch.stack([as_type(qweight_0_bytes, torch.int32).flatten(1),
                as_type(qweight_1_bytes, torch.int32).flatten(1), as_type(qweight_2_bytes, torch.int32).flatten(1),
                as_type(qweight_3_bytes, torch.int32).flatten(1)], 0),
            "lut4": lut}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n, q].  lut [N, 16], q [N, K]."""
    lut = lut.float()[:, None, :]
    q = q.view(torch.int8)
    return lookup(lut, q) if out is None else out.copy_(lookup(lut, q))


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u4", levels="f16", rows=1, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_any_precision(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit u of row n, in float32."""
    qweight, lut4 = tensors
    qweight_0 = qweight
    qweight_0 += 32 * (n * (K // 1024))
    qweight_1 = qweight
    qweight_1 += 32 * (n * (K // 1024))
    qweight_2 = qweight
    qweight_2 += 32 * (n * (K // 1024))
    qweight_3 = qweight
    qweight_3 += 32 * (n * (K // 1024))
    lut4 += 16 * n
    t = u // 32
    j = u % 32
    q_word = tl.load(qweight_0 + 32 * t + j, live, 0)
    q_word1 = tl.load(qweight_1 + 32 * t + 32 * (N * (K // 1024)) + j, live, 0)
    q_word2 = tl.load(qweight_2 + 64 * (N * (K // 1024)) + 32 * t + j, live, 0)
    q_word3 = tl.load(qweight_3 + 96 * (N * (K // 1024)) + 32 * t + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(8):
            q_low = q_word3 >> 31 - 8 * h - i & 1
            q_high = q_word2 >> 31 - 8 * h - i & 1
            q_high1 = q_word1 >> 31 - 8 * h - i & 1
            q_high2 = q_word >> 31 - 8 * h - i & 1
            q = (q_low | q_high << 1 | q_high1 << 2 | q_high2 << 3).to(tl.int32)
            lut = tl.load(lut4 + q, live, 0).to(tl.float32)
            state = use(state, 1024 * t + 256 * h + 8 * j + i, lut, live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("f16", "N", "16"), "q": Field("u4", "N", "K")},
    storages={
        "any_precision": Storage(unpack=unpack_any_precision, pack=pack_any_precision, tensors={
            "qweight": Stored("i32", "4", "N", "32*K/1024"),
            "lut4": Stored("f16", "N", "16"),
        }, kernels=Kernels(_decode_any_precision, rows="N", units="K/32", last="k")),
    },
    decode=decode, encode=encode, importance=True,
)

FORMAT = Format(
    name="any_precision", title="any-precision LLM at 4 bits, planes of bits and for every row a table of levels",
    source="any-precision-llm any_precision/quantization/pack.py; columns in whole warps of 1024", formula="lut[n, q]",
    variants={(): VARIANT},
    digest="54ab48888bf9f3c4",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
