"""ocp_mxfp8: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    torchao: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    torchao_swizzled: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    comfyui: 8.25 bits per weight at code = e4m3
    mlx: 8.25 bits per weight at code = e4m3
    planar: 8.25 bits per weight at code = e4m3, 8.25 at e5m2

Built from the spec ocp_mxfp8 (sha256 ba023f641f5ac9d2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import code_e4m3, code_e5m2

PROGRAM = {
    "name": "ocp_mxfp8", "title": "OCP MXFP8, 8-bit floats with a power of two per 32",
    "source": "OCP Microscaling Formats 1.0; compressed-tensors mxfp8, ModelOpt MXFP8, torchao MXTensor", "formula": "e * q",
    "bits": "8.25", "digest": "ba023f641f5ac9d2",
    "params": {"code": ("e4m3", "e5m2")},
    "by": ("code",),
    "detect": {"claimed": ["comfyui"]},
    "variants": {
        ("e4m3",): {
            "fields": {"e": ("e8m0", "N", "ceil(K/32)"), "q": ("code", "N", "K")},
            "cuts": ("N", "ceil(K/32)"),
            "storages": {
                "compressed_tensors": {"tensors": {"weight": ("code", "N", "K", {"field": "q"}),
                    "weight_scale": ("u8", "N", "K/32", {"field": "e"})}},
                "torchao": {"tensors": {
                    "qdata": ("code", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                    "scale": ("e8m0", "N", "K/32", {"aliases": ("_weight_scale",), "field": "e"}),
                }},
                "torchao_swizzled": {"tensors": {
                    "qdata": ("code", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                    "scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                        {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/128)"),
                        "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                }},
                "comfyui": {"tensors": {
                    "weight": ("e4m3", "N", "K", {"field": "q"}),
                    "weight_scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                        {"seen": ("128*ceil(N/128)", "4*ceil(K/128)"),
                        "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                }},
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "K/4", {"slices": (("q", 0, [0, [(4, 8), (0, 1, 1)]]),)}),
                    "scales": ("u8", "N", "K/32", {"field": "e"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "32*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                    "e": ("e8m0", "N", "ceil(K/32)", {"field": "e"}),
                }},
            },
            "options": {
                "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
                "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
            },
        },
        ("e5m2",): {
            "fields": {"e": ("e8m0", "N", "ceil(K/32)"), "q": ("code", "N", "K")},
            "cuts": ("N", "ceil(K/32)"),
            "storages": {
                "compressed_tensors": {"tensors": {"weight": ("code", "N", "K", {"field": "q"}),
                    "weight_scale": ("u8", "N", "K/32", {"field": "e"})}},
                "torchao": {"tensors": {
                    "qdata": ("code", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                    "scale": ("e8m0", "N", "K/32", {"aliases": ("_weight_scale",), "field": "e"}),
                }},
                "torchao_swizzled": {"tensors": {
                    "qdata": ("code", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                    "scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                        {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/128)"),
                        "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "32*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
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

FORMAT = Format(PROGRAM, {("e4m3",): code_e4m3.VARIANT, ("e5m2",): code_e5m2.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
