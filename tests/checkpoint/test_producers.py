"""Producers are data: one file adds a producer without code, and a wrong file is refused with the key that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.producers import FOLDER_VARIABLE
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.core.producer import ProducerError, check_references, producer_of, read_yaml
from qdsl.generated import int_group
from qdsl.jobs.convert.run import convert
from qdsl.jobs.convert.target import parse_conversion
from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "language" / "detection.md"
NAMES = {"qweight": "codes", "qzeros": "offsets", "scales": "steps", "g_idx": "columns"}
CONFIG = {"quantization": {"wbits": 4, "gsize": 32, "layout": "columns", "keep_plain": ["*.head"],
                           "per_layer": {"model.up": {"wbits": 16}}}}


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer of the guide, in a folder of its own."""
    [example] = [block for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "producer: acme" in block]
    (tmp_path / "producers").mkdir()
    (tmp_path / "producers" / "acme.yaml").write_text(example)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "producers"))


def folder(path: Path, packed: Any) -> Path:
    """A folder as acme writes it: one quantized layer, one that settings leave plain, one that the list of names leaves plain."""
    path.mkdir()
    plain = {f"model.{name}.weight": torch.ones(16, 64) for name in ("up", "head")}
    write(path / "model.safetensors", {f"model.down.{NAMES[name]}": tensor for name, tensor in packed.tensors.items()} | plain)
    (path / "acme.json").write_text(json.dumps(CONFIG))
    (path / "config.json").write_text("{}")
    return path


def read(path: Path) -> tuple[Layer, Any, Mapping[str, str]]:
    """The one quantized layer, its weight, and by which rules others are left plain."""
    with Folder(path) as folder:
        detected = layers(folder)
        [layer] = detected.layers
        assert layer.why == "" and layer.problems == () and detected.problems == []
        assert not any(left.problem for left in detected.left)
        return layer, weights(folder, layer)[0], {left.name: left.by for left in detected.left}


def converted(path: Path, to: str, out: Path) -> dict[str, Any]:
    with Folder(path) as folder:
        return convert(folder, layers(folder), parse_conversion(to), out)


@pytest.mark.usefixtures("acme")
def test_one_file_adds_a_producer(tmp_path: Path) -> None:
    """A folder is read, converted to another producer's storage, and back to this one, with the same numbers."""
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    packed = int_group.quantize(values, "gptq_v2", bits=4, group=32)
    layer, weight, left = read(folder(tmp_path / "in", packed))
    assert (layer.format, layer.storage, layer.params["bits"], layer.params["group"]) == ("int_group", "gptq_v2", 4, 32)
    assert set(layer.tensors.values()) == {f"model.down.{NAMES[name]}" for name in packed.tensors}
    assert left == {"model.up": "its own settings", "model.head": "*.head (glob)"}
    assert torch.equal(int_group.dequantize(weight), int_group.dequantize(packed))

    converted(tmp_path / "in", "awq", tmp_path / "awq")
    layer, weight, _ = read(tmp_path / "awq")
    assert (layer.storage, not (tmp_path / "awq" / "acme.json").exists()) == ("awq", True)
    assert set(layer.tensors.values()) == {f"model.down.{name}" for name in weight.tensors}
    assert torch.equal(int_group.dequantize(weight), int_group.dequantize(packed))

    report = converted(tmp_path / "awq", "gptq_v2", tmp_path / "back")
    layer, weight, left = read(tmp_path / "back")
    assert layer.storage == "gptq_v2" and set(layer.tensors.values()) == {f"model.down.{NAMES[name]}" for name in weight.tensors}
    assert torch.equal(int_group.dequantize(weight), int_group.dequantize(packed))
    settings = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert sorted(settings.pop("keep_plain")) == ["model.head", "model.up"]
    assert settings == {"quant_method": "acme", "layout": "columns", "wbits": 4, "gsize": 32}
    assert set(left) == {"model.up", "model.head"} and "acme-serve" in json.dumps(report)


def test_other_checkpoints_do_not_change(acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further producer adds rules and names; those of the others stay."""
    further = descriptions()
    monkeypatch.delenv(FOLDER_VARIABLE)
    for format, more in zip(descriptions(), further, strict=True):
        rules = [rule for rule in more.detect.get("config", []) if rule["quant_method"] != "acme"]
        assert (more.name, rules) == (format.name, format.detect.get("config", []))


@pytest.mark.parametrize(("text", "message"), [
    ("methods: [x]", "'producer' is missing|'name' is missing"),
    ("producer: x\nplace: []", "unknown key 'place'"),
    ("producer: x\nplaces: [{at: [a]}]", r"places\[0\]: 'file' is missing"),
    ("producer: x\nskipped: {ignore: [wildcard]}", r"skipped.ignore\[0\]: expected one of exact, substring"),
    ("producer: x\nfollows_tensors: 1", "follows_tensors: expected true or false"),
    ("producer: x\nproducer: y", "'producer' stands twice"),
    ("producer: [x", "while parsing"),
    ("producer: x\nformats: {q4_0: [{scale: 0.5}]}", "not 0.5"),
    ("producer: x\nformats: {int_group: [{sym: {z: false}}]}", "expected {NAME: "),
    ("producer: x\nformats: {q5: [{a: b}]}", "there is no such format"),
    ("producer: x\nformats: {int_group: [{a: b, storage: plan}]}", "there is no storage 'plan'"),
    ("producer: x\nformats: {int_group: [{a: b, where: {bits: 99}}]}", "there is no parameter 'bits' with the value 99"),
    ("producer: x\nheaders: {int_group: [{a: {zz: [true, false]}}]}", "there is no tensor or optional field 'zz'"),
    ("producer: x\ntensors: {int_group: {awq: {weight: codes}}}", "there is no tensor 'weight'"),
])
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ProducerError, match=message):
        check_references(producer_of(read_yaml(path), str(path)), descriptions())


def test_the_guide_names_every_key() -> None:
    from qdsl.core.producer import ABOUT_RULE, DIALECTS, Producer

    guide, keys = GUIDE.read_text(), ["producer", *(own.name for own in fields(Producer) if own.name != "name")]
    assert [word for word in (*keys, *DIALECTS, *ABOUT_RULE) if f"`{word}`" not in guide] == []
