"""Configs of converted folders: the new storage, which layers are not quantized, settings renewed wherever they lie."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import fp8_block, fp8_tensor, int8_channel, int_group
from qdsl.jobs.convert import run, target
from tests.support import folders
from tests.support.converted_folders import convert, refused, requantized, two_layers, weight
from tests.support.formats import same_bits

weights = pytest.fixture(two_layers)


@pytest.mark.parametrize(("to", "expected"), [
    ("gptq_v1", {**folders.GPTQ, "checkpoint_format": "gptq"}),
    ("awq", {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True,
             "modules_to_not_convert": ["head", r"mlp\.gate$"]}),
])
def test_the_config_says_the_new_storage(tmp_path: Path, to: str, expected: dict[str, Any]) -> None:
    """As its producer does; what else it holds stays.  AWQ's readers would take 'mlp.gate' for 'mlp.gate_proj' too."""
    every = {**folders.named({"mlp.gate_proj": weight()}), "mlp.gate.weight": torch.ones(4, 64), "head.weight": torch.ones(2, 3)}
    config = {"model_type": "toy", "limit": [0.0, math.inf], "text_config": {"quantization_config": folders.GPTQ}}
    path = folders.folder(tmp_path / "in", every, config=config)
    report = convert(path, tmp_path / "out", to)
    written_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written_config == {**config, "text_config": {"quantization_config": expected}}
    assert [note for note in report["notes"] if "gate" in note] == (
        ["modules_to_not_convert of the config cannot name mlp.gate to all readers"] if to == "awq" else [])
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.storage, layer.problems) == (to, ())


@pytest.mark.parametrize(("to", "key", "skipped", "wrong"), [
    ("fp8_block", "modules_to_not_convert", [r"a\.gate$", "head", "out$"], ["a.gate", "out"]),   # both or any part
    ("nf4", "llm_int8_skip_modules", ["a.gate", "head", "out$"], []),              # a beginning or an end
    ("fp8_channel", "ignore", ["a.gate", "head", "out"], []),                      # whole names
    ("nvfp4_modelopt", "exclude_modules", ["a.gate", "head", "out"], []),
    ("hqq", "modules_to_not_convert", ["a.gate", "head", "out"], []),              # in settings of ours
])
def test_a_list_names_no_layer_that_is_quantized(tmp_path: Path, to: str, key: str, skipped: list[str], wrong: list[str]) -> None:
    """In none of the readings of its readers: 'out' is the end of 'a.out', and 'a.gate' is in 'a.gate_proj'."""
    packed = [int_group.quantize(torch.randn(128, 256), bits=8, group=128) for _ in range(2)]
    plain = {f"{name}.weight": torch.ones(4, 64) for name in ("a.gate", "head", "out")}
    path = folders.folder(tmp_path / "in", {**folders.named({"a.gate_proj": packed[0], "a.out": packed[1]}), **plain})
    report = requantized(path, tmp_path / "out", to)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(settings[key]) == skipped
    assert [note for note in report["notes"] if "cannot name" in note] == (
        [f"{key} of the config cannot name {', '.join(wrong)} to all readers"] if wrong else [])
    read = quantization(settings, "config.json", "")
    assert not any(read.scheme(name).settings is None or read.maybe(name) for name in ("a.gate_proj", "a.out"))
    assert all(read.scheme(name).settings is None for name in ("a.gate", "head", "out") if name not in wrong)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_says_whether_columns_are_in_order(tmp_path: Path, ordered: bool, symmetric: bool) -> None:
    """vLLM asks for desc_act and sym, and transformers takes a missing sym for true; of one producer all stays as it was."""
    packed = weight(storage="pack_quantized")
    fields = int_group.unpack(packed)
    fields["z"][...] = 8
    fields["z"][-1, -1] = 8 if symmetric else 7
    if not ordered:
        fields["g"] = torch.arange(64, dtype=torch.int32).flip(0) // 32
    path = folders.folder(tmp_path / "in", folders.named({"w": int_group.pack(fields, "pack_quantized", **packed.params)}),
                          config={})
    convert(path, tmp_path / "out", "gptq_v2")
    expected = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "desc_act": not ordered,
                "sym": symmetric}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == expected
    convert(tmp_path / "out", tmp_path / "v1", "gptq_v1")
    v1 = json.loads((tmp_path / "v1" / "config.json").read_text())["quantization_config"]
    assert v1 == {**expected, "checkpoint_format": "gptq"}


