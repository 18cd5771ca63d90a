"""Groups of compressed-tensors that are the name of a preset and a list of targets: each preset is read as what it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from tests.support.producer_folders import Stored

N, K = 128, 256
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def integers(bits: int, symmetric: bool = True) -> tuple[str, Stored]:
    return "pack-quantized", Stored("int_group", "pack_quantized", {"bits": bits, "group": 128, "symmetric": symmetric,
                                                                   "scale_type": "bf16"})


def of(format: str, name: str, storage: str = "compressed_tensors", **params: Any) -> tuple[str, Stored]:
    return format, Stored(name, storage, params)


# The `format` of a preset's folders, and the storage, by the beginnings of names; the longest counts.
WRITTEN = {
    **{f"W{bits}A": integers(bits) for bits in range(2, 9)}, "W4A16_ASYM": integers(4, False),
    "W8A8": of("int-quantized", "int8_channel", "safetensors"), "INT8": of("int-quantized", "int8_channel", "safetensors"),
    "FP8": of("float-quantized", "fp8_tensor", "safetensors"),
    "FP8_DYNAMIC": of("float-quantized", "fp8_channel", "safetensors"),
    "FP8_BLOCK": of("float-quantized", "fp8_block", "safetensors", bn=128, bk=128, scale_type="bf16"),
    "NVFP4": of("nvfp4-pack-quantized", "nvfp4_ct"), "MXFP4": of("mxfp4-pack-quantized", "ocp_mxfp4"),
    "MXFP6": of("mxfp6-pack-quantized", "ocp_mxfp6"), "MXFP8": of("mxfp8-quantized", "ocp_mxfp8", code="e4m3")}
RENAMED = {"fp8_block": {"weight_scale_inv": "weight_scale"}}
_GROUPS = producers().of("compressed-tensors").groups
assert _GROUPS is not None
PRESETS = _GROUPS.presets
QUANTIZED = [name for name in PRESETS if PRESETS[name]]
# one name of each kind of weights
DISTINCT = [*dict.fromkeys(min(other for other in QUANTIZED if PRESETS[other]["weights"] == PRESETS[name]["weights"])
                           for name in QUANTIZED)]


def written(preset: str) -> tuple[str, Stored]:
    return WRITTEN[max((name for name in WRITTEN if preset.startswith(name)), key=len)]


def packed(path: Path, weights: dict[str, str]) -> dict[str, torch.Tensor]:
    """Write layers as their presets say, '' for a plain one; returns their weights."""
    tensors, dense = {}, {}
    for seed, (layer, preset) in enumerate(weights.items()):
        weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        dense[layer] = weight
        if not preset:
            tensors[f"{layer}.weight"] = weight
            continue
        stored = written(preset)[1]
        own = stored.pack(weight)
        names = RENAMED.get(stored.format, {})
        tensors |= {f"{layer}.{names.get(name, name)}": tensor.contiguous() for name, tensor in own.tensors.items()}
        dense[layer] = own.format.dequantize(own, torch.float32)
    path.mkdir(exist_ok=True)
    write(path / "model.safetensors", tensors)
    return dense


def detected(path: Path, format: str, groups: dict[str, Any], **more: Any) -> Layers:
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, **more}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with Folder(path) as folder:
        return detected_layers(folder)


def computed(path: Path, layer: str) -> torch.Tensor:
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    qdsl.load_weights_(model, path, {layer: "0"})
    with torch.no_grad():
        return model.float()(torch.eye(K)).t()


@pytest.mark.parametrize("preset", QUANTIZED)
def test_a_preset_is_what_it_stands_for(preset: str, tmp_path: Path) -> None:
    dense = packed(tmp_path, {UP: preset})
    survey = detected(tmp_path, written(preset)[0], {preset: ["Linear"]})
    [layer] = survey.layers
    assert (layer.format, layer.problems, survey.problems) == (written(preset)[1].format, (), []) and not layer.contradictions
    assert not any(finding.is_refused for finding in survey.findings)
    assert torch.equal(computed(tmp_path, UP), dense[UP])


@pytest.mark.parametrize("preset", DISTINCT)
def test_another_preset_is_refused(preset: str, tmp_path: Path) -> None:
    """Whatever the other preset: tensors that are not what it says are contradictions, and the sentence has the setting."""
    packed(tmp_path, {UP: preset})
    for other in DISTINCT:
        (format, stored), same = written(other), written(preset)[1]
        if stored == same:
            continue
        [layer] = detected(tmp_path, format, {other: ["Linear"]}).layers
        is_alike = (preset, other[:2]) == ("W8A16", "W7")        # words of 7 bits and one that is empty, in release 0.17
        assert layer.contradictions or layer.why or is_alike, (other, layer)


def test_layers_of_several_presets(tmp_path: Path) -> None:
    """A whole name counts before expressions, those before classes, and of equal targets the last."""
    dense = packed(tmp_path, {UP: "W4A16", DOWN: "FP8_DYNAMIC"})
    for groups in ({"W4A16": ["Linear"], "FP8_DYNAMIC": [DOWN]}, {"FP8_DYNAMIC": ["re:.*down_proj"], "w4a16": ["Linear"]},
                   {"W4A16": ["re:.*_proj"], "FP8_DYNAMIC": [DOWN]},
                   {"W8A8": ["Linear"], "W4A16": ["Linear"], "FP8_DYNAMIC": [DOWN]},
                   {"W4A16": [UP], "FP8_DYNAMIC": ["re:.*mlp.*"]},
                   {"W4A16": [UP], "group_0": {"targets": ["Linear"], "weights": PRESETS["FP8_DYNAMIC"]["weights"],
                                               "format": "float-quantized"}}):
        survey = detected(tmp_path, "mixed-precision", groups)
        assert [layer.contradictions for layer in survey.layers] == [(), ()] and not survey.problems, groups
        assert all(torch.equal(computed(tmp_path, layer), dense[layer]) for layer in (UP, DOWN))
    packed(tmp_path, {UP: "W4A16", DOWN: ""})
    for plain in ({"UNQUANTIZED": [DOWN]}, {"group_1": {"targets": ["re:.*down"], "input_activations": None}}):
        survey = detected(tmp_path, "pack-quantized", {"W4A16": ["Linear"], **plain})
        assert [layer.name for layer in survey.layers] == [UP] and not survey.problems and not survey.contradictions
    packed(tmp_path, {UP: "W4A16", DOWN: "W4A16"})
    assert detected(tmp_path, "pack-quantized", {"W4A16": ["Linear"], "UNQUANTIZED": [DOWN]}).layers[0].problems


@pytest.mark.parametrize("groups", [{"W4A15": ["Linear"]}, {"group_0": ["Linear"]}, {"W4A16": "Linear"},
                                    {"W4A16": ["Linear"], "W4A17": [DOWN]}], ids=str)
def test_lists_of_no_preset_are_refused(groups: dict[str, Any], tmp_path: Path) -> None:
    packed(tmp_path, {UP: "W4A16"})
    survey = detected(tmp_path, "pack-quantized", groups)
    is_list = groups.get("W4A16") != "Linear"
    [problem], [finding] = survey.problems, survey.findings
    assert "no object of settings" in problem and problem.endswith("is no preset's name") == is_list and finding.is_refused
    with pytest.raises(CheckpointError, match=f"no object of settings|{finding.key}"):
        computed(tmp_path, UP)


def test_a_conversion_writes_what_the_preset_stands_for(tmp_path: Path) -> None:
    dense = packed(tmp_path / "in", {UP: "W4A16"})
    detected(tmp_path / "in", "pack-quantized", {"W4A16": ["Linear"]})
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion("pack_quantized_0_8"), tmp_path / "out")
    [group] = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["weights"] == PRESETS["W4A16"]["weights"] | {"symmetric": False} and group["targets"] == ["Linear"]
    assert torch.equal(computed(tmp_path / "out", UP), dense[UP])
