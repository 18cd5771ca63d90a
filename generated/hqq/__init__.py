"""hqq: HQQ with groups of consecutive weights (axis 1), integer codes with a zero point in floats.

    w = (q - z) * s
    float32, rounded after each operation

    z      scale_type [ceil(N*K/group)]
    s      scale_type [ceil(N*K/group)]
    q      u{bits}    [N, K]

    hqq: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 1.5 at 1, with group = 64
    hqq_3bit: 3.7 bits per weight at bits = 3 with group = 64
    planar: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 1.5 at 1, 3.5 at 3, with group = 64

Built from the spec hqq (sha256 29265f514b220d1e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_8, bits_2, bits_1, bits_3

PROGRAM = {
    "name": "hqq", "title": "HQQ with groups of consecutive weights (axis 1), integer codes with a zero point in floats",
    "source": "hqq core/quantize.py Quantizer.quantize, core/bitpack.py BitPack", "formula": "(q - z) * s", "bits": "1.5 to 8.5",
    "digest": "29265f514b220d1e",
    "params": {"bits": (4, 8, 3, 2, 1), "group": (64, 128, 32, 16, "any"), "scale_type": ("f16", "bf16", "f32")},
    "sizes": {"group": "K"},
    "by": ("bits",),
    "detect": {"tensors": {"axis": 1, "nbits": "bits", "group_size": "group", "shape": ["N", "K"]}},
    "variants": {
        (4,): {
            "fields": {"z": ("scale_type", "ceil(N*K/group)"), "s": ("scale_type", "ceil(N*K/group)"), "q": ("u4", "N", "K")},
            "cuts": ("N", "ceil(N*K/group)"),
            "storages": {
                "hqq": {
                    "tensors": {
                        "W_q": ("u8", "N*K/2*group", "group", {"slices": (("q", 4, [[("group", 1, 1), (0, 1, 0), (2, -4)]]),)}),
                        "scale": ("scale_type", "N*K/group", "1", {"slices": (("s", 0, [0]),)}),
                        "zero": ("scale_type", "N*K/group", "1", {"slices": (("z", 0, [0]),)}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "K/group", {"slices": (("s", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                    "z": ("scale_type", "N", "K/group", {"slices": (("z", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                }},
            },
        },
        (8,): {
            "fields": {"z": ("scale_type", "ceil(N*K/group)"), "s": ("scale_type", "ceil(N*K/group)"), "q": ("u8", "N", "K")},
            "cuts": ("N", "ceil(N*K/group)"),
            "storages": {
                "hqq": {
                    "tensors": {
                        "W_q": ("u8", "N*K/group", "group", {"slices": (("q", 0, [[("group", 1, 1), (0, 1, 0)]]),)}),
                        "scale": ("scale_type", "N*K/group", "1", {"slices": (("s", 0, [0]),)}),
                        "zero": ("scale_type", "N*K/group", "1", {"slices": (("z", 0, [0]),)}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "32*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                    "s": ("scale_type", "N", "K/group", {"slices": (("s", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                    "z": ("scale_type", "N", "K/group", {"slices": (("z", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                }},
            },
        },
        (2,): {
            "fields": {"z": ("scale_type", "ceil(N*K/group)"), "s": ("scale_type", "ceil(N*K/group)"), "q": ("u2", "N", "K")},
            "cuts": ("N", "ceil(N*K/group)"),
            "storages": {
                "hqq": {
                    "tensors": {
                        "W_q": ("u8", "N*K/4*group", "group", {"slices": (("q", 6, [[("group", 1, 1), (0, 1, 0), (4, -2)]]),)}),
                        "scale": ("scale_type", "N*K/group", "1", {"slices": (("s", 0, [0]),)}),
                        "zero": ("scale_type", "N*K/group", "1", {"slices": (("z", 0, [0]),)}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "K/group", {"slices": (("s", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                    "z": ("scale_type", "N", "K/group", {"slices": (("z", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                }},
            },
        },
        (1,): {
            "fields": {"z": ("scale_type", "ceil(N*K/group)"), "s": ("scale_type", "ceil(N*K/group)"), "q": ("u1", "N", "K")},
            "cuts": ("N", "ceil(N*K/group)"),
            "storages": {
                "hqq": {
                    "tensors": {
                        "W_q": ("u8", "N*K/8*group", "group", {"slices": (("q", 7, [[("group", 1, 1), (0, 1, 0), (8, -1)]]),)}),
                        "scale": ("scale_type", "N*K/group", "1", {"slices": (("s", 0, [0]),)}),
                        "zero": ("scale_type", "N*K/group", "1", {"slices": (("z", 0, [0]),)}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/512)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 1), (2, 8), (4, 1, 1), (4, 2), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "K/group", {"slices": (("s", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                    "z": ("scale_type", "N", "K/group", {"slices": (("z", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                }},
            },
        },
        (3,): {
            "fields": {"z": ("scale_type", "ceil(N*K/group)"), "s": ("scale_type", "ceil(N*K/group)"), "q": ("u3", "N", "K")},
            "cuts": ("N", "ceil(N*K/group)"),
            "storages": {
                "hqq_3bit": {
                    "tensors": {
                        "W_q": ("i32", "ceil(N*K/10*group)", "group",
                            {"padding": 3221225472, "slices": (("q", 27, [[("group", 1, 1), (0, 1, 0), (10, -3)]]),)}),
                        "scale": ("scale_type", "N*K/group", "1", {"slices": (("s", 0, [0]),)}),
                        "zero": ("scale_type", "N*K/group", "1", {"slices": (("z", 0, [0]),)}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q_0": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]], 0, 2),)}),
                    "q_1": ("i32", "N", "16*ceil(K/512)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (2, 1), (0, 16, 1)]], 2,
                        1),)}),
                    "s": ("scale_type", "N", "K/group", {"slices": (("s", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                    "z": ("scale_type", "N", "K/group", {"slices": (("z", 0, [[("K/group", 1, 1), (0, 1, 0)]]),)}),
                }},
            },
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (8,): bits_8.VARIANT, (2,): bits_2.VARIANT, (1,): bits_1.VARIANT,
        (3,): bits_3.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