@pytest.mark.parametrize(("to", "method"), [("xpu_int4pack", "qdsl"), ("marlin", "gptq")])
def test_a_rule_for_another_storage_is_not_taken(tmp_path: Path, to: str, method: str) -> None:
    """One that names no storage says nothing of a format that has several."""
    packed = int_group.quantize(torch.randn(64, 128), "gptq_v2", bits=4, group=32)
    fields = {**int_group.unpack(packed), "z": torch.full_like(int_group.unpack(packed)["z"], 8)}
    path = folders.folder(tmp_path / "in", folders.named({"w": int_group.pack(fields, "gptq_v2", **packed.params)}))
    convert(path, tmp_path / "out", to)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == method and settings.get("checkpoint_format") == (None if method == "qdsl" else "marlin")


def test_scales_of_x_are_left_to_no_loader_that_does_not_know_them(tmp_path: Path) -> None:
    """ModelOpt's pre_quant_scale, by which x is multiplied: GPTQ's loaders would leave it out, and say nothing."""
    packed = int_group.quantize(torch.randn(16, 128), "modelopt", bits=4, group=128)
    tensors = {**folders.named({"w": packed}), "w.pre_quant_scale": torch.ones(128)}
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    path = folders.folder(tmp_path / "in", tensors, config={"quantization_config": settings})
    report = convert(path, tmp_path / "out", "gptq_v2")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "qdsl"
    assert any("pre_quant_scale" in note for note in report["notes"])
    with Folder(tmp_path / "out") as folder:
        assert folder.tensor("w.pre_quant_scale").equal(torch.ones(128))
        assert [(layer.storage, layer.problems) for layer in layers(folder).layers] == [("gptq_v2", ())]


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    """They stay there for the same producer; another one's are in the config."""
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}), config={})
    settings = {key: value for key, value in folders.GPTQ.items() if key != "quant_method"}    # of whom they are the name says
    (path / "quantize_config.json").write_text(json.dumps(settings))
    convert(path, tmp_path / "v1", "gptq_v1")
    assert json.loads((tmp_path / "v1" / "quantize_config.json").read_text())["checkpoint_format"] == "gptq"
    convert(path, tmp_path / "awq")
    assert not (tmp_path / "awq" / "quantize_config.json").exists()
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"


