"""vptq: VPTQ, indices of vectors of 8 rows, columns in an order of their own.

    w = round(round(cb[q, n % 8] * a, type) + b, type)
    float32, rounded after each operation

    p      index into K groups [K]
    cb     type    [65536, 8]
    a      type    [K]
    b      type    [K]
    q      u{bits} [N/8, K]

    vptq: 2.00391 bits per weight at bits = 16, 1.75098 at 14, 1.50024 at 12

Built from the spec vptq (sha256 07fd4dc38caecf6b) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_16, bits_14, bits_12

PROGRAM = {
    "name": "vptq", "title": "VPTQ, indices of vectors of 8 rows, columns in an order of their own",
    "source": "VPTQ vptq/layers/vqlinear.py VQuantLinear, vptq/utils/pack.py pack_index, vptq/ops/quant_gemm.py dequant; one codebook",
    "formula": "round(round(cb[q, n % 8] * a, type) + b, type)", "bits": "1.5002 to 2.0039", "digest": "07fd4dc38caecf6b",
    "params": {"bits": (16, 14, 12), "type": ("bf16", "f16")},
    "by": ("bits",),
    "variants": {
        (16,): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "65536", "8"), "a": ("type", "K"), "b": ("type", "K"), "q": ("u16", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(K/2)", {"slices": (("q", 0, [1, [(2, 16), (0, 1, 2)]]),)}),
                    "centroids": ("type", "1", "65536", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (14,): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "16384", "8"), "a": ("type", "K"), "b": ("type", "K"), "q": ("u14", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(7*K/16)", {"slices": (("q", 0, [1, [(16, 14), (0, 7, 2)]]),)}),
                    "centroids": ("type", "1", "16384", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
                    "weight_scale": ("type", "K", {"optional": "a", "field": "a"}),
                    "weight_bias": ("type", "K", {"optional": "b", "field": "b"}),
                    "perm": ("i16", "K", {"optional": "perm"}),
                },
                "order": "perm", "unordered": ("weight_scale", "weight_bias"),
            }},
            "defaults": {"a": 1, "b": 0, "p": None},
        },
        (12,): {
            "fields": {
                "p": ("index", "K", {"groups": "K"}),
                "cb": ("type", "4096", "8"), "a": ("type", "K"), "b": ("type", "K"), "q": ("u12", "N/8", "K"),
            },
            "cuts": ("ceil(N/8)", "K"),
            "storages": {"vptq": {
                "tensors": {
                    "indices": ("i32", "1", "N/8", "ceil(3*K/8)", {"slices": (("q", 0, [1, [(8, 12), (0, 3, 2)]]),)}),
                    "centroids": ("type", "1", "4096", "8",
                        {"aliases": ("centroids.weight",), "seen": ("1", "?"), "slices": (("cb", 0, [1, 2]),)}),
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

FORMAT = Format(PROGRAM, {(16,): bits_16.VARIANT, (14,): bits_14.VARIANT, (12,): bits_12.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
