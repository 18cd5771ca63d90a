"""ocp_mxfp8: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    torchao: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    torchao_swizzled: 8.25 bits per weight at code = e4m3, 8.25 at e5m2
    mlx: 8.25 bits per weight at code = e4m3
    planar: 8.25 bits per weight at code = e4m3, 8.25 at e5m2

Built from the spec ocp_mxfp8 (sha256 d0752f9324ca002d) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import code_e4m3, code_e5m2

FORMAT = Format(
    name="ocp_mxfp8", title="OCP MXFP8, 8-bit floats with a power of two per 32",
    source="OCP Microscaling Formats 1.0; compressed-tensors mxfp8, ModelOpt MXFP8, torchao MXTensor", formula="e * q",
    by=("code",),
    variants={
        ("e4m3",): code_e4m3.VARIANT,
        ("e5m2",): code_e5m2.VARIANT,
    },
    params={"code": ("e4m3", "e5m2")},
    digest="d0752f9324ca002d",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
