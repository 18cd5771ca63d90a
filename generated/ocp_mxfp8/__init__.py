"""ocp_mxfp8: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors at code = e4m3: 8.25 bits per weight
    compressed_tensors at code = e5m2: 8.25 bits per weight
    torchao at code = e4m3: 8.25 bits per weight
    torchao at code = e5m2: 8.25 bits per weight
    torchao_swizzled at code = e4m3: 8.25 bits per weight
    torchao_swizzled at code = e5m2: 8.25 bits per weight
    mlx at code = e4m3: 8.25 bits per weight
    planar at code = e4m3: 8.25 bits per weight
    planar at code = e5m2: 8.25 bits per weight

Built from the spec ocp_mxfp8 (sha256 93c43500cf6cd093) by qdsl 0.1.0.
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
    detect={"config": [{"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
        "storage": "compressed_tensors", "where": {"code": "e4m3"},
        "with": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        "dynamic": False, "scale_dtype": "torch.uint8"}},
        {"quant_method": "mxfp8", "storage": "compressed_tensors", "where": {"code": "e4m3"}},
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "storage": "compressed_tensors",
        "where": {"code": "e4m3"}},
        {"quant_method": "torchao", "storage": "torchao",
        "with": {"quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1,
        "_data": {}}}}},
        {"quant_method": "torchao", "storage": "torchao_swizzled",
        "with": {"quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1,
        "_data": {}}}}},
        {"quant_method": "mlx", "mode": "mxfp8", "storage": "mlx", "with": {"group_size": 32, "bits": 8}}],
        "header": [{"_type": "MXTensor", "_data.elem_dtype._data": "float8_e4m3fn", "_data.block_size": 32,
        "_data.is_swizzled_scales": False, "storage": "torchao", "where": {"code": "e4m3"},
        "with": {"_data": {"elem_dtype": {"_type": "torch.dtype"},
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype._data": "float8_e4m3fn", "_data.block_size": 32,
        "_data.is_swizzled_scales": True, "storage": "torchao_swizzled", "where": {"code": "e4m3"},
        "with": {"_data": {"elem_dtype": {"_type": "torch.dtype"},
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype._data": "float8_e5m2", "_data.block_size": 32,
        "_data.is_swizzled_scales": False, "storage": "torchao", "where": {"code": "e5m2"},
        "with": {"_data": {"elem_dtype": {"_type": "torch.dtype"},
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype._data": "float8_e5m2", "_data.block_size": 32,
        "_data.is_swizzled_scales": True, "storage": "torchao_swizzled", "where": {"code": "e5m2"},
        "with": {"_data": {"elem_dtype": {"_type": "torch.dtype"},
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}}]},
    digest="93c43500cf6cd093",
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
