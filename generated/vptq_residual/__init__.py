"""vptq_residual: VPTQ, indices of vectors and of residuals, columns in an order of their own.

    w = round(round(round(cb[q, n % rows] + rs[r, n % rows], type) * a, type) + b, type)
    float32, rounded after each operation

    p      index into K groups [K]
    cb     type    [65536, 8]
    rs     type    [256, 8]
    a      type    [K]
    b      type    [K]
    q      u{bits} [N/8, K]
    r      u{more} [N/8, K]

    vptq: 3.00392 bits per weight at bits = 16, more = 8, rows = 8, 1.50392 at 16, 8, 16, 4.00781 at 16, 16, 8, 2.00781 at 16, 16,
        16, 2 at 8, 8, 8, 1 at 8, 8, 16, 3.00392 at 8, 16, 8, 1.50392 at 8, 16, 16

Built from the spec vptq_residual (sha256 eb92c13f621a725c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import (bits_16_more_8_rows_8, bits_16_more_8_rows_16, bits_16_more_16_rows_8, bits_16_more_16_rows_16,
        bits_8_more_8_rows_8, bits_8_more_8_rows_16, bits_8_more_16_rows_8, bits_8_more_16_rows_16)

PROGRAM = {
    "name": "vptq_residual", "title": "VPTQ, indices of vectors and of residuals, columns in an order of their own",
    "source": "VPTQ vptq/layers/vqlinear.py VQuantLinear, vptq/utils/pack.py pack_index, vptq/ops/quant_gemm.py dequant; one codebook",
    "formula": "round(round(round(cb[q, n % rows] + rs[r, n % rows], type) * a, type) + b, type)", "bits": "1 to 4.0078",
    "digest": "eb92c13f621a725c",
    "params": {"bits": (16, 8), "more": (8, 16), "rows": (8, 16), "type": ("bf16", "f16")},
    "by": ("bits", "more", "rows"),
    "variants": {
        (16, 8, 8): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "65536", "8"), "rs": ("type", "256", "8"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u16", "N/8", "K"), "r": ("u8", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(3*K/4)",
                        {"slices": (("q", 0, [1, [(4, 24), (0, 3, 2)]]), ("r", 16, [1, [(4, 24), (0, 3, 2)]]))}),
                    "centroids": ("type", "1", "65536", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "256", "8",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (16, 8, 16): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "65536", "16"), "rs": ("type", "256", "16"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u16", "N/16", "K"), "r": ("u8", "N/16", "K"),
            },
            "cuts": ("ceil(N/16)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/16", "ceil(3*K/4)",
                        {"slices": (("q", 0, [1, [(4, 24), (0, 3, 2)]]), ("r", 16, [1, [(4, 24), (0, 3, 2)]]))}),
                    "centroids": ("type", "1", "65536", "16",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "256", "16",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (16, 16, 8): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "65536", "8"), "rs": ("type", "65536", "8"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u16", "N/8", "K"), "r": ("u16", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "K", {"slices": (("q", 0, [1, 2]), ("r", 16, [1, 2]))}),
                    "centroids": ("type", "1", "65536", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "65536", "8",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (16, 16, 16): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "65536", "16"), "rs": ("type", "65536", "16"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u16", "N/16", "K"), "r": ("u16", "N/16", "K"),
            },
            "cuts": ("ceil(N/16)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/16", "K", {"slices": (("q", 0, [1, 2]), ("r", 16, [1, 2]))}),
                    "centroids": ("type", "1", "65536", "16",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "65536", "16",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (8, 8, 8): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "256", "8"), "rs": ("type", "256", "8"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u8", "N/8", "K"), "r": ("u8", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(K/2)",
                        {"slices": (("q", 0, [1, [(2, 16), (0, 1, 2)]]), ("r", 8, [1, [(2, 16), (0, 1, 2)]]))}),
                    "centroids": ("type", "1", "256", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "256", "8",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (8, 8, 16): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "256", "16"), "rs": ("type", "256", "16"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u8", "N/16", "K"), "r": ("u8", "N/16", "K"),
            },
            "cuts": ("ceil(N/16)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/16", "ceil(K/2)",
                        {"slices": (("q", 0, [1, [(2, 16), (0, 1, 2)]]), ("r", 8, [1, [(2, 16), (0, 1, 2)]]))}),
                    "centroids": ("type", "1", "256", "16",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "256", "16",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (8, 16, 8): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "256", "8"), "rs": ("type", "65536", "8"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u8", "N/8", "K"), "r": ("u16", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(3*K/4)",
                        {"slices": (("q", 0, [1, [(4, 24), (0, 3, 2)]]), ("r", 8, [1, [(4, 24), (0, 3, 2)]]))}),
                    "centroids": ("type", "1", "256", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "65536", "8",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (8, 16, 16): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "256", "16"), "rs": ("type", "65536", "16"), "a": ("type", "K"), "b": ("type", "K"),
                "q": ("u8", "N/16", "K"), "r": ("u16", "N/16", "K"),
            },
            "cuts": ("ceil(N/16)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/16", "ceil(3*K/4)",
                        {"slices": (("q", 0, [1, [(4, 24), (0, 3, 2)]]), ("r", 8, [1, [(4, 24), (0, 3, 2)]]))}),
                    "centroids": ("type", "1", "256", "16",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "res_centroids": ("type", "1", "65536", "16",
                        {"aliases": ("res_centroids.weight",), "seen": ("1", "?"), "slices": (("rs", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
    },
}

FORMAT = Format(PROGRAM, {(16, 8, 8): bits_16_more_8_rows_8.VARIANT, (16, 8, 16): bits_16_more_8_rows_16.VARIANT,
        (16, 16, 8): bits_16_more_16_rows_8.VARIANT, (16, 16, 16): bits_16_more_16_rows_16.VARIANT,
        (8, 8, 8): bits_8_more_8_rows_8.VARIANT, (8, 8, 16): bits_8_more_8_rows_16.VARIANT,
        (8, 16, 8): bits_8_more_16_rows_8.VARIANT, (8, 16, 16): bits_8_more_16_rows_16.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
