"""Black Forest Labs' FP8 and NVFP4 in a folder: diffusers' own functions quantize a weight, and decode it to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.files.safetensors import write

bfl = pytest.importorskip("diffusers.quantizers.bfl.utils")
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize("kind", ["fp8r", "nvfp4"])
def test_numbers_are_those_of_diffusers(kind: str, tmp_path: Path) -> None:
    """Scales of rows are [N], and not [N, 1]."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    stored: Any = getattr(bfl, f"quantize_{kind}")(weight)
    wanted = getattr(bfl, f"dequantize_{kind}")(*stored)
    leaves = dict(zip(("weight", "weight_scale", "weight_scale_2"), stored, strict=False))
    leaves |= {"input_scale": torch.tensor(0.5)} if kind == "nvfp4" else {}
    write(tmp_path / "diffusion_pytorch_model.safetensors", {f"{LAYER}.{leaf}": own.contiguous() for leaf, own in leaves.items()})
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", "quantization_config": {
        "quant_method": "bfl", "compute_dtype": "bfloat16", "pre_quantized": True}}))
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False))
    report = qdsl.load_weights_(model, tmp_path, {LAYER: "0"})
    assert report.packed
    with torch.no_grad():
        assert (model(torch.eye(128)).t() - wanted).norm() <= 1e-6 * wanted.norm()
