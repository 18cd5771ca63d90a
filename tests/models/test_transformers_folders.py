"""Folders of every producer in transformers: loaded by the plug-in, run, and saved as the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.files.folder import INDEX
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from tests.support import language_models, producer_folders
from tests.support.covering import ALL
from tests.support.formats import same_bits
from tests.support.producer_folders import KINDS, MXFP4

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")

MODELS = ("qwen3", "tied", "moe")
EVERY = [(kind, model) for kind in KINDS for model in MODELS]
ROUNDINGS = 32                                                   # of a logit: 14 were seen where sums have another order
ACT_ORDER = "gptq act-order"                                     # whose columns are put in the order of their groups
COVERING = [(kind, MODELS[place % len(MODELS)]) for place, kind in enumerate(KINDS)]
CASES = [*(EVERY if ALL else COVERING), (MXFP4, "gpt_oss")]


def load(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """A folder as users load it: plainly, with a QdslConfig, or by the plug-in's own function."""
    opens = KINDS[kind].opens if kind in KINDS else "config"
    if opens == "function":
        return plugin.from_pretrained(folder, dtype=dtype)
    options = {"quantization_config": plugin.QdslConfig()} if opens == "config" else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def check_saved(folder: Path, again: Path) -> None:
    """The same files of weights and the same index; the same config."""
    names = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    assert {path.name for path in again.iterdir() if "safetensors" in path.name} == names
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def check_logits(logits: torch.Tensor, wanted: torch.Tensor, is_summed_alike: bool) -> None:
    """The same bits; where products are summed in another order, as near as some roundings of the largest logit."""
    if is_summed_alike:
        assert same_bits(logits, wanted)
    else:
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        assert error <= ROUNDINGS * torch.finfo(wanted.dtype).eps


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_a_folder_loads_runs_and_saves(kind: str, model: str, tmp_path: Path) -> None:
    """Logits and greedy tokens are those of the decoded weights."""
    decoded = producer_folders.write_folder(tmp_path / "in", kind, model)
    loaded = load(tmp_path / "in", kind, torch.float32)
    reference = language_models.filled(model, decoded, torch.float32)
    logits, wanted = language_models.logits(loaded), language_models.logits(reference)
    check_logits(logits, wanted, is_summed_alike=model != "gpt_oss" and kind != ACT_ORDER)      # gpt-oss multiplies by w, not w.T
    assert language_models.greedy(loaded).equal(language_models.greedy(reference))
    loaded.save_pretrained(tmp_path / "out")
    check_saved(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(("kind", "model"), [
    *((kind, MODELS[(place + 1) % len(MODELS)]) for place, kind in enumerate(KINDS)), (MXFP4, "gpt_oss")])
def test_a_folder_fills_a_model(kind: str, model: str, tmp_path: Path) -> None:
    """`load_weights_` in bfloat16, the dtype of most folders: the same bits as decoded weights, and the same files again."""
    decoded = producer_folders.write_folder(tmp_path / "in", kind, model)
    with accelerate.init_empty_weights(include_buffers=False):
        filled = transformers.AutoModelForCausalLM.from_config(language_models.config(model), dtype=torch.bfloat16)
    report = qdsl.load_weights_(filled.eval(), tmp_path / "in")
    assert report.packed
    reference = language_models.filled(model, decoded, torch.bfloat16)
    check_logits(language_models.logits(filled), language_models.logits(reference), is_summed_alike=kind != ACT_ORDER)
    assert qdsl.save_model(filled, tmp_path / "out").exact


def test_settings_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    """By from_pretrained; with allow_unknown the report repeats them.  So is a tensor that its module does not compute with."""
    producer_folders.write_folder(tmp_path / "in", "gptq v1", "qwen3")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for more, tensors in (({"rotation": "hadamard"}, {}), ({}, {"model.layers.0.input_layernorm.shift": torch.ones(8)})):
        path = shutil.copytree(tmp_path / "in", tmp_path / f"{len(more)}")
        settings = {**config["quantization_config"], **more}
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        if tensors:
            file = next(path.glob("*.safetensors"))
            safetensors = pytest.importorskip("safetensors.torch")
            safetensors.save_file({**safetensors.load_file(file), **tensors}, file, {"format": "pt"})
            (path / "model.safetensors.index.json").unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match="rotation is 'hadamard'" if more else "input_layernorm.shift is F32"):
            plugin.from_pretrained(path)
        allowed = plugin.from_pretrained(path, allow_unknown=True).hf_quantizer.report.allowed
        assert len(allowed) == 1


@pytest.mark.parametrize(("change", "why"), [("no map", "weight_map must map"), ("a whole model", "names other files than model"),
                                             ("a missing file", "model-00002-of-00002.safetensors is missing")])
def test_an_index_that_transformers_fails_on(change: str, why: str, tmp_path: Path) -> None:
    producer_folders.write_folder(tmp_path / "in", "gptq v2", "moe")
    if change == "no map":
        (tmp_path / "in" / INDEX).write_text("{}")
    elif change == "a whole model":
        write(tmp_path / "in" / "model.safetensors", {"model.norm.weight": torch.ones(256, dtype=torch.float32)})
    else:
        (tmp_path / "in" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=why):
        plugin.from_pretrained(tmp_path / "in")
