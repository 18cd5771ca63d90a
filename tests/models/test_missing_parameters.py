"""A parameter that the model has and the file lacks is refused by its name: norms of ones, biases of zeros are another model."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

import qdsl.models.transformers as plugin
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.models.language import load_language_model
from qdsl.models.load import LoadError
from tests.support import language_models, producer_folders

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_norm.weight", "lm_head.weight",
                                  "model.layers.0.self_attn.o_proj.bias"])
def test_each_way_to_load_refuses_it(name: str, tmp_path: Path) -> None:
    producer_folders.write_folder(tmp_path / "in", "gptq v1", "qwen3")
    file, config = tmp_path / "in" / "model.safetensors", tmp_path / "in" / "config.json"
    if name.endswith("bias"):                                    # which the config announces
        config.write_text(json.dumps({**json.loads(config.read_text()), "attention_bias": True}))
    with Folder(tmp_path / "in") as folder:
        tensors = {own: folder.tensor(own).clone() for own in folder.names() if own != name}
    write(file, tensors, {"format": "pt"})
    auto, path = transformers.AutoModelForCausalLM, tmp_path / "in"
    for load in (lambda: plugin.from_pretrained(path, dtype=torch.float32),
                 lambda: load_language_model(str(path), dtype="float32"),
                 lambda: auto.from_pretrained(path, quantization_config=plugin.QdslConfig())):
        with pytest.raises(LoadError, match=name.replace(".", r"\.")):
            load()


@pytest.mark.filterwarnings("default")                           # of peft
@pytest.mark.parametrize("has_peft", [True, False])
def test_an_adapter_beside_the_model_is_added_or_refused(has_peft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers adds it; without peft, which does that, the model would be another without a word."""
    peft = pytest.importorskip("peft")
    decoded = producer_folders.write_folder(tmp_path / "in", "gptq v1", "qwen3")
    dense = language_models.filled("qwen3", decoded, torch.float32)
    base = language_models.logits(dense)
    adapted = peft.get_peft_model(dense, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)   # which asks the network for the base
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).rename(tmp_path / "in" / name)
    if has_peft:
        wanted = language_models.logits(adapted)
        for model in (plugin.from_pretrained(tmp_path / "in", dtype=torch.float32),
                      load_language_model(str(tmp_path / "in"), dtype="float32").model):
            assert (language_models.logits(model) - wanted).norm() <= 1e-5 * wanted.norm() < 1e-4 * (wanted - base).norm()
        return
    monkeypatch.setattr(import_module("qdsl.models.transformers.quantizer"), "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"adapter_config\.json: .* if peft is installed, and it is not"):
        plugin.from_pretrained(tmp_path / "in", dtype=torch.float32)
