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

PROGRAM = {
    "name": "coreml_lut", "title": "Core ML palettes, codes into a table of levels that rows share",
    "source": "coremltools 9.0 optimize/_utils.py lut_to_dense and pack_elements_into_bits, scalar palettes of axis 0",
    "formula": "lut[n // rows, q]", "bits": "2 to 8.0002", "digest": "981ef0cb705716c5",
    "params": {"bits": (4, 2, 6, 8), "rows": (32, 16, -1), "level_type": ("f16", "f32")},
    "sizes": {"rows": "N"},
    "by": ("bits",),
    "variants": {
        (4,): {
            "fields": {"lut": ("level_type", "ceil(N/rows)", "16"), "q": ("u4", "N", "K")},
            "cuts": ("ceil(N/rows)", "K"),
            "storages": {
                "coreml": {"tensors": {
                    "indices": ("u8", "ceil(N*K/2)", {"slices": (("q", 0, [[(2, 4), (0, 1, 0)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "1", "16", "1", {"slices": (("lut", 0, [0, 2]),)}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "16", {"field": "lut"}),
                }},
            },
        },
        (2,): {
            "fields": {"lut": ("level_type", "ceil(N/rows)", "4"), "q": ("u2", "N", "K")},
            "cuts": ("ceil(N/rows)", "K"),
            "storages": {
                "coreml": {"tensors": {
                    "indices": ("u8", "ceil(N*K/4)", {"slices": (("q", 0, [[(4, 2), (0, 1, 0)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "1", "4", "1", {"slices": (("lut", 0, [0, 2]),)}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "4", {"field": "lut"}),
                }},
            },
        },
        (6,): {
            "fields": {"lut": ("level_type", "ceil(N/rows)", "64"), "q": ("u6", "N", "K")},
            "cuts": ("ceil(N/rows)", "K"),
            "storages": {
                "coreml": {"tensors": {
                    "indices": ("u8", "3*ceil(N*K/4)", {"slices": (("q", 0, [[(4, 6), (0, 3, 0)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "1", "64", "1", {"slices": (("lut", 0, [0, 2]),)}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                    "q_1": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                    "lut": ("level_type", "ceil(N/rows)", "64", {"field": "lut"}),
                }},
            },
        },
        (8,): {
            "fields": {"lut": ("level_type", "ceil(N/rows)", "256"), "q": ("u8", "N", "K")},
            "cuts": ("ceil(N/rows)", "K"),
            "storages": {
                "coreml": {"tensors": {
                    "indices": ("u8", "N*K", {"field": "q"}),
                    "lut": ("level_type", "ceil(N/rows)", "1", "256", "1", {"slices": (("lut", 0, [0, 2]),)}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "32*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                    "lut": ("level_type", "ceil(N/rows)", "256", {"field": "lut"}),
                }},
            },
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (2,): bits_2.VARIANT, (6,): bits_6.VARIANT, (8,): bits_8.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
