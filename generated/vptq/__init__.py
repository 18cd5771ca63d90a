"""vptq: VPTQ, indices of vectors of 8 rows, columns in an order of their own.

    w = round(round(cb[q, n % 8] * a, type) + b, type)
    float32, rounded after each operation

    p      index into K groups [K]
    cb     type    [65536, 8]
    a      type    [K]
    b      type    [K]
    q      u{bits} [N/8, K]

    vptq: 2.00391 bits per weight at bits = 16, 1.75098 at 14, 1.50024 at 12

Built from the spec vptq (sha256 e3739c43a64c7570) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_16, bits_14, bits_12

FORMAT = Format(
    name="vptq", title="VPTQ, indices of vectors of 8 rows, columns in an order of their own",
    source="VPTQ vptq/layers/vqlinear.py VQuantLinear, vptq/utils/pack.py pack_index, vptq/ops/quant_gemm.py dequant; one codebook",
    formula="round(round(cb[q, n % 8] * a, type) + b, type)",
    by=("bits",),
    variants={
        (16,): bits_16.VARIANT,
        (14,): bits_14.VARIANT,
        (12,): bits_12.VARIANT,
    },
    params={"bits": (16, 14, 12), "type": ("bf16", "f16")},
    digest="e3739c43a64c7570",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
