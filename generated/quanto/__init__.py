"""quanto: optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns.

    w = q * s - z
    float32, rounded after each operation

    s      scale_type [N, ceil(K/group)]
    z      scale_type [N, ceil(K/group)]
    q      u{bits}    [N, K]

    quanto: 4.5 bits per weight at bits = 4, 2.5 at 2, with group = 128
    planar: 4.5 bits per weight at bits = 4, 2.5 at 2, with group = 128

Built from the spec quanto (sha256 68b791cb5e3f0ca8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_2

PROGRAM = {
    "name": "quanto",
    "title": "optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns",
    "source": "optimum-quanto 0.2.7, WeightQBitsTensor with axis 0", "formula": "q * s - z", "bits": "2.5 to 4.5",
    "digest": "68b791cb5e3f0ca8",
    "params": {"bits": (4, 2), "group": (128, 96, 64, 32, -1, "any"), "scale_type": ("f32", "bf16", "f16")},
    "sizes": {"group": "K"},
    "by": ("bits",),
    "variants": {
        (4,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "z": ("scale_type", "N", "ceil(K/group)"), "q": ("u4", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "quanto": {
                    "tensors": {
                        "data": ("u8", "N/2", "K",
                            {"aliases": ("weight._data._data",), "seen": ("?", "group"),
                            "slices": (("q", 0, [[(0, 1, 0), (2, 4)], 1]),)}),
                        "scale": ("scale_type", "N", "K/group",
                            {"aliases": ("weight._scale",), "seen": ("?", "1"), "field": "s"}),
                        "shift": ("scale_type", "N", "K/group",
                            {"aliases": ("weight._shift",), "seen": ("?", "1"), "field": "z"}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "z": ("scale_type", "N", "ceil(K/group)", {"field": "z"}),
                }},
            },
        },
        (2,): {
            "fields": {
                "s": ("scale_type", "N", "ceil(K/group)"), "z": ("scale_type", "N", "ceil(K/group)"), "q": ("u2", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "quanto": {
                    "tensors": {
                        "data": ("u8", "N/4", "K",
                            {"aliases": ("weight._data._data",), "seen": ("?", "group"),
                            "slices": (("q", 0, [[(0, 1, 0), (4, 2)], 1]),)}),
                        "scale": ("scale_type", "N", "K/group",
                            {"aliases": ("weight._scale",), "seen": ("?", "1"), "field": "s"}),
                        "shift": ("scale_type", "N", "K/group",
                            {"aliases": ("weight._shift",), "seen": ("?", "1"), "field": "z"}),
                    },
                    "whole": True,
                },
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    "z": ("scale_type", "N", "ceil(K/group)", {"field": "z"}),
                }},
            },
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (2,): bits_2.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
