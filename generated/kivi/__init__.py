"""kivi: KIVI, keys and values of a cache as codes with a scale and a least value per block of tokens or of channels.

    w = q * s + m
    float32, rounded after each operation

    s      scale_type [ceil(N/gn), ceil(K/gk)]
    m      scale_type [ceil(N/gn), ceil(K/gk)]
    q      u{bits}    [N, K]

    rows: 3 bits per weight at bits = 2, 5 at 4, with gn = 1, gk = 32
    planar: 3 bits per weight at bits = 2, 5 at 4, with gn = 1, gk = 32

Built from the spec kivi (sha256 e650efe38bc40e87) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_2, bits_4

PROGRAM = {
    "name": "kivi",
    "title": "KIVI, keys and values of a cache as codes with a scale and a least value per block of tokens or of channels",
    "source": "KIVI quant/new_pack.py triton_quantize_and_pack_along_last_dim; HQQ and quanto caches of transformers are alike",
    "formula": "q * s + m", "bits": "3 to 5", "digest": "e650efe38bc40e87",
    "params": {"bits": (2, 4), "gn": (1, 32), "gk": (32, 64, 1, -1), "scale_type": ("f16", "bf16")},
    "sizes": {"gn": "N", "gk": "K"},
    "by": ("bits",),
    "variants": {
        (2,): {
            "fields": {
                "s": ("scale_type", "ceil(N/gn)", "ceil(K/gk)"), "m": ("scale_type", "ceil(N/gn)", "ceil(K/gk)"),
                "q": ("u2", "N", "K"),
            },
            "cuts": ("ceil(N/gn)", "ceil(K/gk)"),
            "storages": {
                "rows": {"tensors": {
                    "codes": ("u8", "N", "K/4", {"slices": (("q", 0, [0, [(4, 2), (0, 1, 1)]]),)}),
                    "scale": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "s"}),
                    "minimum": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "m"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/256)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "s"}),
                    "m": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "m"}),
                }},
            },
            "codes": {"m": 0},
        },
        (4,): {
            "fields": {
                "s": ("scale_type", "ceil(N/gn)", "ceil(K/gk)"), "m": ("scale_type", "ceil(N/gn)", "ceil(K/gk)"),
                "q": ("u4", "N", "K"),
            },
            "cuts": ("ceil(N/gn)", "ceil(K/gk)"),
            "storages": {
                "rows": {"tensors": {
                    "codes": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                    "scale": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "s"}),
                    "minimum": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "m"}),
                }},
                "planar": {"tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "s"}),
                    "m": ("scale_type", "ceil(N/gn)", "ceil(K/gk)", {"field": "m"}),
                }},
            },
            "codes": {"m": 0},
        },
    },
}

FORMAT = Format(PROGRAM, {(2,): bits_2.VARIANT, (4,): bits_4.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
