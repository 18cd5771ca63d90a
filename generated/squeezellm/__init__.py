"""squeezellm: SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers.

    w = lut[n, q]
        + csr(rows, cols, vals)
        + dense_rows(full_row_indices, full_rows)
    float32, rounded after each operation

    lut    level_type [N, 16]
    q      u{bits}    [N, K]

    squeezellm: 4.00098 bits per weight at bits = 4, 3.00049 at 3
    planar: 4.03125 bits per weight at bits = 4, 3.01562 at 3

Built from the spec squeezellm (sha256 3c2d445ac678d80e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_3

FORMAT = Format(
    name="squeezellm", title="SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers",
    source="SqueezeLLM squeezellm/quant.py QuantLinearLUT", formula="lut[n, q]",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (3,): bits_3.VARIANT,
    },
    params={"bits": (4, 3), "level_type": ("f32", "f16")},
    digest="3c2d445ac678d80e",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
