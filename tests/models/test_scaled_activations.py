"""AutoAWQ's scaled activations in the architectures that have them: `act.scales` divide x of the layer after the activation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import int_group
from tests.support.producer_transforms import positive, random

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# As transformers' AWQ_SCALES_MAPPINGS has them: config, activation, the layer after it.
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "starcoder2": ({**SIZES, "intermediate_size": 128, "num_key_value_heads": 2}, "mlp.act", "mlp.c_proj"),
    "falcon": ({**SIZES, "ffn_hidden_size": 128}, "mlp.act", "mlp.dense_4h_to_h"),
    "mpt": ({"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2}, "ffn.act", "ffn.down_proj"),
    "gptj": ({"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "rotary_dim": 8}, "mlp.act",
             "mlp.fc_out"),
    "gpt_neox": ({**SIZES, "intermediate_size": 128}, "mlp.act", "mlp.dense_4h_to_h"),
    "gpt_bigcode": ({"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128}, "mlp.act", "mlp.c_proj"),
    "bloom": ({"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "mlp.gelu_impl", "mlp.dense_4h_to_h")}


@pytest.mark.parametrize("name", MODELS)
def test_models_divide_what_activations_return(tmp_path: Path, name: str) -> None:
    """Logits are those of a dense model whose layer has the columns that were multiplied divided again."""
    sizes, act, after = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **sizes)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    tensors, dense = {}, {}
    for full, tensor in model.state_dict().items():
        layer = full.removesuffix(f".{after}.weight")
        if layer == full:
            tensors[full] = tensor.contiguous()
            continue
        scales = positive(tensor.shape[1]).half()
        packed = int_group.quantize(random(*tensor.shape, seed=len(tensors)) * scales.float(), "awq", bits=4, group=32)
        tensors |= {f"{layer}.{after}.{own}": value for own, value in packed.tensors.items()} | {f"{layer}.{act}.scales": scales}
        dense[full] = int_group.dequantize(packed, torch.float32) / scales.float()
    assert len(dense) == 2
    tied = {id(value): full for full, value in reversed(model.state_dict(keep_vars=True).items())}
    write(tmp_path / "model.safetensors", {full: tensor for full, tensor in tensors.items()
                                           if full not in model.state_dict() or full in tied.values()}, {"format": "pt"})
    text = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__], "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    model.load_state_dict(dense, strict=False)
    ids = torch.arange(24).view(2, 12) * 7 % 96
    with torch.no_grad():
        reference = model(ids).logits
        own: Any = type(model)(config).eval()
        report = qdsl.load_weights_(own, tmp_path, dtype=torch.float32)
        assert len(report.packed) == 2 and report.unused == []
        assert (own(ids).logits - reference).norm() / reference.norm() < 1e-5
