"""awq_gemv_fast: AWQ for fast gemv kernels and llm-awq, 4-bit codes with a scale and a scaled zero in floats per group.

    w = q * s + z
    float32, rounded after each operation

    z      f16 [N, ceil(K/128)]
    s      f16 [N, ceil(K/128)]
    q      u4  [N, K]

    gemv_fast at group = 128: 4.25 bits per weight
    gemv_fast at group = 64: 4.5 bits per weight
    gemv_fast at group = 32: 5 bits per weight
    planar at group = 128: 4.25 bits per weight
    planar at group = 64: 4.5 bits per weight
    planar at group = 32: 5 bits per weight

Built from the spec awq_gemv_fast (sha256 2e52b3a7e21cd4ea) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import group_128, group_64, group_32

FORMAT = Format(
    name="awq_gemv_fast", title="AWQ for fast gemv kernels and llm-awq, 4-bit codes with a scale and a scaled zero in floats per group",
    source="autoawq WQLinear_GEMVFast.from_linear, llm-awq quantize/qmodule.py pack_intweight", formula="q * s + z",
    by=("group",),
    variants={
        (128,): group_128.VARIANT,
        (64,): group_64.VARIANT,
        (32,): group_32.VARIANT,
    },
    params={"group": (128, 64, 32)},
    detect={"config": {"quant_method": "awq", "version": "gemv_fast", "bits": 4, "group_size": "group"}},
    digest="2e52b3a7e21cd4ea",
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
