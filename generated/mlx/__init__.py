"""mlx: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b
    float32, rounded after each operation

    s      scale_type [N, ceil(K/group)]
    b      scale_type [N, ceil(K/group)]
    q      u{bits}    [N, K]

    mlx: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 3.5 at 3, 5.5 at 5, 6.5 at 6, with group = 64
    planar: 4.5 bits per weight at bits = 4, 8.5 at 8, 2.5 at 2, 3.5 at 3, 5.5 at 5, 6.5 at 6, with group = 64

Built from the spec mlx (sha256 5f5a2374b16e8d33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from qdsl.runtime import Format

from . import bits_4, bits_8, bits_2, bits_3, bits_5, bits_6

FORMAT = Format(
    name="mlx", title="MLX affine, integer codes with a scale and a bias in floats per group of columns",
    source="MLX core.quantize in mode affine, folders of mlx-lm", formula="q * s + b",
    by=("bits",),
    variants={
        (4,): bits_4.VARIANT,
        (8,): bits_8.VARIANT,
        (2,): bits_2.VARIANT,
        (3,): bits_3.VARIANT,
        (5,): bits_5.VARIANT,
        (6,): bits_6.VARIANT,
    },
    params={"bits": (4, 8, 2, 3, 5, 6), "group": (64, 32, 128), "scale_type": ("bf16", "f16", "f32")},
    sizes={"group": "K"},
    digest="5f5a2374b16e8d33",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
