"""int4pack: torch's int4pack, 4-bit codes with a scale and a zero in floats per group.

    w = (q - 8) * s + z
    float32, rounded after each operation

    g      index into ceil(K/group) groups [K]
    z      scale_type [N, ceil(K/group)]
    s      scale_type [N, ceil(K/group)]
    q      u4         [N, K]

    tinygemm: 4.25 bits per weight at scale_type = bf16 with group = 128
    tile_packed: 4.25 bits per weight at scale_type = bf16 with group = 128
    torchao: 4.25 bits per weight at scale_type = bf16 with group = 128
    cpu_avx512: 4.25 bits per weight at scale_type = bf16, 4.5 at f32, with group = 128
    cpu_avx2: 4.25 bits per weight at scale_type = bf16, 4.5 at f32, with group = 128
    cpu_scalar: 4.25 bits per weight at scale_type = bf16, 4.5 at f32, with group = 128
    cpu_rest: 4.25 bits per weight at scale_type = bf16, 4.5 at f32, with group = 128
    planar: 4.25 bits per weight at scale_type = bf16, 4.5 at f32, with group = 128

Built from the spec int4pack (sha256 4c5af078cde936ea) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import scale_type_bf16, scale_type_f32

PROGRAM = {
    "name": "int4pack", "title": "torch's int4pack, 4-bit codes with a scale and a zero in floats per group",
    "source": "torch native/cuda/int4mm.cu, native/cpu/int4mm_kernel.cpp; torchao _choose_qparams_affine_tinygemm, Int4Tensor",
    "formula": "(q - 8) * s + z", "bits": "4.25", "digest": "4c5af078cde936ea",
    "params": {"group": (128, 32, 64, 256), "scale_type": ("bf16", "f32")},
    "sizes": {"group": "K"},
    "by": ("scale_type",),
    "variants": {
        ("bf16",): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "z": ("scale_type", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"), "q": ("u4", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "tinygemm": {"tensors": {
                    "qdata": ("i32", "N/8", "K/128", "128",
                        {"slices": (("q", 0, [[(8, 16, 2), (0, 1, 0)], [(2, 16), (4, 4, 2), (4, 4), (4, 1, 2), (0, 1, 1)]]),)}),
                    "scale_and_zero": ("scale_type", "K/group", "N", "2",
                        {"aliases": ("scales_and_zeros",), "slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                }},
                "tile_packed": {"tensors": {
                    "qdata": ("i32", "ceil(N/8)", "8*ceil(K/1024)", "128",
                        {"aliases": ("_weight_qdata",),
                        "slices": (("q", 0, [[(8, 16, 2), (0, 1, 0)], [(2, 16), (4, 4, 2), (4, 4), (4, 1, 2), (0, 1, 1)]]),)}),
                    "scale_and_zero": ("scale_type", "1024*ceil(K/1024)/group", "8*ceil(N/8)", "2",
                        {"aliases": ("_weight_scale_and_zero",), "slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                }},
                "torchao": {"tensors": {
                    "qdata": ("i8", "N", "K/2",
                        {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]], {"adds": -8}),)}),
                    "scale": ("scale_type", "K/group", "N", {"aliases": ("_weight_scale",), "slices": (("s", 0, [1, 0]),)}),
                    "zero_point": ("scale_type", "K/group", "N",
                        {"aliases": ("_weight_zero_point",), "slices": (("z", 0, [1, 0]),)}),
                }},
                "cpu_avx512": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/64)", "K", "32", {"slices": (("q", 0, [[(32, 1, 2), (2, 4), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "64*ceil(N/64)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_avx2": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/32)", "K", "16", {"slices": (("q", 0, [[(16, 1, 2), (2, 4), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "32*ceil(N/32)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_scalar": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/32)", "K", "16", {"slices": (("q", 0, [[(2, 4), (16, 1, 2), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "32*ceil(N/32)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_rest": {
                    "tensors": {
                        "weight": ("u8", "K", "N/2", {"slices": (("q", 0, [[(2, 4), (0, 1, 1)], 0]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "N", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 16, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "planar": {
                    "tensors": {
                        "q": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("scale_type", "N", "ceil(K/group)", {"field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "codes": {"z": 8},
            "defaults": {"g": None},
        },
        ("f32",): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "z": ("scale_type", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"), "q": ("u4", "N", "K"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "cpu_avx512": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/64)", "K", "32", {"slices": (("q", 0, [[(32, 1, 2), (2, 4), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "64*ceil(N/64)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 32, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_avx2": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/32)", "K", "16", {"slices": (("q", 0, [[(16, 1, 2), (2, 4), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "32*ceil(N/32)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 32, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_scalar": {
                    "tensors": {
                        "weight": ("u8", "ceil(N/32)", "K", "16", {"slices": (("q", 0, [[(2, 4), (16, 1, 2), (0, 1, 0)], 1]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "32*ceil(N/32)", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 32, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "cpu_rest": {
                    "tensors": {
                        "weight": ("u8", "K", "N/2", {"slices": (("q", 0, [[(2, 4), (0, 1, 1)], 0]),)}),
                        "scales_and_zeros": ("scale_type", "K/group", "N", "2",
                            {"slices": (("s", 0, [1, 0]), ("z", 32, [1, 0]))}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx", "transient": True,
                },
                "planar": {
                    "tensors": {
                        "q": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("scale_type", "N", "ceil(K/group)", {"field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "codes": {"z": 8},
            "defaults": {"g": None},
        },
    },
}

FORMAT = Format(PROGRAM, {("bf16",): scale_type_bf16.VARIANT, ("f32",): scale_type_f32.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
for_device = FORMAT.for_device
