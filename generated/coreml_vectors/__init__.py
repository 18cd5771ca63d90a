"""coreml_vectors: Core ML palettes of vectors, a code for a few rows of a column into a table of vectors.

    w = lut[q, n % rows]
    float32, rounded after each operation

    lut    level_type [16, 4]
    q      u{bits}    [N/4, K]

    coreml: 1 bits per weight at bits = 4, 2 at 8

Built from the spec coreml_vectors (sha256 f4a5a480209d520e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_8

PROGRAM = {
    "name": "coreml_vectors", "title": "Core ML palettes of vectors, a code for a few rows of a column into a table of vectors",
    "source": "coremltools 9.0 optimize/_utils.py lut_to_dense with vector_axis 0, ClusterDim of OpPalettizerConfig",
    "formula": "lut[q, n % rows]", "bits": "1 to 2", "digest": "f4a5a480209d520e",
    "params": {"bits": (4, 8), "rows": (4,), "level_type": ("f16", "f32")},
    "by": ("bits",),
    "variants": {
        (4,): {
            "fields": {"lut": ("level_type", "16", "4"), "q": ("u4", "N/4", "K")},
            "cuts": ("ceil(N/4)", "K"),
            "storages": {"coreml": {"tensors": {
                "indices": ("u8", "N/4", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "lut": ("level_type", "1", "1", "16", "4", {"slices": (("lut", 0, [2, 3]),)}),
            }}},
        },
        (8,): {
            "fields": {"lut": ("level_type", "256", "4"), "q": ("u8", "N/4", "K")},
            "cuts": ("ceil(N/4)", "K"),
            "storages": {"coreml": {"tensors": {
                "indices": ("u8", "N/4", "K", {"field": "q"}),
                "lut": ("level_type", "1", "1", "256", "4", {"slices": (("lut", 0, [2, 3]),)}),
            }}},
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (8,): bits_8.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