@pytest.mark.parametrize(("storage", "name"), [("gptq_v1", "gptq"), ("gptq_v2", "gptq_v2")])
def test_gptq_becomes_awq_and_the_same_bytes_again(storage: str, name: str, tmp_path: Path) -> None:
    """The index of columns in order, which AWQ has not, is written again."""
    packed = int_group.convert(weight(), storage)
    index = {"up.g_idx": torch.arange(64, dtype=torch.int32) // 32}
    path = folders.folder(tmp_path / "in", folders.named({"up": packed}) | index,
                          config={"quantization_config": {**folders.GPTQ, "checkpoint_format": name}})
    convert(path, tmp_path / "awq", "awq")
    convert(tmp_path / "awq", tmp_path / "again", storage)
    with Folder(path) as one, Folder(tmp_path / "again") as other:
        assert set(one.names()) == set(other.names())
        assert all(same_bits(one.tensor(name), other.tensor(name)) for name in one.names())


def test_an_index_that_nobody_filled_is_written_in_order(tmp_path: Path) -> None:
    """Some writers of GPTQ leave zeros where columns are in order; readers that allocate the index take what the file has."""
    packed = weight()
    named = folders.named({"up": packed}) | {"up.g_idx": torch.zeros(64, dtype=torch.int32)}
    path = folders.folder(tmp_path / "in", named)
    for to in ("awq", "gptq_v1"):
        convert(path, tmp_path / to, to)
        with Folder(tmp_path / to) as folder:
            (layer,) = layers(folder).layers
            assert ("g_idx" in layer.tensors) == (to == "gptq_v1")
            assert to == "awq" or folder.tensor("up.g_idx").equal(torch.arange(64, dtype=torch.int32) // 32)
            (converted,) = layer_weights.weights(folder, layer)
            assert same_bits(int_group.dequantize(converted), int_group.dequantize(packed))


def test_where_no_page_says_how_the_config_says_qdsl(tmp_path: Path) -> None:
    """Two storages of one format are in no producer's words."""
    weights = {"up": weight(), "other": int8_channel.quantize(torch.randn(8, 64))}
    path = folders.folder(tmp_path / "in", folders.named(weights))
    report = convert(path, tmp_path / "out", "int_group.awq")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written == {"quant_method": "qdsl", "quantized_layers": {
        "up": {"format": "int_group", "storage": "awq", **weights["up"].params},
        "other": {"format": "int8_channel", "storage": "safetensors", **weights["other"].params}}}
    with Folder(tmp_path / "out") as folder:
        assert all(layer.problems == () and layer.why == "" for layer in layers(folder).layers)
    assert "layers differ in format: the config says qdsl" in report["notes"]
    with Folder(tmp_path / "out") as folder:
        assert [(layer.format, layer.problems) for layer in layers(folder).layers] == [("int_group", ()), ("int8_channel", ())]


def test_our_own_settings_say_what_is_not_quantized(tmp_path: Path) -> None:
    """A plain layer among others of its kind is none that was forgotten; why no producer's words are taken is noted."""
    every = folders.named({"layers.0.up": weight(), "layers.1.up": weight()}) | {"layers.2.up.weight": torch.zeros(32, 64)}
    config = {"quantization_config": {**folders.GPTQ, "modules_in_block_to_quantize": [["layers.0.up", "layers.1.up"]]}}
    path = folders.folder(tmp_path / "in", every, config=config)
    convert(path, tmp_path / "out", "xpu_int4pack")
    with Folder(tmp_path / "out") as folder:
        assert folder.config["quantization_config"]["modules_to_not_convert"] == ["layers.2.up"]
        detected = layers(folder)
    assert [left.problem for left in detected.left] == [""] and detected.problems == []
    several = {str(group): int_group.quantize(torch.randn(32, 128), "gptq_v2", bits=4, group=group) for group in (32, 64)}
    path = folders.folder(tmp_path / "in2", folders.named(several))
    assert "layers differ in parameters: the config says qdsl" in convert(path, tmp_path / "out2", "awq")["notes"]


@pytest.mark.parametrize("place", ["twice", "file", "header", "header and config", "file of weights"])
def test_settings_are_renewed_wherever_they_lie(tmp_path: Path, place: str) -> None:
    """None says what the weights were, wherever a reader may look; without other zeros the numbers would be wrong."""
    packed = weight()
    settings = {**folders.GPTQ, "sym": False}
    configs = {"twice": {"quantization_config": settings, "text_config": {"quantization_config": settings}},
               "file of weights": {"quantization_config": settings}}
    path = folders.folder(tmp_path / "in", folders.named({"up": packed}), config=configs.get(place, {"a": 1}), index=False)
    if place == "file":
        (path / "quantize_config.json").write_text(json.dumps(settings))
    if "header" in place:
        write(path / "model.safetensors", folders.named({"up": packed}), {"quantization_config": json.dumps(settings)})
    if place in ("file", "header"):
        (path / "config.json").unlink()
    convert(path / "model.safetensors" if place == "file of weights" else path, tmp_path / "out", "gptq_v1")
    with Folder(tmp_path / "out") as folder:
        detected = layers(folder)
        [layer] = detected.layers
        assert (layer.storage, layer.problems, detected.problems) == ("gptq_v1", (), [])
        assert {quantization.settings["checkpoint_format"] for quantization in detected.quantizations} == {"gptq"}
        assert same_bits(int_group.dequantize(layer_weights.weights(folder, layer)[0]), int_group.dequantize(packed))


def test_a_place_of_one_producer_says_nothing_of_another(tmp_path: Path) -> None:
    """hf_quant_config.json is ModelOpt's, compression_config is of compressed-tensors; what is lost with them is noted."""
    packed = fp8_tensor.quantize(torch.randn(16, 64))
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    path = folders.folder(tmp_path / "in", folders.named({"up": packed}), config={"model_type": "toy"})
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    notes = convert(path, tmp_path / "out", "torchao")["notes"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
    assert "the settings do not say kv_cache_quant_algo any more" in notes
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                                                            "symmetric": False}, "input_activations": {"num_bits": 8}}}
    config = {"compression_config": {"format": "pack-quantized", "config_groups": groups}}
    path = folders.folder(tmp_path / "in2", folders.named({"up": weight(storage="pack_quantized")}), config=config)
    notes = convert(path, tmp_path / "out2", "gptq_v2")["notes"]
    written = json.loads((tmp_path / "out2" / "config.json").read_text())
    assert "compression_config" not in written and written["quantization_config"]["quant_method"] == "gptq"
    assert "the settings do not say input_activations any more" in notes


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_gptq_says_of_what_is_quantized_anew(tmp_path: Path, symmetric: bool) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": fp8_block.quantize(torch.randn(128, 128))}), config={})
    with Folder(path) as folder:
        aim = target.parse_conversion("int_group.gptq_v2", True, {"symmetric": symmetric})
        run.convert(folder, layers(folder), aim, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["desc_act"], written["sym"]) == (False, symmetric)


