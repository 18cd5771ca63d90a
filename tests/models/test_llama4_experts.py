"""Experts of Llama 4 one by one, as llm-compressor writes them: transformers has no rule that joins them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import producer_folders, tiny_models
from tests.support.producer_folders import KINDS

plugin = pytest.importorskip("qdsl.models.transformers")
IDS = torch.arange(12).view(1, 12)


@pytest.mark.parametrize("width", [64, 96], ids=["square", "other"])
@pytest.mark.parametrize("kind", ["compressed-tensors fp8 channel", "compressed-tensors int8"])
def test_experts_one_by_one(kind: str, width: int, tmp_path: Path) -> None:
    model = tiny_models.tiny_model("llama4_text", intermediate_size=width, interleave_moe_layer_step=1)
    stored, tensors = KINDS[kind].stored, {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.clone()
            continue
        leaves = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, whole in enumerate(tensor):                  # [K, N], gate beside up
            for leaf, part in zip(leaves, whole.chunk(len(leaves), -1), strict=True):
                packed = stored.pack(part.t().contiguous())
                tensors |= producer_folders.named(f"{name.rpartition('.')[0]}.{expert}.{leaf}", packed)
                part.copy_(packed.format.dequantize(packed, torch.float32).t())
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": ["Llama4ForCausalLM"]}
    producer_folders.write_files(tmp_path / "in", tensors, {
        "config.json": {**config, "quantization_config": dict(KINDS[kind].settings or {})}}, "")
    loaded = plugin.from_pretrained(tmp_path / "in", dtype=torch.float32, quantization_config=plugin.QdslConfig())
    with torch.no_grad():
        wanted, logits = model(IDS).logits, loaded(IDS).logits
    assert (logits - wanted).norm() <= 1e-5 * wanted.norm()
    loaded.save_pretrained(tmp_path / "again")
    assert producer_folders.same_weights(tmp_path / "in", tmp_path / "again")
