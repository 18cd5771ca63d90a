"""quanto: optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns.

    w = q * s - z
    float32, rounded after each operation

    s      scale_type [N, ceil(K/group)]
    z      scale_type [N, ceil(K/group)]
    q      u{bits}    [N, K]

    quanto: 4.5 bits per weight at bits = 4, 2.5 at 2, with group = 128
    planar: 4.5 bits per weight at bits = 4, 2.5 at 2, with group = 128

Built from the spec quanto (sha256 68b791cb5e3f0ca8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_2

FORMAT = Format(
    name="quanto", title="optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns",
    source="optimum-quanto 0.2.7, WeightQBitsTensor with axis 0", formula="q * s - z",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (2,): bits_2.VARIANT,
    },
    params={"bits": (4, 2), "group": (128, 96, 64, 32, -1, "any"), "scale_type": ("f32", "bf16", "f16")},
    sizes={"group": "K"},
    digest="68b791cb5e3f0ca8",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
