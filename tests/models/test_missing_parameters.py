"""A parameter that the model has and the file lacks is refused by its name: norms of ones, biases of zeros are another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import qdsl.models.transformers as plugin
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.models.language import load_language_model
from qdsl.models.load import LoadError
from tests.support import producer_folders

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
