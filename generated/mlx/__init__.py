"""mlx: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b
    float32, rounded after each operation

    s      scale_type [N, ceil(K/group)]
    b      scale_type [N, ceil(K/group)]
    q      u{bits}    [N, K]

    mlx: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 3.5 at 3, 5.5 at 5, 6.5 at 6, with group = 64
    planar: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 3.5 at 3, 5.5 at 5, 6.5 at 6, with group = 64

Built from the spec mlx (sha256 5f5a2374b16e8d33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_8, bits_2, bits_3, bits_5, bits_6

PROGRAM = {
    "name": "mlx", "title": "MLX affine, integer codes with a scale and a bias in floats per group of columns",
    "source": "MLX core.quantize in mode affine, folders of mlx-lm", "formula": "q * s + b", "bits": "2.5 to 8.5",
    "digest": "5f5a2374b16e8d33",
    "params": {"bits": (4, 8, 2, 3, 5, 6), "group": (64, 32, 128), "scale_type": ("bf16", "f16", "f32")},
    "sizes": {"group": "K"},
    "by": ("bits",),
    "variants": {
        (4,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u4", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "K/8", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
        (8,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u8", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "K/4", {"slices": (("q", 0, [0, [(4, 8), (0, 1, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "32*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
        (2,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u2", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "K/16", {"slices": (("q", 0, [0, [(16, 2), (0, 1, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
        (3,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u3", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "3*K/32", {"slices": (("q", 0, [0, [(32, 3), (0, 3, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]], 0, 2),)}),
                    "q_1": ("i32", "N", "16*ceil(K/512)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (2, 1), (0, 16, 1)]], 2,
                        1),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
        (5,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u5", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "5*K/32", {"slices": (("q", 0, [0, [(32, 5), (0, 5, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                    "q_1": ("i32", "N", "16*ceil(K/512)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (4, 1), (0, 16, 1)]], 4, 1),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
        (6,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "b": ("scale_type", "N", "ceil(K/group)"), "q": ("u6", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "mlx": {"tensors": {
                    "weight": ("u32", "N", "3*K/16", {"slices": (("q", 0, [0, [(16, 6), (0, 3, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "biases": ("scale_type", "N", "K/group", {"field": "b"}),
                }},
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                    "q_1": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "b": ("scale_type", "N", "ceil(K/group)", {"field": "b"}),
                }},
            },
            "codes": {"b": 0},
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (8,): bits_8.VARIANT, (2,): bits_2.VARIANT, (3,): bits_3.VARIANT,
        (5,): bits_5.VARIANT, (6,): bits_6.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
