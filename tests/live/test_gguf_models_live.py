"""Tiny models of every recorded model type through llama.cpp's converter, and the maps recorded anew.

Needs the source distribution of llama-cpp-python, which `make live` unpacks: without it nothing here is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.gguf_maps import FOLDER, GgufMap, model_types
from tests.support import llama_cpp

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
tiny_models = pytest.importorskip("tests.support.tiny_models")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("gguf"),
              pytest.mark.skipif(llama_cpp.folder() is None, reason="needs llama.cpp's converter: see make live")]


def converted(folder: Path, model_type: str, size: int, **changes: Any) -> tuple[Path, Any]:
    """A Q8_0 file of llama.cpp's converter, and the model of the numbers that it holds."""
    from tests.support import gguf_models

    model = tiny_models.tiny_model(model_type, size, **changes)
    model.save_pretrained(folder)
    llama_cpp.add_tokenizer(folder, model.config.vocab_size)
    path = llama_cpp.converted(folder, "MOSTLY_Q8_0")
    with GgufFile(path) as file:
        types = {name: entry.type.name for name, entry in file.tensors.items()}
    return path, gguf_models.decode_(model, GgufMap.read(FOLDER / f"{model_type}.json"), types)


def check_same(model: Any, reference: Any) -> None:
    """Logits are equal; products of packed experts add in another order."""
    from tests.support import gguf_models

    vocabulary = reference.config.vocab_size
    result, expected = gguf_models.logits(model, vocabulary), gguf_models.logits(reference, vocabulary)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6 if "experts" in str(model.hf_quantizer.report.packed) else 0)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("model_type", model_types())
def test_files_of_the_converter(model_type: str, size: int, tmp_path: Path) -> None:
    """Logits are those of transformers' model of the decoded weights, with the config of the folder or of the file."""
    path, reference = converted(tmp_path, model_type, size, **tiny_models.unusual(model_type))
    check_same(plugin.from_pretrained(path, base=tmp_path, dtype=torch.float32), reference)


@pytest.mark.parametrize("model_type", model_types())
def test_configs_of_files(model_type: str, tmp_path: Path) -> None:
    """The config comes from the file alone."""
    path, reference = converted(tmp_path, model_type, 1, **tiny_models.unusual(model_type))
    (tmp_path / "config.json").unlink()
    check_same(plugin.from_pretrained(path, dtype=torch.float32), reference)


def test_scaled_rotary_embeddings(tmp_path: Path) -> None:
    """Llama 3.1's factors come from the file's tensor."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}
    path, reference = converted(tmp_path, "llama", 1, rope_parameters=rope, head_dim=32)
    with GgufFile(path) as file:
        assert (file.tensor("rope_freqs.weight") != 1).any()
    model = plugin.from_pretrained(path, dtype=torch.float32)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", model_types())
def test_maps_are_those_of_this_converter(model_type: str) -> None:
    """What the converter does today is what is recorded."""
    from tests.trace_gguf_maps import recorded

    assert recorded(model_type) == GgufMap.read(FOLDER / f"{model_type}.json")
