"""A layer in modelopt's formats by its own packing and decoding functions, which need no GPU, as its quantizers do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.producer_answers import LAYER, SIZE, Answer, x


def modelopt_packed(linear: Any) -> Iterator[Answer]:
    """Layers as modelopt's export packs them, whose quantizers need a GPU: y is that of its own decoding functions."""
    from modelopt.torch.export.quant_utils import process_layer_quant_config, to_quantized_weight
    from modelopt.torch.quantization import qtensor
    from modelopt.torch.quantization.qtensor import mxfp8_tensor

    weight = linear.weight.detach()
    blocks = weight.view(SIZE, -1, 32).abs().amax(2) / 7
    rows = weight.abs().amax(1) / 127
    pre = torch.linspace(0.5, 2, SIZE)

    def of_blocks(cls: Any, length: int, **named: str) -> tuple[dict[str, Tensor], Tensor]:
        packed, *scales = cls.quantize(weight, *([length] if length else []))
        dense = packed.dequantize(torch.float32, block_sizes={-1: length or 32}, **dict(zip(named.values(), scales, strict=True)))
        stored_scales = {name: own.reshape(SIZE, -1) if own.numel() > 1 else own for name, own in zip(named, scales, strict=True)}
        return {"weight": packed._quantized_data, **stored_scales}, dense

    def of_integers(kind: str, scale: Tensor, codes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"weight": to_quantized_weight(weight, scale, kind, block_size=32), "weight_scale": scale}, codes

    nvfp4 = of_blocks(qtensor.NVFP4QTensor, 16, weight_scale="scale", weight_scale_2="double_scale")
    mxfp4 = of_blocks(qtensor.MXFP4QTensor, 32, weight_scale="scale")
    mxfp8 = of_blocks(mxfp8_tensor.MXFP8QTensor, 0, weight_scale="scale")
    grouped = ((weight.view(SIZE, -1, 32) / blocks[..., None]).round().clamp(-8, 7) * blocks[..., None]).view(SIZE, SIZE)
    int4 = of_integers("int4_awq", blocks, grouped)
    int8 = of_integers("int8_sq", rows, (weight / rows[:, None]).round() * rows[:, None])
    smooth = {"pre_quant_scale": pre}
    for kind, block, (tensors, dense), more in (
            ("nvfp4", 16, nvfp4, {}), ("nvfp4_static", 16, nvfp4, {}), ("w4a16_nvfp4", 16, nvfp4, {}),
            ("nvfp4_awq", 16, nvfp4, smooth),
            ("mxfp4", 32, mxfp4, {}), ("w4a8_mxfp4_fp8", 32, mxfp4, {}), ("mxfp8", 32, mxfp8, {}), ("int4_awq", 32, int4, smooth),
            ("w4a8_awq", 32, int4, {**smooth, "weight_scale_2": torch.tensor(0.01)}), ("int8_sq", 0, int8, smooth),
            ("int8_wo", 0, int8, {})):
        settings = process_layer_quant_config({f"{LAYER}.quantization": kind, f"{LAYER}.awq_block_size": block})
        inputs = x() * pre if "pre_quant_scale" in more else x()
        every = {**tensors, **more, "bias": linear.bias.detach()}
        y = torch.nn.functional.linear(inputs, dense, linear.bias).detach()
        yield Answer("modelopt packed", "quantization", kind, {"quant_method": "modelopt", **settings},
                     {f"{LAYER}.{name}": own for name, own in every.items()}, y,
                     package=f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}")
