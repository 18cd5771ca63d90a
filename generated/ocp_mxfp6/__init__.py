"""ocp_mxfp6: OCP MXFP6, 6-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors: 6.25 bits per weight at code = e2m3, 6.25 at e3m2
    torchao: 8.25 bits per weight at code = e2m3, 8.25 at e3m2
    torchao_swizzled: 8.25 bits per weight at code = e2m3, 8.25 at e3m2
    planar: 6.25 bits per weight at code = e2m3, 6.25 at e3m2

Built from the spec ocp_mxfp6 (sha256 16e577bbc8f11d5f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import code_e2m3, code_e3m2

FORMAT = Format(
    name="ocp_mxfp6", title="OCP MXFP6, 6-bit floats with a power of two per 32",
    source="OCP Microscaling Formats 1.0; compressed-tensors mxfp6-pack, torchao MXTensor", formula="e * q",
    by=("code",),
    variants={
        ("e2m3",): code_e2m3.VARIANT,
        ("e3m2",): code_e3m2.VARIANT,
    },
    params={"code": ("e2m3", "e3m2")},
    digest="16e577bbc8f11d5f",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