def test_plain_floats_have_no_settings(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}))
    with Folder(path) as folder:
        run.convert(folder, layers(folder), target.parse_conversion("bf16", True), tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        assert layers(folder).problems == [] and folder.config == {"model_type": "toy", "architectures": ["Toy"]}


@pytest.mark.parametrize("bits", [3, 6])
def test_sizes_that_no_word_divides(tmp_path: Path, bits: int) -> None:
    """In old words of compressed-tensors, of which its config says the same, and back; one group is that of a channel."""
    packed = int_group.quantize(torch.randn(45, 90), "pack_quantized", bits=bits, group=-1)
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": False}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": settings})
    convert(path, tmp_path / "old", "pack_quantized_0_17")
    convert(tmp_path / "old", tmp_path / "new", "pack_quantized")
    for name, storage in (("old", "pack_quantized_0_17"), ("new", "pack_quantized")):
        with Folder(tmp_path / name) as folder:
            [layer] = layers(folder).layers
            assert (layer.storage, layer.params["bits"], layer.params["group"], layer.problems) == (storage, bits, -1, ())
            assert folder.config["quantization_config"] == settings
            assert name == "old" or all(folder.tensor(f"w.{key}").equal(tensor) for key, tensor in packed.tensors.items())
    assert "cannot be gptq_v2" in refused(path, "gptq_v2") or bits == 6


def test_own_settings_are_read(tmp_path: Path) -> None:
    """Those of a storage that no producer has words for; they speak of its format alone."""
    path = folders.folder(tmp_path / "in", folders.named({"w": weight(16, 96)}))
    convert(path, tmp_path / "out", "xpu_int4pack")
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert folder.config["quantization_config"]["quant_method"] == "qdsl"
        assert (layer.storage, layer.params["group"], layer.problems) == ("xpu_int4pack", 32, ())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["group"] = 64
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with Folder(tmp_path / "out") as folder:
        [problem] = detected_layers(folder).layers[0].contradictions
        assert problem.startswith("config.json: quantization_config says group = 64; the tensors fit int_group.xpu_int4pack")
