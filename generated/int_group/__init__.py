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

Built from the spec int_group (sha256 02c29bf46bc1c15f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_2, bits_3, bits_8, bits_5, bits_6, bits_7

FORMAT = Format(
    name="int_group", title="integer codes with a zero point and a scale per group of columns",
    source="GPTQ and AWQ checkpoints (auto-gptq, gptqmodel, autoawq); compressed-tensors; onnxruntime; OpenVINO; TensorRT-LLM",
    formula="(q - z) * s",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (2,): bits_2.VARIANT,
        (3,): bits_3.VARIANT,
        (8,): bits_8.VARIANT,
        (5,): bits_5.VARIANT,
        (6,): bits_6.VARIANT,
        (7,): bits_7.VARIANT,
    },
    params={"bits": (4, 2, 3, 5, 6, 7, 8), "group": (128, 64, 32, 256, 512, 1024, -1, "any"),
            "scale_type": ("f16", "bf16", "f32")},
    sizes={"group": "K"},
    detect={"words": [{"bits": 2, "qzeros": "0xaaaaaaaa", "storage": "gptq_v2"},
        {"bits": 4, "qzeros": "0x88888888", "storage": "gptq_v2"}, {"bits": 8, "qzeros": "0x80808080", "storage": "gptq_v2"},
        {"bits": 2, "qzeros": "0x55555555", "storage": "gptq_v1"}, {"bits": 4, "qzeros": "0x77777777", "storage": "gptq_v1"},
        {"bits": 8, "qzeros": "0x7f7f7f7f", "storage": "gptq_v1"}, {"bits": 4, "qzeros": "0x88888888", "storage": "awq"},
        {"bits": 4, "qzeros": "0x88888888", "storage": "awq_gemv"}], "spills": [{"storage": "gptq_v1", "qzeros": "bits"}]},
    digest="02c29bf46bc1c15f",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
