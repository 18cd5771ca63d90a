"""int_group: integer codes with a zero point and a scale per group of columns.

    w = (q - z) * s
    float32, rounded after each operation

    g      index into ceil(K/group) groups [K]
    q      u{bits}    [N, K]
    z      u{bits}    [N, ceil(K/group)]
    s      scale_type [N, ceil(K/group)]

    gptq_v2: 4.15625 bits per weight at bits = 4, 2.14062 at 2, 3.14844 at 3, 8.1875 at 8, with group = 128
    gptq_v1: 4.15625 bits per weight at bits = 4, 2.14062 at 2, 3.14844 at 3, 8.1875 at 8, with group = 128
    gptq_p: 3.14844 bits per weight at bits = 3, 5.16406 at 5, 6.17188 at 6, 7.17969 at 7, with group = 128
    awq: 4.15625 bits per weight at bits = 4 with group = 128
    awq_contiguous: 2.14062 bits per weight at bits = 2, 3.14844 at 3, 5.16406 at 5, 6.17188 at 6, 7.17969 at 7, 8.1875 at 8, with
        group = 128
    awq_gemv: 4.15625 bits per weight at bits = 4 with group = 128
    pack_quantized: 4.125 bits per weight at bits = 4, 2.125 at 2, 3.125 at 3, 5.125 at 5, 6.125 at 6, 7.125 at 7, 8.125 at 8,
        with group = 128
    pack_quantized_0_8: 4.1875 bits per weight at bits = 4, 8.1875 at 8, with group = 128
    pack_quantized_0_17: 3.32501 bits per weight at bits = 3, 5.45834 at 5, 6.52501 at 6, 8.125 at 7, with group = 128
    int_quantized: 8.125 bits per weight at bits = 8 with group = 128
    marlin: 4.125 bits per weight at bits = 4 with group = 128
    modelopt: 4.125 bits per weight at bits = 4 with group = 128
    xpu_int4pack: 4.1875 bits per weight at bits = 4 with group = 128
    torchao_plain_int32: 4.1875 bits per weight at bits = 4 with group = 128
    torchao_int8: 8.125 bits per weight at bits = 8 with group = 128
    onnx_matmul_nbits: 4.125 bits per weight at bits = 4, 2.125 at 2, 8.125 at 8, with group = 128
    openvino_u4: 4.15625 bits per weight at bits = 4 with group = 128
    openvino_i4: 4.125 bits per weight at bits = 4 with group = 128
    trt_llm: 4.125 bits per weight at bits = 4 with group = 128
    planar: 4.125 bits per weight at bits = 4, 2.125 at 2, 3.125 at 3, 8.125 at 8, 5.125 at 5, 6.125 at 6, 7.125 at 7, with group
        = 128

Built from the spec int_group (sha256 a7abeb406722a9b4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_2, bits_3, bits_8, bits_5, bits_6, bits_7

PROGRAM = {
    "name": "int_group", "title": "integer codes with a zero point and a scale per group of columns",
    "source": "GPTQ and AWQ checkpoints (auto-gptq, gptqmodel, autoawq); compressed-tensors; onnxruntime; OpenVINO; TensorRT-LLM",
    "formula": "(q - z) * s", "bits": "2.125 to 8.1875", "digest": "a7abeb406722a9b4",
    "params": {
        "bits": (4, 2, 3, 5, 6, 7, 8), "group": (128, 64, 32, 256, 512, 1024, -1, "any"), "scale_type": ("f16", "bf16", "f32"),
    },
    "sizes": {"group": "K"},
    "by": ("bits",),
    "detect": {
        "claimed": ["awq_contiguous"],
        "words": [{"bits": 2, "qzeros": "0xaaaaaaaa", "storage": "gptq_v2"},
            {"bits": 4, "qzeros": "0x88888888", "storage": "gptq_v2"}, {"bits": 8, "qzeros": "0x80808080", "storage": "gptq_v2"},
            {"bits": 2, "qzeros": "0x55555555", "storage": "gptq_v1"}, {"bits": 4, "qzeros": "0x77777777", "storage": "gptq_v1"},
            {"bits": 8, "qzeros": "0x7f7f7f7f", "storage": "gptq_v1"}, {"bits": 4, "qzeros": "0x88888888", "storage": "awq"},
            {"bits": 4, "qzeros": "0x88888888", "storage": "awq_gemv"}],
        "spills": [{"storage": "gptq_v1", "qzeros": "bits"}],
    },
    "variants": {
        (4,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u4", "N", "K"), "z": ("u4", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_v2": {"tensors": {
                    "qweight": ("i32", "K/8", "N", {"slices": (("q", 0, [1, [(8, 4), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/8", {"slices": (("z", 0, [[(8, 4), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "gptq_v1": {"tensors": {
                    "qweight": ("i32", "K/8", "N", {"slices": (("q", 0, [1, [(8, 4), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/8",
                        {"adds": -286331153, "slices": (("z", 0, [[(8, 4), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq": {
                    "tensors": {
                        "qweight": ("i32", "K", "N/8", {"slices": (("q", 0, [[(2, 16), (4, 4), (0, 1, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "N/8", {"slices": (("z", 0, [[(2, 16), (4, 4), (0, 1, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "awq_gemv": {
                    "tensors": {
                        "qweight": ("i32", "N", "K/8", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                        "qzeros": ("i32", "N", "128*ceil(K/1024)/group", {"slices": (("z", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                        "scales": ("scale_type", "N", "1024*ceil(K/1024)/group", {"field": "s"}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/8)", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/8)", "ceil(K/group)",
                            {"optional": "z", "slices": (("z", 0, [[(8, 4), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_8": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/8)", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i8", "N", "ceil(K/group)", {"adds": -8, "field": "z"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "marlin": {
                    "tensors": {
                        "qweight": ("i32", "K/16", "128*N/64",
                            {"aliases": ("B",),
                            "slices": (("q", 0,
                            [[(8, 16, 1), (2, 8), (4, 1, 1), (0, 128, 1)], [(2, 16), (4, 4, 1), (2, 4), (0, 1, 0)]]),)}),
                        "scales": ("scale_type", "K/group", "64*N/64",
                            {"aliases": ("s",), "slices": (("s", 0, [[(8, 8, 1), (8, 1, 1), (0, 64, 1)], 0]),)}),
                    },
                    "least": {"ceil(K/group)": 2},
                    "options": {"symmetric": True},
                },
                "modelopt": {
                    "tensors": {
                        "weight": ("u8", "N/2", "K", {"slices": (("q", 0, [[(2, 4), (0, 1, 0)], 1], {"adds": -8}),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                    },
                    "options": {"symmetric": True, "span": "tight", "by": "exact"},
                },
                "xpu_int4pack": {
                    "tensors": {
                        "qweight": ("i32", "N", "K/8", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                        "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                        "qzeros": ("i8", "ceil(K/group)", "N", {"padding": 240, "slices": (("z", 0, [1, 0]),)}),
                        "ret_idx": ("i32", "K", {"optional": "ret_idx"}),
                    },
                    "order": "ret_idx",
                },
                "torchao_plain_int32": {"tensors": {
                    "qdata": ("i32", "N", "K/8",
                        {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                    "scale": ("scale_type", "K/group", "N", {"aliases": ("_weight_scale",), "slices": (("s", 0, [1, 0]),)}),
                    "zero_point": ("i8", "K/group", "N",
                        {"aliases": ("_weight_zero_point",), "padding": 240, "slices": (("z", 0, [1, 0]),)}),
                }},
                "onnx_matmul_nbits": {"tensors": {
                    "B": ("u8", "N", "K/2", {"seen": ("N", "K/group", "?"), "slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "zero_points": ("u8", "N", "ceil(K/2*group)",
                        {"optional": "z", "slices": (("z", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                }},
                "openvino_u4": {
                    "tensors": {
                        "weight": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                        "zero_point": ("u8", "N", "K/2*group", {"slices": (("z", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                        "scale": ("scale_type", "N", "K/group", {"field": "s"}),
                    },
                    "options": {"by": "exact", "rounds": "code", "span": "signed"},
                },
                "openvino_i4": {
                    "tensors": {
                        "weight": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]], {"adds": -8}),)}),
                        "scale": ("scale_type", "N", "K/group", {"field": "s"}),
                    },
                    "options": {"symmetric": True, "by": "exact", "span": "signed"},
                },
                "trt_llm": {
                    "tensors": {
                        "weight": ("i8", "N/4", "128*K/64",
                            {"seen": ("K", "N/2"),
                            "slices": (("q", 0,
                            [[(4, 32, 1), (0, 1, 0)], [(8, 2, 1), (2, 4), (2, 1, 1), (2, 16, 1), (0, 128, 1)]]),)}),
                        "weights_scaling_factor": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"symmetric": True, "span": "tight", "by": "exact"},
                },
                "planar": {
                    "tensors": {
                        "q": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 240, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 8},
        },
        (2,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u2", "N", "K"), "z": ("u2", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_v2": {"tensors": {
                    "qweight": ("i32", "K/16", "N", {"slices": (("q", 0, [1, [(16, 2), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/16", {"slices": (("z", 0, [[(16, 2), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "gptq_v1": {"tensors": {
                    "qweight": ("i32", "K/16", "N", {"slices": (("q", 0, [1, [(16, 2), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/16",
                        {"adds": -1431655765, "slices": (("z", 0, [[(16, 2), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(N/16)", {"slices": (("q", 0, [[(16, 2), (0, 1, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(N/16)", {"slices": (("z", 0, [[(16, 2), (0, 1, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/16)", {"slices": (("q", 0, [0, [(16, 2), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/16)", "ceil(K/group)",
                            {"optional": "z", "slices": (("z", 0, [[(16, 2), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "onnx_matmul_nbits": {"tensors": {
                    "B": ("u8", "N", "K/4", {"seen": ("N", "K/group", "?"), "slices": (("q", 0, [0, [(4, 2), (0, 1, 1)]]),)}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "zero_points": ("u8", "N", "ceil(K/4*group)",
                        {"optional": "z", "slices": (("z", 0, [0, [(4, 2), (0, 1, 1)]]),)}),
                }},
                "planar": {
                    "tensors": {
                        "q": ("i32", "N", "16*ceil(K/256)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 252, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 2},
        },
        (3,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u3", "N", "K"), "z": ("u3", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_v2": {"tensors": {
                    "qweight": ("i32", "3*K/32", "N", {"words": (0, 3), "slices": (("q", 0, [1, [(32, 3), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "3*N/32", {"slices": (("z", 0, [[(32, 3), (0, 3, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "gptq_v1": {"tensors": {
                    "qweight": ("i32", "3*K/32", "N", {"words": (0, 3), "slices": (("q", 0, [1, [(32, 3), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "3*N/32",
                        {"slices": (("z", 0, [[(32, 3), (0, 3, 1)], 0], {"adds": -1}),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "gptq_p": {"tensors": {
                    "qweight": ("i32", "3*K/32", "N",
                        {"words": (0, 3),
                        "slices": (("q", 0, [1, [(32, 2), (0, 1, 0)]], 0, 2), ("q", 64, [1, [(32, 1), (0, 1, 0)]], 2, 1))}),
                    "qzeros": ("i32", "ceil(K/group)", "3*N/32",
                        {"slices": (("z", 0, [[(16, 2), (2, 1, 1), (0, 3, 1)], 0], 0, 2),
                        ("z", 64, [[(32, 1), (0, 3, 1)], 0], 2, 1))}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(3*N/32)", {"slices": (("q", 0, [[(32, 3), (0, 3, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(3*N/32)", {"slices": (("z", 0, [[(32, 3), (0, 3, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(3*K/32)", {"slices": (("q", 0, [0, [(32, 3), (0, 3, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(3*N/32)", "ceil(K/group)",
                            {"optional": "z", "words": (0, 3), "slices": (("z", 0, [[(32, 3), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_17": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/10)",
                            {"padding": 3221225472, "slices": (("q", 0, [0, [(10, 3), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/10)", "ceil(K/group)",
                            {"optional": "z", "padding": 3221225472, "slices": (("z", 0, [[(10, 3), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "planar": {
                    "tensors": {
                        "q_0": ("i32", "N", "16*ceil(K/256)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]], 0,
                            2),)}),
                        "q_1": ("i32", "N", "16*ceil(K/512)",
                            {"slices": (("q", 0,
                            [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (2, 1), (0, 16, 1)]], 2, 1),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 248, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 4},
        },
        (8,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u8", "N", "K"), "z": ("u8", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_v2": {"tensors": {
                    "qweight": ("i32", "K/4", "N", {"slices": (("q", 0, [1, [(4, 8), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/4", {"slices": (("z", 0, [[(4, 8), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "gptq_v1": {"tensors": {
                    "qweight": ("i32", "K/4", "N", {"slices": (("q", 0, [1, [(4, 8), (0, 1, 0)]]),)}),
                    "qzeros": ("i32", "ceil(K/group)", "N/4",
                        {"adds": -16843009, "slices": (("z", 0, [[(4, 8), (0, 1, 1)], 0]),)}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(N/4)", {"slices": (("q", 0, [[(4, 8), (0, 1, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(N/4)", {"slices": (("z", 0, [[(4, 8), (0, 1, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/4)", {"slices": (("q", 0, [0, [(4, 8), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/4)", "ceil(K/group)",
                            {"optional": "z", "slices": (("z", 0, [[(4, 8), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_8": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/4)", {"slices": (("q", 0, [0, [(4, 8), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i8", "N", "ceil(K/group)", {"adds": -128, "field": "z"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "int_quantized": {
                    "tensors": {
                        "weight": ("i8", "N", "K", {"slices": (("q", 0, [0, 1], {"adds": -128}),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i8", "N", "ceil(K/group)",
                            {"optional": "z", "slices": (("z", 0, [0, 1], {"adds": -128}),)}),
                    },
                    "omits": ("z",),
                    "options": {"rounds": "sum", "span": "full"},
                },
                "torchao_int8": {"tensors": {
                    "qdata": ("i8", "N", "K", {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, 1], {"adds": -128}),)}),
                    "scale": ("scale_type", "N", "ceil(K/group)", {"aliases": ("_weight_scale",), "field": "s"}),
                    "zero_point": ("i8", "N", "ceil(K/group)",
                        {"aliases": ("_weight_zero_point",), "optional": "z", "slices": (("z", 0, [0, 1], {"adds": -128}),)}),
                }},
                "onnx_matmul_nbits": {"tensors": {
                    "B": ("u8", "N", "K", {"seen": ("N", "K/group", "?"), "field": "q"}),
                    "scales": ("scale_type", "N", "K/group", {"field": "s"}),
                    "zero_points": ("u8", "N", "ceil(K/group)", {"optional": "z", "field": "z"}),
                }},
                "planar": {
                    "tensors": {
                        "q": ("i32", "N", "32*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 128},
        },
        (5,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u5", "N", "K"), "z": ("u5", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_p": {"tensors": {
                    "qweight": ("i32", "5*K/32", "N",
                        {"words": (0, 5),
                        "slices": (("q", 0, [1, [(32, 4), (0, 1, 0)]], 0, 4), ("q", 128, [1, [(32, 1), (0, 1, 0)]], 4, 1))}),
                    "qzeros": ("i32", "ceil(K/group)", "5*N/32",
                        {"slices": (("z", 0, [[(8, 4), (4, 1, 1), (0, 5, 1)], 0], 0, 4),
                        ("z", 128, [[(32, 1), (0, 5, 1)], 0], 4, 1))}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(5*N/32)", {"slices": (("q", 0, [[(32, 5), (0, 5, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(5*N/32)", {"slices": (("z", 0, [[(32, 5), (0, 5, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(5*K/32)", {"slices": (("q", 0, [0, [(32, 5), (0, 5, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(5*N/32)", "ceil(K/group)",
                            {"optional": "z", "words": (0, 5), "slices": (("z", 0, [[(32, 5), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_17": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/6)",
                            {"padding": 3221225472, "slices": (("q", 0, [0, [(6, 5), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/6)", "ceil(K/group)",
                            {"optional": "z", "padding": 3221225472, "slices": (("z", 0, [[(6, 5), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "planar": {
                    "tensors": {
                        "q_0": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                        "q_1": ("i32", "N", "16*ceil(K/512)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (4, 1), (0, 16, 1)]], 4, 1),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 224, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 16},
        },
        (6,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u6", "N", "K"), "z": ("u6", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_p": {"tensors": {
                    "qweight": ("i32", "6*K/32", "N",
                        {"words": (0, 6),
                        "slices": (("q", 0, [1, [(32, 4), (0, 1, 0)]], 0, 4), ("q", 128, [1, [(32, 2), (0, 1, 0)]], 4, 2))}),
                    "qzeros": ("i32", "ceil(K/group)", "6*N/32",
                        {"slices": (("z", 0, [[(8, 4), (4, 1, 1), (0, 6, 1)], 0], 0, 4),
                        ("z", 128, [[(16, 2), (2, 1, 1), (0, 6, 1)], 0], 4, 2))}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(3*N/16)", {"slices": (("q", 0, [[(16, 6), (0, 3, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(3*N/16)", {"slices": (("z", 0, [[(16, 6), (0, 3, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(3*K/16)", {"slices": (("q", 0, [0, [(16, 6), (0, 3, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(3*N/16)", "ceil(K/group)",
                            {"optional": "z", "words": (0, 3), "slices": (("z", 0, [[(16, 6), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_17": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/5)",
                            {"padding": 3221225472, "slices": (("q", 0, [0, [(5, 6), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/5)", "ceil(K/group)",
                            {"optional": "z", "padding": 3221225472, "slices": (("z", 0, [[(5, 6), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "planar": {
                    "tensors": {
                        "q_0": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                        "q_1": ("i32", "N", "16*ceil(K/256)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 192, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 32},
        },
        (7,): {
            "fields": {
                "g": ("index", "K", {"groups": "ceil(K/group)"}),
                "q": ("u7", "N", "K"), "z": ("u7", "N", "ceil(K/group)"), "s": ("scale_type", "N", "ceil(K/group)"),
            },
            "cuts": ("N", "ceil(K/group)"),
            "storages": {
                "gptq_p": {"tensors": {
                    "qweight": ("i32", "7*K/32", "N",
                        {"words": (0, 7),
                        "slices": (("q", 0, [1, [(32, 4), (0, 1, 0)]], 0, 4), ("q", 128, [1, [(32, 2), (0, 1, 0)]], 4, 2),
                        ("q", 192, [1, [(32, 1), (0, 1, 0)]], 6, 1))}),
                    "qzeros": ("i32", "ceil(K/group)", "7*N/32",
                        {"slices": (("z", 0, [[(8, 4), (4, 1, 1), (0, 7, 1)], 0], 0, 4),
                        ("z", 128, [[(16, 2), (2, 1, 1), (0, 7, 1)], 0], 4, 2), ("z", 192, [[(32, 1), (0, 7, 1)], 0], 6, 1))}),
                    "scales": ("scale_type", "ceil(K/group)", "N", {"slices": (("s", 0, [1, 0]),)}),
                    "g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                }},
                "awq_contiguous": {
                    "tensors": {
                        "qweight": ("i32", "K", "ceil(7*N/32)", {"slices": (("q", 0, [[(32, 7), (0, 7, 1)], 0]),)}),
                        "qzeros": ("i32", "K/group", "ceil(7*N/32)", {"slices": (("z", 0, [[(32, 7), (0, 7, 1)], 0]),)}),
                        "scales": ("scale_type", "K/group", "N", {"slices": (("s", 0, [1, 0]),)}),
                    },
                    "options": {"span": "tight", "by": "exact"},
                },
                "pack_quantized": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(7*K/32)", {"slices": (("q", 0, [0, [(32, 7), (0, 7, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(7*N/32)", "ceil(K/group)",
                            {"optional": "z", "words": (0, 7), "slices": (("z", 0, [[(32, 7), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "pack_quantized_0_17": {
                    "tensors": {
                        "weight_packed": ("i32", "N", "ceil(K/4)",
                            {"padding": 4026531840, "slices": (("q", 0, [0, [(4, 7), (0, 1, 1)]]),)}),
                        "weight_scale": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "weight_zero_point": ("i32", "ceil(N/4)", "ceil(K/group)",
                            {"optional": "z", "padding": 4026531840, "slices": (("z", 0, [[(4, 7), (0, 1, 0)], 1]),)}),
                        "weight_g_idx": ("index", "K", {"optional": "g", "field": "g"}),
                        "weight_shape": ("shape", "2"),
                    },
                    "omits": ("z", "g"),
                    "options": {"rounds": "sum", "span": "full"},
                    "shape": "weight_shape",
                },
                "planar": {
                    "tensors": {
                        "q_0": ("i32", "N", "16*ceil(K/128)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                        "q_1": ("i32", "N", "16*ceil(K/256)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                        "q_2": ("i32", "N", "16*ceil(K/512)",
                            {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (4, 1), (0, 16, 1)]], 6, 1),)}),
                        "s": ("scale_type", "N", "ceil(K/group)", {"field": "s"}),
                        "z": ("u8", "N", "ceil(K/group)", {"optional": "z", "padding": 128, "field": "z"}),
                        "order": ("i32", "K", {"optional": "order"}),
                    },
                    "order": "order",
                },
            },
            "options": {
                "by": ("stored", "exact"), "symmetric": (True, False), "rounds": ("quotient", "sum", "code"),
                "span": ("found", "full", "tight", "signed"),
            },
            "defaults": {"g": None, "z": 64},
        },
    },
}

FORMAT = Format(PROGRAM, {(4,): bits_4.VARIANT, (2,): bits_2.VARIANT, (3,): bits_3.VARIANT, (8,): bits_8.VARIANT,
        (5,): bits_5.VARIANT, (6,): bits_6.VARIANT, (7,): bits_7.VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
