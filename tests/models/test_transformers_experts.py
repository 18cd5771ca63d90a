"""Experts of transformers' models over packed weights: quantized on the way, offloaded, saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.models.plan import LoadError
from tests.support import language_models, producer_folders

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")
Auto = transformers.AutoModelForCausalLM
QdslConfig = plugin.QdslConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 32, "pad_token_id": 0, "tie_word_embeddings": False}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "DeepseekV3": {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                   "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    "Llama4": {"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1},
}


def mixture(family: str) -> Any:
    """A model with experts and random weights."""
    config_class = transformers.Llama4TextConfig if family == "Llama4" else getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config_class(**SIZES, **MIXTURES[family])).eval()


@pytest.mark.parametrize(("family", "format"), [*((family, "q8_0") for family in MIXTURES), ("GptOss", "fp8_block"),
                                                ("GptOss", "nf4"), ("Llama4", "fp8_block")])
def test_experts_are_quantized_on_the_way(family: str, format: str, tmp_path: Path) -> None:
    """As Experts, whichever way the model holds them; routers stay dense.  Saved and loaded again they are the same."""
    built = mixture(family)
    built.save_pretrained(tmp_path / "plain")
    ids = torch.arange(1, 13).view(2, 6)
    model = type(built).from_pretrained(tmp_path / "plain", quantization_config=QdslConfig(format)).eval()
    stacks = {name for name, module in model.named_modules() if isinstance(module, qdsl.Experts)}
    assert {name for name, parameter in built.named_parameters() if parameter.dim() == 3} == stacks and stacks
    logits = model(ids).logits
    model.save_pretrained(tmp_path / "packed")
    again = type(built).from_pretrained(tmp_path / "packed").eval()
    assert {name for name, module in again.named_modules() if isinstance(module, qdsl.Experts)} == stacks
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=1e-6)
    again.save_pretrained(tmp_path / "again")
    assert producer_folders.same_weights(tmp_path / "packed", tmp_path / "again")
    torch.testing.assert_close(again.dequantize()(ids).logits, logits, rtol=0, atol=1e-5)
    if format == "q8_0":
        torch.testing.assert_close(logits, built(ids).logits, rtol=0, atol=0.05)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_experts_are_offloaded(family: str, tmp_path: Path) -> None:
    """accelerate's hooks load them, although the model calls no module of theirs."""
    built = mixture(family)
    built.save_pretrained(tmp_path / "plain")
    ids = torch.arange(1, 13).view(2, 6)
    model = type(built).from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("q8_0")).eval()
    logits, stack = model(ids).logits, next(module for module in model.modules() if isinstance(module, qdsl.Experts))
    dense, expert = stack.dequantize(), stack[1]
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(tensor.is_meta for tensor in model.parameters())
    assert model(ids).logits.equal(logits) and stack.dequantize().equal(dense) and stack[1].equal(expert)
    assert all(tensor.is_meta for tensor in model.parameters())


def test_experts_whose_rows_are_columns_of_the_product_are_decoded() -> None:
    """`qdsl compress` packs [E, K, N] of gpt-oss as a matrix of E * K rows."""
    from qdsl.generated.q8_0 import quantize

    dense, packed = mixture("GptOss"), mixture("GptOss")
    packed.set_experts_implementation("qdsl")
    for layer, other in zip(dense.model.layers, packed.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            delattr(other.mlp.experts, name)
            stack = qdsl.Experts(quantize(parameter.detach().flatten(0, 1)), len(parameter), dtype=torch.float32)
            other.mlp.experts.add_module(name, stack)
            parameter.data = stack.dequantize()
    ids = torch.arange(1, 13).view(2, 6)
    torch.testing.assert_close(packed(ids).logits, dense(ids).logits, rtol=0, atol=1e-5)


def test_stacked_experts_of_streams_are_not_saved(tmp_path: Path) -> None:
    """Their tensors have other sizes in each expert, which a file of stacks cannot hold; nothing is written."""
    built = mixture("GptOss").bfloat16()
    built.save_pretrained(tmp_path / "plain")
    model = type(built).from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("hlane"))
    with pytest.raises(ValueError, match="differ in size from expert to expert"):
        model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_experts_that_transformers_transposes(tmp_path: Path) -> None:
    """They stay dense when a model is quantized, as the report states; packed ones are refused, not loaded as numbers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {**SIZES, **MIXTURES["Qwen3Moe"], "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    family = transformers.Qwen3VLMoeForConditionalGeneration
    torch.manual_seed(0)
    family(transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)).bfloat16().save_pretrained(tmp_path / "plain")
    model = family.from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("q8_0"))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert model.hf_quantizer.report.dense[name] == "transformers makes it of other tensors of the checkpoint"
    (tmp_path / "packed").mkdir()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with Folder(tmp_path / "plain") as folder:
        tensors = {own: folder.tensor(own) for own in folder.names()}
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].to(torch.float8_e4m3fn), torch.full((4, 1, 1), 2.0)
        write(tmp_path / "packed" / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(LoadError, match=r"makes parameters of these tensors, and cannot of packed ones: .*gate_up_proj"):
        family.from_pretrained(tmp_path / "packed", quantization_config=QdslConfig())


def test_experts_that_are_not_recognised(tmp_path: Path) -> None:
    """transformers writes FP8 experts one by one with their scales in one tensor: an error, not codes taken for numbers."""
    producer_folders.write_folder(tmp_path / "in", "fp8 block", "moe")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes((tmp_path / "in" / "config.json").read_bytes())
    with Folder(tmp_path / "in") as folder:
        tensors = {name: folder.tensor(name) for name in folder.names() if "experts" not in name or name.endswith(".weight")}
        write(tmp_path / "out" / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(LoadError, match="needs tensor 'weight_scale_inv'"):
        Auto.from_pretrained(tmp_path / "out", quantization_config=QdslConfig())


def test_rows_that_transformers_permutes() -> None:
    """A packed layer has no place in a model whose weight is another order of its rows."""
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    from qdsl.models.conversions import Conversions

    model = transformers.Qwen3ForCausalLM(language_models.config("qwen3"))
    rule = WeightConverter("attention.wq.", "self_attn.q_proj.", operations=[PermuteForRope()])
    assert Conversions(model, [rule]).rename("model.layers.0.attention.wq") is None
    assert Conversions(model, []).rename("model.layers.0.self_attn.q_proj") == "model.layers.0.self_attn.q_proj"
