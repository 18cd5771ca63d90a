"""ocp_mxfp6: OCP MXFP6, 6-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors: 6.25 bits per weight at code = e2m3, 6.25 at e3m2
    torchao: 8.25 bits per weight at code = e2m3, 8.25 at e3m2
    torchao_swizzled: 8.25 bits per weight at code = e2m3, 8.25 at e3m2
    planar: 6.25 bits per weight at code = e2m3, 6.25 at e3m2

Built from the spec ocp_mxfp6 (sha256 16e577bbc8f11d5f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import code_e2m3, code_e3m2

PROGRAM = {
    "name": "ocp_mxfp6", "title": "OCP MXFP6, 6-bit floats with a power of two per 32",
    "source": "OCP Microscaling Formats 1.0; compressed-tensors mxfp6-pack, torchao MXTensor", "formula": "e * q",
    "bits": "6.25 to 8.25", "digest": "16e577bbc8f11d5f",
    "params": {"code": ("e2m3", "e3m2")},
    "by": ("code",),
    "variants": {
        ("e2m3",): {
            "fields": {"e": ("e8m0", "N", "ceil(K/32)"), "q": ("code", "N", "K")},
            "cuts": ("N", "ceil(K/32)"),
            "storages": {
                "compressed_tensors": {"tensors": {
                    "weight_packed": ("u8", "N", "24*K/32",
                        {"aliases": ("weight",), "slices": (("q", 0, [0, [(32, 6), (0, 24, 1)]]),)}),
                    "weight_scale": ("u8", "N", "K/32", {"field": "e"}),
                }},
                "torchao": {"tensors": {
                    "qdata": ("u8", "N", "K", {"aliases": ("_weight_qdata",), "padding": 192, "field": "q"}),
                    "scale": ("e8m0", "N", "K/32", {"aliases": ("_weight_scale",), "field": "e"}),
                }},
                "torchao_swizzled": {"tensors": {
                    "qdata": ("u8", "N", "K", {"aliases": ("_weight_qdata",), "padding": 192, "field": "q"}),
                    "scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                        {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/128)"),
                        "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                    "q_1": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                    "e": ("e8m0", "N", "ceil(K/32)", {"field": "e"}),
                }},
            },
            "options": {
                "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
                "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
            },
        },
        ("e3m2",): {
            "fields": {"e": ("e8m0", "N", "ceil(K/32)"), "q": ("code", "N", "K")},
            "cuts": ("N", "ceil(K/32)"),
            "storages": {
                "compressed_tensors": {"tensors": {
                    "weight_packed": ("u8", "N", "24*K/32",
                        {"aliases": ("weight",), "slices": (("q", 0, [0, [(32, 6), (0, 24, 1)]]),)}),
                    "weight_scale": ("u8", "N", "K/32", {"field": "e"}),
                }},
                "torchao": {"tensors": {
                    "qdata": ("u8", "N", "K", {"aliases": ("_weight_qdata",), "padding": 192, "field": "q"}),
                    "scale": ("e8m0", "N", "K/32", {"aliases": ("_weight_scale",), "field": "e"}),
                }},
                "torchao_swizzled": {"tensors": {
                    "qdata": ("u8", "N", "K", {"aliases": ("_weight_qdata",), "padding": 192, "field": "q"}),
                    "scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                        {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/128)"),
                        "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                    "q_1": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                    "e": ("e8m0", "N", "ceil(K/32)", {"field": "e"}),
                }},
            },
            "options": {
                "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
                "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
            },
        },
    },
}

FORMAT = Format(PROGRAM, {("e2m3",): code_e2m3.VARIANT, ("e3m2",): code_e3m2.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
