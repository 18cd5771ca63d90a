"""coreml_lut: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]
    float32, rounded after each operation

    lut    level_type [ceil(N/rows), 16]
    q      u{bits}    [N, K]

    coreml: 4 bits per weight at bits = 4, 2 at 2, 6 at 6, 8.00024 at 8, with rows = 32
    planar: 4 bits per weight at bits = 4, 2 at 2, 6 at 6, 8.00024 at 8, with rows = 32

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_2, bits_6, bits_8

FORMAT = Format(
    name="coreml_lut", title="Core ML palettes, codes into a table of levels that rows share",
    source="coremltools 9.0 optimize/_utils.py lut_to_dense and pack_elements_into_bits, scalar palettes of axis 0",
    formula="lut[n // rows, q]",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (2,): bits_2.VARIANT,
        (6,): bits_6.VARIANT,
        (8,): bits_8.VARIANT,
    },
    params={"bits": (4, 2, 6, 8), "rows": (32, 16, -1), "level_type": ("f16", "f32")},
    sizes={"rows": "N"},
    digest="981ef0cb705716c5",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
