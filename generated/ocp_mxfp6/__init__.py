"""ocp_mxfp6: OCP MXFP6, 6-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, ceil(K/32)]
    q      code [N, K]

    compressed_tensors at code = e2m3: 6.25 bits per weight
    compressed_tensors at code = e3m2: 6.25 bits per weight
    torchao at code = e2m3: 8.25 bits per weight
    torchao at code = e3m2: 8.25 bits per weight
    torchao_swizzled at code = e2m3: 8.25 bits per weight
    torchao_swizzled at code = e3m2: 8.25 bits per weight

Built from the spec ocp_mxfp6 (sha256 aa6cba390ea4ef37) by qdsl 0.1.0.
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
    detect={"config": [{"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized",
        "storage": "compressed_tensors", "where": {"code": "e2m3"},
        "with": {"num_bits": 6, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        "dynamic": False, "scale_dtype": "torch.uint8"}},
        {"quant_method": "quark", "global_quant_config.weight.dtype": "fp6_e2m3",
        "global_quant_config.weight.qscheme": "per_group", "storage": "compressed_tensors", "where": {"code": "e2m3"}},
        {"quant_method": "quark", "global_quant_config.weight.dtype": "fp6_e3m2",
        "global_quant_config.weight.qscheme": "per_group", "storage": "compressed_tensors", "where": {"code": "e3m2"}},
        {"quant_method": "torchao", "storage": "torchao",
        "with": {"quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1,
        "_data": {}}}}},
        {"quant_method": "torchao", "storage": "torchao_swizzled",
        "with": {"quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1,
        "_data": {}}}}}],
        "header": [{"_type": "MXTensor", "_data.elem_dtype": "fp6_e2m3", "_data.block_size": 32,
        "_data.is_swizzled_scales": False, "storage": "torchao", "where": {"code": "e2m3"},
        "with": {"_data": {"orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype": "fp6_e2m3", "_data.block_size": 32, "_data.is_swizzled_scales": True,
        "storage": "torchao_swizzled", "where": {"code": "e2m3"},
        "with": {"_data": {"orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype": "fp6_e3m2", "_data.block_size": 32,
        "_data.is_swizzled_scales": False, "storage": "torchao", "where": {"code": "e3m2"},
        "with": {"_data": {"orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}},
        {"_type": "MXTensor", "_data.elem_dtype": "fp6_e3m2", "_data.block_size": 32, "_data.is_swizzled_scales": True,
        "storage": "torchao_swizzled", "where": {"code": "e3m2"},
        "with": {"_data": {"orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": "null",
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"}}, "_tensor_data_names": "tensors"}}]},
    digest="aa6cba390ea4ef37",
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
