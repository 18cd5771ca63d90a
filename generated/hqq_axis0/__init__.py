"""hqq_axis0: HQQ with groups of weights that lie far apart (axis 0), integer codes with a zero point in floats.

    w = (q - z) * s
    float32, rounded after each operation

    z      scale_type [N*K/group]
    s      scale_type [N*K/group]
    q      u{bits}    [N, K]

    hqq: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 1.5 at 1, with group = 64
    hqq_3bit: 4 bits per weight at bits = 3 with group = 64

Built from the spec hqq_axis0 (sha256 3cda0b3a6caab7c4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_8, bits_2, bits_1, bits_3

PROGRAM = {
    "name": "hqq_axis0",
    "title": "HQQ with groups of weights that lie far apart (axis 0), integer codes with a zero point in floats",
    "source": "hqq core/quantize.py Quantizer.quantize, core/bitpack.py BitPack", "formula": "(q - z) * s", "bits": "1.5 to 8.5",
    "digest": "3cda0b3a6caab7c4",
    "params": {"bits": (4, 8, 3, 2, 1), "group": (64, 128, 32, 16, "any"), "scale_type": ("f16", "bf16", "f32")},
    "sizes": {"group": "K"},
    "by": ("bits",),
    "detect": {"tensors": {"axis": 0, "nbits": "bits", "group_size": "group", "shape": ["N", "K"]}},
    "variants": {
        (4,): {
            "fields": {"z": ("scale_type", "N*K/group"), "s": ("scale_type", "N*K/group"), "q": ("u4", "N", "K")},
            "cuts": ("1", "1"),
            "storages": {"hqq": {
                "tensors": {
                    "W_q": ("u8", "group/2", "N*K/group", {"slices": (("q", 4, [[("N*K/group", 1, 1), (0, 1, 0), (2, -4)]]),)}),
                    "scale": ("scale_type", "1", "N*K/group", {"slices": (("s", 0, [1]),)}),
                    "zero": ("scale_type", "1", "N*K/group", {"slices": (("z", 0, [1]),)}),
                },
                "whole": True,
            }},
        },
        (8,): {
            "fields": {"z": ("scale_type", "N*K/group"), "s": ("scale_type", "N*K/group"), "q": ("u8", "N", "K")},
            "cuts": ("1", "1"),
            "storages": {"hqq": {
                "tensors": {
                    "W_q": ("u8", "group", "N*K/group", {"slices": (("q", 0, [[("N*K/group", 1, 1), (0, 1, 0)]]),)}),
                    "scale": ("scale_type", "1", "N*K/group", {"slices": (("s", 0, [1]),)}),
                    "zero": ("scale_type", "1", "N*K/group", {"slices": (("z", 0, [1]),)}),
                },
                "whole": True,
            }},
        },
        (2,): {
            "fields": {"z": ("scale_type", "N*K/group"), "s": ("scale_type", "N*K/group"), "q": ("u2", "N", "K")},
            "cuts": ("1", "1"),
            "storages": {"hqq": {
                "tensors": {
                    "W_q": ("u8", "group/4", "N*K/group", {"slices": (("q", 6, [[("N*K/group", 1, 1), (0, 1, 0), (4, -2)]]),)}),
                    "scale": ("scale_type", "1", "N*K/group", {"slices": (("s", 0, [1]),)}),
                    "zero": ("scale_type", "1", "N*K/group", {"slices": (("z", 0, [1]),)}),
                },
                "whole": True,
            }},
        },
        (1,): {
            "fields": {"z": ("scale_type", "N*K/group"), "s": ("scale_type", "N*K/group"), "q": ("u1", "N", "K")},
            "cuts": ("1", "1"),
            "storages": {"hqq": {
                "tensors": {
                    "W_q": ("u8", "group/8", "N*K/group", {"slices": (("q", 7, [[("N*K/group", 1, 1), (0, 1, 0), (8, -1)]]),)}),
                    "scale": ("scale_type", "1", "N*K/group", {"slices": (("s", 0, [1]),)}),
                    "zero": ("scale_type", "1", "N*K/group", {"slices": (("z", 0, [1]),)}),
                },
                "whole": True,
            }},
        },
        (3,): {
            "fields": {"z": ("scale_type", "N*K/group"), "s": ("scale_type", "N*K/group"), "q": ("u3", "N", "K")},
            "cuts": ("1", "1"),
            "storages": {"hqq_3bit": {
                "tensors": {
                    "W_q": ("i32", "ceil(group/10)", "N*K/group",
                        {"padding": 3221225472, "slices": (("q", 27, [[("N*K/group", 1, 1), (0, 1, 0), (10, -3)]]),)}),
                    "scale": ("scale_type", "1", "N*K/group", {"slices": (("s", 0, [1]),)}),
                    "zero": ("scale_type", "1", "N*K/group", {"slices": (("z", 0, [1]),)}),
                },
                "whole": True,
            }},
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (8,): bits_8.VARIANT, (2,): bits_2.VARIANT, (1,): bits_1.VARIANT,
        (3,): bits_3.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
