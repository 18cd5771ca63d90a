"""awq_gemv: AWQ for gemv kernels, 4-bit codes with a zero point and a scale per group, groups padded to 1024 columns.

    w = (q - z) * s
    float32, rounded after each operation

    q      u4  [N, K]
    z      u4  [N, ceil(K/128)]
    s      f16 [N, ceil(K/128)]

    gemv at group = 128: 4.15625 bits per weight
    gemv at group = 64: 4.3125 bits per weight
    gemv at group = 32: 4.625 bits per weight
    planar at group = 128: 4.1875 bits per weight
    planar at group = 64: 4.375 bits per weight
    planar at group = 32: 4.75 bits per weight

Built from the spec awq_gemv (sha256 9e88c9fd36608e2d) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import group_128, group_64, group_32

FORMAT = Format(
    name="awq_gemv", title="AWQ for gemv kernels, 4-bit codes with a zero point and a scale per group, groups padded to 1024 columns",
    source="autoawq WQLinear_GEMV.from_linear, calculate_zeros_width", formula="(q - z) * s",
    by=("group",),
    variants={
        (128,): group_128.VARIANT,
        (64,): group_64.VARIANT,
        (32,): group_32.VARIANT,
    },
    params={"group": (128, 64, 32)},
    detect={"config": {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": "group"}},
    digest="9e88c9fd36608e2d",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
requantize = FORMAT.requantize
planar = FORMAT.planar
linear = FORMAT.linear
grouped_linear = FORMAT.grouped_linear
Linear = FORMAT.Linear
Embedding = FORMAT.Embedding
