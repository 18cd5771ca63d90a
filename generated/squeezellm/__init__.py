"""squeezellm: SqueezeLLM's dense part, codes into a table of levels that each row learns.

    w = lut[n, q]
    float32, rounded after each operation

    lut    level_type [N, 16]
    q      u{bits}    [N, K]

    squeezellm at bits = 4: 4.00098 bits per weight
    squeezellm at bits = 3: 3.00049 bits per weight

Built from the spec squeezellm (sha256 2585573450928f18) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_3

FORMAT = Format(
    name="squeezellm", title="SqueezeLLM's dense part, codes into a table of levels that each row learns",
    source="SqueezeLLM squeezellm/quant.py QuantLinearLUT.pack2, without its sparse outliers", formula="lut[n, q]",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (3,): bits_3.VARIANT,
    },
    params={"bits": (4, 3), "level_type": ("f32", "f16")},
    digest="2585573450928f18",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
requantize = FORMAT.requantize
planar = FORMAT.planar
linear = FORMAT.linear
grouped_linear = FORMAT.grouped_linear
Linear = FORMAT.Linear
Embedding = FORMAT.Embedding
