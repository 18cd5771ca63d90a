"""GPTQ's codes in shorter integers: what gptqmodel's own module packs and decodes, qdsl reads as the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.files.safetensors import write

pytest.importorskip("gptqmodel")
pytestmark = pytest.mark.filterwarnings("default")
N, K, GROUP = 64, 128, 32
LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["int8", "int16", "int32"])
def test_numbers_are_those_of_gptqmodel(kind: str, bits: int, version: str, tmp_path: Path) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(bits)
    linear = torch.nn.Linear(K, N, bias=False).half()
    options: Any = {"bits": bits, "group_size": GROUP, "sym": False, "desc_act": False, "in_features": K, "out_features": N,
                    "bias": False, "pack_dtype": dtype, "register_buffers": True}
    module = TorchLinear(**options)
    scales = torch.rand(N, K // GROUP, generator=generator) * 0.01 + 0.005
    zeros = torch.randint(0, 1 << bits, (N, K // GROUP), generator=generator).float()
    module.pack_original(linear, scales, zeros, (torch.arange(K) // GROUP).int())
    leaves = {leaf: getattr(module, leaf).clone() for leaf in ("qweight", "qzeros", "scales", "g_idx")}
    if version == "gptq":                                        # as its own reader undoes it
        convert_gptq_v1_to_v2_format_module(module, bits, dtype)
    module.post_init()
    with torch.no_grad():
        wanted = module.dequantize_weight().t().float()
    write(tmp_path / "model.safetensors", {f"{LAYER}.{leaf}": own.contiguous() for leaf, own in leaves.items()})
    settings = {"bits": bits, "group_size": GROUP, "checkpoint_format": version, "pack_dtype": kind, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", **settings}}))
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    qdsl.load_weights_(model, tmp_path, {LAYER: "0"})
    with torch.no_grad():
        ours = model.float()(torch.eye(K)).t()
    assert (ours - wanted).abs().max() <= 2 ** -10 * wanted.abs().max()                 # which rounds to halves
