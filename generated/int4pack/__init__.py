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

FORMAT = Format(
    name="int4pack", title="torch's int4pack, 4-bit codes with a scale and a zero in floats per group",
    source="torch native/cuda/int4mm.cu, native/cpu/int4mm_kernel.cpp; torchao _choose_qparams_affine_tinygemm, Int4Tensor",
    formula="(q - 8) * s + z",
    by=("scale_type",),
    variants={
        ("bf16",): scale_type_bf16.VARIANT,
        ("f32",): scale_type_f32.VARIANT,
    },
    params={"group": (128, 32, 64, 256), "scale_type": ("bf16", "f32")},
    sizes={"group": "K"},
    digest="4c5af078cde936ea",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
for_device = FORMAT.for_device
