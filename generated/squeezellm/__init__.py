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

PROGRAM = {
    "name": "squeezellm", "title": "SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers",
    "source": "SqueezeLLM squeezellm/quant.py QuantLinearLUT", "formula": "lut[n, q]", "bits": "3.0005 to 4.0312",
    "digest": "3c2d445ac678d80e",
    "params": {"bits": (4, 3), "level_type": ("f32", "f16")},
    "by": ("bits",),
    "variants": {
        (4,): {
            "fields": {"lut": ("level_type", "N", "16"), "q": ("u4", "N", "K")},
            "storages": {
                "squeezellm": {"tensors": {
                    "qweight": ("i32", "4*K/32", "N", {"slices": (("q", 0, [1, [(8, 4), (4, 1, 0), (0, 4, 0)]]),)}),
                    "lookup_table": ("level_type", "N", "16", {"field": "lut"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                    "lut": ("level_type", "N", "16", {"field": "lut"}),
                }},
            },
            "plus": (("csr", {"start": ("rows", "i32", "?"), "column": ("cols", "i32", "?"), "value": ("vals", "f32", "?")},
                False), ("dense_rows",
                {"row": ("full_row_indices", "i32", "?"),
                "row_value": ("full_rows", "f32", "K", "?", {"digits": ("K", "?"), "order": ((1,), (0,))})}, False)),
        },
        (3,): {
            "fields": {"lut": ("level_type", "N", "8"), "q": ("u3", "N", "K")},
            "storages": {
                "squeezellm": {"tensors": {
                    "qweight": ("i32", "3*K/32", "N", {"words": (0, 3), "slices": (("q", 0, [1, [(32, 3), (0, 1, 0)]]),)}),
                    "lookup_table": ("level_type", "N", "8", {"field": "lut"}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]], 0, 2),)}),
                    "q_1": ("i32", "N", "16*ceil(K/512)",
                        {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (2, 1), (0, 16, 1)]], 2,
                        1),)}),
                    "lut": ("level_type", "N", "8", {"field": "lut"}),
                }},
            },
            "plus": (("csr", {"start": ("rows", "i32", "?"), "column": ("cols", "i32", "?"), "value": ("vals", "f32", "?")},
                False), ("dense_rows",
                {"row": ("full_row_indices", "i32", "?"),
                "row_value": ("full_rows", "f32", "K", "?", {"digits": ("K", "?"), "order": ((1,), (0,))})}, False)),
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (3,): bits_3.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
