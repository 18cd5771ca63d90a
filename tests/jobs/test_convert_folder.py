"""Folders in another storage: the same numbers, the same bytes however the work is cut, and no part taken for the whole."""

from __future__ import annotations

import json
import math
import os
import shutil
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner, Result

import qdsl
from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.cli import app
from qdsl.generated import fp8_block, fp8_tensor, int8_channel, int8_tensor, int_group
from qdsl.host.files import OutputError
from qdsl.jobs.convert import aim, plan, run
from qdsl.jobs.convert.run import merge
from qdsl.jobs.engine import RewriteError, stage, work
from qdsl.jobs.engine.shards import share
from qdsl.jobs.gguf.quality import Sums, measured
from qdsl.runtime import PackedWeight
from tests.support import folders
from tests.support.formats import same_bits

TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weight(n: int = 16, k: int = 64, storage: str = "gptq_v2", seed: int = 0) -> PackedWeight:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return int_group.quantize(values, storage, bits=4, group=32)


@pytest.fixture
def weights() -> dict[str, PackedWeight]:
    return {"model.up": weight(), "model.down": weight(seed=1)}


@pytest.fixture
def sharded(tmp_path: Path, weights: dict[str, PackedWeight]) -> Path:
    """Two layers; the scales of both, and a tensor that is no weight, in another file."""
    every = folders.named(weights)
    first = {name: tensor for name, tensor in every.items() if "scales" not in name}
    return folders.folder(tmp_path / "in", {**first, "model.norm": torch.arange(5.0)},
                          {**{name: every[name] for name in every if name not in first}, "head": torch.ones(2, 3).bfloat16()})


def convert(path: Path, out: Path, to: str = "awq", **options: Any) -> dict[str, Any]:
    with Folder(path) as folder:
        return run.convert(folder, layers(folder), aim.aimed(to), out, **options)


def refused(path: Path, to: str, **options: Any) -> str:
    """The message; and nothing is written."""
    out = path.parent / "refused"
    with pytest.raises(RewriteError) as error:
        convert(path, out, to, **options)
    assert not out.exists()
    return str(error.value)


# What is written


def test_layers_change_and_all_else_stays(sharded: Path, weights: dict[str, PackedWeight], tmp_path: Path) -> None:
    report = convert(sharded, tmp_path / "out")
    awq = folders.named({name: int_group.convert(packed, "awq") for name, packed in weights.items()})
    with Folder(tmp_path / "out") as folder, Folder(sharded) as old:
        assert set(folder.names()) == {*awq, "model.norm", "head"}
        for name, tensor in awq.items():
            assert folder.tensor(name).equal(tensor) and folder.tensor(name).dtype == tensor.dtype
            assert folder.file(name).path.name == TWO[0]         # where the largest of the layer's tensors was
        for name in ("model.norm", "head"):
            assert folder.tensor(name).equal(old.tensor(name))
            assert folder.file(name).path.name == old.file(name).path.name
        assert folder.file("head").header.metadata == {"format": "pt"}
        assert folder.index["metadata"] == {"total_parameters": 7,
                                            "total_size": sum(folder.entry(name).nbytes for name in folder.names())}
    with safe_open(tmp_path / "out" / TWO[0], "pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in awq.items())
    assert (tmp_path / "out" / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", *TWO, INDEX, checksums.FILE, "tokenizer"]
    assert report["notes"] == ["pytorch_model.bin holds other weights, and was not copied"]
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "int_group.awq", "count": 2}]
    assert report["shards"] == list(TWO)


def test_private_files_are_not_copied(sharded: Path, tmp_path: Path) -> None:
    """A link out of the folder or a hidden file may be a key; blobs of the hub and links inside of the folder are copied."""
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("cached")
    (tmp_path / "id_rsa").write_text("key")
    (sharded / ".env").write_text("token")
    for name, target in {"notes.txt": tmp_path / "id_rsa", "readme.md": blobs / "0123",
                         "words.txt": sharded / "tokenizer" / "vocab.txt"}.items():
        (sharded / name).symlink_to(target)
    report = convert(sharded, tmp_path / "out")
    written = folders.files(tmp_path / "out")
    assert (written["readme.md"], written["words.txt"]) == (b"cached", b"a\nb\n")
    assert report["notes"] == ["pytorch_model.bin holds other weights, and was not copied",
                               ".env is hidden or a link out of the folder, and was not copied",
                               "notes.txt is hidden or a link out of the folder, and was not copied"]
    assert not written.keys() & {".env", "notes.txt"}


def experts(count: int = 3) -> dict[str, torch.Tensor]:
    """Tensors of GPTQ layers one after the other."""
    packed_experts = [weight(seed=seed) for seed in range(count)]
    return {f"w.{name}": torch.stack([packed.tensors[name] for packed in packed_experts]) for name in packed_experts[0].tensors}


def test_experts_one_after_the_other(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", {**experts(), "w.bias": torch.ones(3, 16)})
    convert(path, tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        for expert in range(3):
            for name, tensor in int_group.convert(weight(seed=expert), "awq").tensors.items():
                assert folder.tensor(f"w.{name}")[expert].equal(tensor)
        assert folder.tensor("w.bias").equal(torch.ones(3, 16))
        assert layers(folder).layers[0].experts == 3


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


@pytest.mark.parametrize(("options", "says"), [
    ({"symmetric": True}, {"strategy": "group", "num_bits": 4, "group_size": 32, "symmetric": True}),
    ({}, {"strategy": "group", "num_bits": 4, "group_size": 32, "symmetric": False}),
    ({"group": -1, "symmetric": True}, {"strategy": "channel", "num_bits": 4, "symmetric": True})])
def test_compressed_tensors_says_what_follows_from_tensors(tmp_path: Path, options: dict[str, Any], says: dict[str, Any]) -> None:
    torch.manual_seed(0)
    packed = int_group.quantize(torch.randn(16, 256), "gptq_v2", **{"group": 32, **options})
    settings = {**folders.GPTQ, "group_size": packed.params["group"]}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": settings})
    convert(path, tmp_path / "out", "pack_quantized")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["format"], written["ignore"]) == ("compressed-tensors", "pack-quantized", [])
    assert written["config_groups"]["group_0"]["weights"] == says
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.storage, layer.params["group"], layer.problems) == ("pack_quantized", packed.params["group"], ())


def group_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a folder's config says, and its one group of weights."""
    written = json.loads((path / "config.json").read_text())["quantization_config"]
    [group] = written["config_groups"].values()
    return written, group


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("module", [int8_channel, int8_tensor])
def test_bytes_with_zero_points_are_not_symmetric(tmp_path: Path, module: ModuleType, zeros: bool) -> None:
    """Their readers take weights for symmetric where nothing is said, and then leave zero points out."""
    fields = module.unpack(module.quantize(torch.randn(16, 64), "torchao"))
    if zeros:
        fields["z"] = torch.full_like(fields["s"], 3, dtype=torch.int8)
    packed = module.pack(fields, "torchao", scale_type="bf16")
    settings = {"quant_method": "qdsl", "format": module.SPEC.name, "storage": "torchao", **packed.params}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": settings})
    convert(path, tmp_path / "out", "safetensors")
    _, group = group_of(tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.problems, "weight_zero_point" in layer.tensors) == ((), zeros)
    assert group["weights"]["symmetric"] is not zeros


@pytest.mark.parametrize(("to", "says"), [
    ("nvfp4_ct", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}),
    *((f"ocp_mxfp{bits}", {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})
      for bits in (4, 6, 8))])
def test_compressed_tensors_is_told_of_small_floats(tmp_path: Path, to: str, says: dict[str, Any]) -> None:
    """Though the format's word says as much.  A number of the whole weight is a list of one there."""
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}))
    requantized(path, tmp_path / "out", f"{to}.compressed_tensors")
    written, group = group_of(tmp_path / "out")
    assert group["weights"] == {"type": "float", "symmetric": True, "dynamic": False, **says}
    assert group["format"] == written["format"]
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.format, layer.storage, layer.problems) == (to, "compressed_tensors", ())
        assert all(folder.entry(full).shape == (1,) for full in layer.tensors.values() if "global" in full)


@pytest.mark.parametrize(("to", "code"), [("ocp_mxfp6", "e3m2"), ("ocp_mxfp8", "e5m2")])
def test_floats_that_others_would_take_for_other_ones(tmp_path: Path, to: str, code: str) -> None:
    """Those with more exponent: compressed-tensors and its readers have the other of 6 and of 8 bits alone."""
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}))
    requantized(path, tmp_path / "out", f"{to}.compressed_tensors", {"code": code})
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["code"]) == ("qdsl", code)


@pytest.mark.parametrize(("to", "format", "says"), [
    ("int8_channel", "int-quantized", {"type": "int", "strategy": "channel", "symmetric": True}),
    ("int8_tensor", "int-quantized", {"type": "int", "strategy": "tensor", "symmetric": True}),
    ("fp8_channel", "float-quantized", {"type": "float", "strategy": "channel"}),
    ("fp8_tensor", "float-quantized", {"type": "float", "strategy": "tensor"})])
def test_compressed_tensors_is_told_how_bytes_are_stored(tmp_path: Path, to: str, format: str, says: dict[str, Any]) -> None:
    """Its readers would guess, and take bytes for packed words."""
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}))
    requantized(path, tmp_path / "out", to)
    written, group = group_of(tmp_path / "out")
    assert (written["format"], group["format"], group["weights"]) == (format, format, {"num_bits": 8, **says})
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert group["input_activations"] == (inputs if says["type"] == "int" else None)         # vLLM has no W8A16 of such bytes


@pytest.mark.parametrize(("group", "says"), [(32, {"strategy": "group", "group_size": 32}), (-1, {"strategy": "channel"})])
@pytest.mark.parametrize("own", [True, False])
def test_bytes_of_compressed_tensors(tmp_path: Path, group: int, says: dict[str, Any], own: bool) -> None:
    """From its packed words, where groups may say the format anew, and from another producer.  A whole row is a channel."""
    packed = int_group.quantize(torch.randn(16, 64), "pack_quantized" if own else "gptq_v2", bits=8, group=group)
    weights = {"num_bits": 8, "type": "int", "symmetric": False, **says}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}}
    source_settings = settings if own else {**folders.GPTQ, "bits": 8, "group_size": group}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": source_settings})
    convert(path, tmp_path / "out", "int_quantized")
    written, inside = group_of(tmp_path / "out")
    assert (written["format"], inside["format"], inside["weights"]) == ("int-quantized", "int-quantized", weights)
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        [converted] = layer_weights.weights(folder, layer)
        assert layer.problems == () and same_bits(converted.format.dequantize(converted), int_group.dequantize(packed))
        assert layer.format == ("int_group" if group == 32 else "int8_channel")
    if group == 32:
        convert(tmp_path / "out", tmp_path / "back", "pack_quantized")
        assert group_of(tmp_path / "back")[0] == (settings if own else {**written, "format": "pack-quantized", "config_groups": {
            "group_0": {**inside, "format": "pack-quantized"}}})


def test_groups_of_several_kinds_keep_what_they_say_of_weights(tmp_path: Path) -> None:
    """Rows in one group beside rows in several.  Where none said the format some readers would guess the new one."""
    packed = {str(group): int_group.quantize(torch.randn(16, 64), "pack_quantized", bits=8, group=group) for group in (-1, 32)}
    weights = {"num_bits": 8, "type": "int", "symmetric": False}
    groups = {"rows": {"targets": ["re:.*-1$"], "weights": {**weights, "strategy": "channel"}},
              "groups": {"targets": ["re:.*32$"], "weights": {**weights, "strategy": "group", "group_size": 32}}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    path = folders.folder(tmp_path / "in", folders.named(packed), config={"quantization_config": settings})
    convert(path, tmp_path / "out", "int_quantized")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    expected = {name: {**group, "format": "int-quantized"} for name, group in groups.items()}
    assert written == {**settings, "format": "int-quantized", "config_groups": expected}
    with Folder(tmp_path / "out") as folder:
        assert [layer.problems for layer in layers(folder).layers] == [(), ()]


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized", None])
def test_old_configs_of_bytes_may_say_no_format(tmp_path: Path, format: str | None) -> None:
    packed = int8_channel.quantize(torch.randn(16, 64), scale_type="bf16")
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups, **({"format": format} if format else {})}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": settings})
    with Folder(path) as folder:
        [layer] = layers(folder).layers
        assert (layer.format, layer.problems) == ("int8_channel", ())


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_a_scale_is_called_as_its_loader_calls_it(tmp_path: Path, scale: str) -> None:
    """Of those of `fp8` some have the one name and some the other: both are read, and compressed-tensors' is what is written."""
    packed = fp8_tensor.quantize(torch.randn(16, 64))
    tensors = {"w.weight": packed.tensors["weight"], f"w.{scale}": packed.tensors["weight_scale"]}
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path = folders.folder(tmp_path / "in", tensors, config={"quantization_config": settings})
    with Folder(path) as folder:
        assert [(layer.format, layer.problems) for layer in layers(folder).layers] == [("fp8_tensor", ())]
    convert(path, tmp_path / "torchao", "torchao")
    convert(tmp_path / "torchao", tmp_path / "out", "safetensors")
    with Folder(tmp_path / "out") as folder:
        assert {*folder.names()} == {"w.weight", "w.weight_scale"}
        assert folder.tensor("w.weight_scale").equal(packed.tensors["weight_scale"].view(1))
        assert layers(folder).layers[0].problems == ()
    written, group = group_of(tmp_path / "out")
    assert (written["quant_method"], written["format"], group["weights"]["strategy"]) == (
        "compressed-tensors", "float-quantized", "tensor")


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_old_storage_must_have_are_said(tmp_path: Path, bits: int) -> None:
    """Symmetric codes get them there; they stay when others are packed again."""
    packed = int_group.quantize(torch.randn(16, 64), "pack_quantized", bits=bits, group=32, symmetric=True)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}}}
    path = folders.folder(tmp_path / "in", folders.named({"w": packed}), config={"quantization_config": settings})
    for to, symmetric in (("pack_quantized_0_8", False), ("pack_quantized", True)):
        convert(path, tmp_path / to, to)
        path = tmp_path / to
        with Folder(path) as folder:
            [layer] = layers(folder).layers
            assert (layer.storage, layer.problems) == (to, ())
            assert ("weight_zero_point" in layer.tensors) is not symmetric
        assert group_of(path)[1]["weights"] == {**weights, "symmetric": symmetric}


def test_columns_that_are_stored_in_order_leave_no_index(tmp_path: Path) -> None:
    """Though a tensor says the order: what is planned is what is written."""
    packed = int_group.quantize(torch.randn(64, 256), "xpu_int4pack", group=32, symmetric=True)
    tensors = folders.named({"w": packed}) | {"w.ret_idx": torch.arange(256, dtype=torch.int32)}
    settings = {"quant_method": "qdsl", "format": "int_group", "storage": "xpu_int4pack", **packed.params}
    path = folders.folder(tmp_path / "in", tensors, config={"quantization_config": settings})
    convert(path, tmp_path / "out", "pack_quantized")
    with Folder(tmp_path / "out") as folder:
        assert set(folder.names()) == {"w.weight_packed", "w.weight_scale", "w.weight_shape"}


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_old_compressed_tensors(tmp_path: Path, bits: int) -> None:
    """Bytes [N, G] with a sign, from the middle, beside packed codes."""
    packed = int_group.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) + 1, "pack_quantized", bits=bits,
                                group=32)
    zeros = int_group.unpack(packed)["z"].int() - 2 ** (bits - 1)
    assert zeros.unique().numel() > 2
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32,
                                           "symmetric": False}}}}
    path = folders.folder(tmp_path / "in", folders.named({"up": packed}) | {"up.weight_zero_point": zeros.to(torch.int8)},
                          config={"quantization_config": settings})
    with Folder(path) as folder:
        detected = layers(folder)
        (layer,) = detected.layers
        assert (layer.storage, detected.problems) == ("pack_quantized_0_8", [])
    convert(path, tmp_path / "out", "gptq_v2")
    with Folder(tmp_path / "out") as folder:
        (weights_,) = layer_weights.weights(folder, layers(folder).layers[0])
        assert same_bits(int_group.dequantize(weights_), int_group.dequantize(packed))


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
        run.convert(folder, layers(folder), aim.aimed("int_group.gptq_v2", True, {"symmetric": symmetric}), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["desc_act"], written["sym"]) == (False, symmetric)


def test_plain_floats_have_no_settings(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}))
    with Folder(path) as folder:
        run.convert(folder, layers(folder), aim.aimed("bf16", True), tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        assert layers(folder).problems == [] and folder.config == {"model_type": "toy"}


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
        [problem] = layers(folder).layers[0].problems
        assert problem.startswith("config.json: quantization_config says group = 64; the tensors fit int_group.xpu_int4pack")


def test_there_and_back_again(sharded: Path, tmp_path: Path) -> None:
    """Every tensor as it was, the index of columns too, which AWQ does not store."""
    convert(sharded, tmp_path / "awq")
    convert(tmp_path / "awq", tmp_path / "back", "gptq_v2")
    with Folder(sharded) as old, Folder(tmp_path / "back") as new:
        assert sorted(old.names()) == sorted(new.names())
        assert all(new.tensor(name).equal(old.tensor(name)) for name in new.names())


def test_a_file_without_an_index(tmp_path: Path, weights: dict[str, PackedWeight]) -> None:
    path = folders.folder(tmp_path / "in", folders.named(weights), index=False)
    convert(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", checksums.FILE, "tokenizer"]
    convert(path / "model.safetensors", tmp_path / "alone")
    assert sorted(os.listdir(tmp_path / "alone")) == ["config.json", "model.safetensors", checksums.FILE]
    assert (tmp_path / "alone" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_an_index_keeps_its_name(tmp_path: Path, weights: dict[str, PackedWeight]) -> None:
    """Models of diffusers have another."""
    name = "diffusion_pytorch_model.safetensors.index.json"
    path = folders.folder(tmp_path / "in", *[folders.named({key: packed}) for key, packed in weights.items()])
    (path / INDEX).rename(path / name)
    assert convert(path, tmp_path / "out")["notes"] == ["pytorch_model.bin holds other weights, and was not copied"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", name, *TWO, checksums.FILE, "tokenizer"]


def test_a_file_that_is_left_without_tensors_is_not_written(tmp_path: Path) -> None:
    weights = {"w": weight()}
    every = folders.named(weights)
    path = folders.folder(tmp_path / "in", {"w.scales": every.pop("w.scales")}, every)
    convert(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", TWO[1], INDEX, checksums.FILE, "tokenizer"]
    assert set(Folder(tmp_path / "out").names()) == {"w.qweight", "w.qzeros", "w.scales"}


def test_layers_of_one_format_alone(tmp_path: Path) -> None:
    other = int8_channel.quantize(torch.randn(8, 64))
    weights = {"up": weight(), "down": weight(storage="awq"), "other": other}
    path = folders.folder(tmp_path / "in", folders.named(weights))
    assert "layer 'other': int8_channel.safetensors cannot be awq: int8_channel has no" in refused(path, "awq")
    report = convert(path, tmp_path / "out", "int_group.awq")
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "int_group.awq", "count": 1}]
    assert report["layers_kept"] == 2
    with Folder(tmp_path / "out") as folder:
        assert folder.tensor("other.weight").equal(other.tensors["weight"])
        assert "no layer of format q4_0" in refused(path, "q4_0.gguf")


# What is refused


def test_what_would_change_numbers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """All that is wrong at once: an order of columns that AWQ cannot say, rows that its words cannot hold, another width."""
    fields = int_group.unpack(weight())
    order = int_group.pack({**fields, "g": torch.arange(64, dtype=torch.int32) % 2}, "gptq_v2", bits=4, group=32)
    weights = {"order": order, "wide": int_group.quantize(torch.randn(8, 64), "gptq_v2", bits=8, group=32), "fine": weight()}
    config = {"quantization_config": {**folders.GPTQ, "dynamic": {"wide": {"bits": 8}}}}
    path = folders.folder(tmp_path / "in", folders.named(weights), config=config)
    message = refused(path, "awq")
    assert "layer 'order': int_group.gptq_v2 cannot be awq: int_group.awq cannot hold 'g'" in message
    assert "layer 'wide': int_group.gptq_v2 cannot be awq: int_group has no storage 'awq' for bits=8" in message
    assert "fine" not in message


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = folders.named({"v": weight(), "w": weight()})
    path = folders.folder(tmp_path / "in", {**every, "norm": torch.ones(1)})
    monkeypatch.setattr(plan, "full_name", lambda *_: "norm")
    assert "layer 'v': there is a tensor 'norm' already" in refused(path, "awq")


def test_what_no_file_can_hold_is_refused_once(tmp_path: Path) -> None:
    """A storage that is made when a checkpoint is loaded, and none at all: layers that are alike are one line."""
    path = folders.folder(tmp_path / "in", folders.named({f"w{i}": weight() for i in range(9)}))
    loaded, advice = refused(path, "planar").splitlines()
    assert loaded.endswith("layer 'w0' and 8 more: int_group.gptq_v2 cannot be planar: it is made when a checkpoint is loaded")
    assert "--requantize FORMAT" in advice
    assert "cannot be marlin2: int_group has no such storage; it has gptq_v2, gptq_v1, awq," in refused(path, "marlin2")


def test_of_many_problems_some_are_told(tmp_path: Path) -> None:
    """Last groups that are short, which AWQ has none of, of another number of columns in each layer."""
    path = folders.folder(tmp_path / "in", folders.named({f"w{i}": weight(k=32 * i + 40) for i in range(10)}))
    message = refused(path, "awq").splitlines()
    assert len(message) == 10 and message[-2] == "... and 2 layers more" and "--requantize FORMAT" in message[-1]


def test_what_is_not_recognised_is_refused(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}), config={})
    assert "layer 'w': the tensors fit int_group.gptq_v2 and int_group.gptq_v1, and nothing says which" in refused(path, "awq")
    other = folders.folder(tmp_path / "other", {"w.weight": torch.ones(3, 4)}, config={})
    assert "no quantized layer" in refused(other, "awq")


def test_places_that_cannot_be_written(sharded: Path, tmp_path: Path) -> None:
    assert "the output is the input" in refused_at(sharded, sharded)
    assert "is an input" in refused_at(sharded, sharded / "tokenizer" / "out")
    convert(sharded, tmp_path / "out")
    before = folders.files(tmp_path / "out")
    assert "exists already" in refused_at(sharded, tmp_path / "out")
    assert folders.files(tmp_path / "out") == before
    with pytest.raises(RewriteError, match="no work was begun here, or it is complete"):
        merge(tmp_path / "out")


def refused_at(path: Path, out: Path) -> str:
    with pytest.raises((RewriteError, OutputError)) as error:
        convert(path, out)
    return str(error.value)


def test_a_full_disk_is_said_before_the_work(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was reserved is given back."""
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / 'out'}/"):
        convert(sharded, tmp_path / "out")
    assert not [name for name in folders.files(tmp_path / "out") if "part" in name or "safetensors" in name]
    monkeypatch.undo()
    convert(sharded, tmp_path / "out")
    assert len(Folder(tmp_path / "out").names()) == 8


# Other numbers


def requantized(path: Path, out: Path, to: str, params: dict[str, int | str] | None = None, **options: Any) -> dict[str, Any]:
    with Folder(path) as folder:
        return run.convert(folder, layers(folder), aim.aimed(to, True, params), out, **options)


def test_requantized_layers(tmp_path: Path) -> None:
    """Of every format, of what they stand for; with what that cost, the config that belongs to it, and all else as it was."""
    weights = {"up": weight(), "down": weight(seed=1)}
    path = folders.folder(tmp_path / "in", {**folders.named(weights), "head.weight": torch.ones(2, 3)})
    report = requantized(path, tmp_path / "out", "fp8_block", {"bn": 32, "bk": 32})
    costs = []
    with Folder(tmp_path / "out") as folder:
        for name, quantized in weights.items():
            dense = int_group.dequantize(quantized, torch.float32)
            packed = fp8_block.quantize(dense, bn=32, bk=32)
            assert all(folder.tensor(f"{name}.{key}").equal(tensor) for key, tensor in packed.tensors.items())
            costs.append(measured(dense, fp8_block.dequantize(packed, torch.float32)))
            assert report["requantized"][name] == costs[-1].data()
        assert len(folder.names()) == 5 and folder.tensor("head.weight").equal(torch.ones(2, 3))
        assert [(layer.format, layer.params["bn"], layer.problems) for layer in layers(folder).layers] == [
            ("fp8_block", 32, ())] * 2
        settings = folder.config["quantization_config"]
        assert settings == {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic",
                            "modules_to_not_convert": ["head"]}
    assert report["snr_db"] == pytest.approx(sum(costs, Sums()).data()["snr_db"])
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "fp8_block.safetensors", "count": 2}]


@pytest.mark.parametrize(("name", "more"), [("nf4", {}), ("bnb_fp4_nested", {
    "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": None})])
def test_small_tensors_that_a_producer_puts_beside_a_weight(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    """JSON of what is known, and tables; under the names that files have, and with a config that says whose they are."""
    kind = name[4:7] if "fp4" in name else name
    config = {**({"dtype": "float16"} if more else {}), "quantization_config": folders.GPTQ}
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}) | {"head.weight": torch.ones(2, 3)}, config=config)
    requantized(path, tmp_path / "out", name, {"block": 32})
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        packed = import_module(f"qdsl.generated.{name}").quantize(int_group.dequantize(weight(), torch.float32), block=32)
        quant_state = json.loads(bytes(folder.tensor(f"up.weight.quant_state.bitsandbytes__{kind}").tolist()))
        assert list(quant_state) == ["quant_type", "blocksize", "dtype", "shape", *more]
        nested = {"nested_offset": float(packed.tensors["weight_nested_offset"])} if more else {}
        assert quant_state == {"quant_type": kind, "blocksize": 32, "dtype": config.get("dtype", "bfloat16"), "shape": [16, 64],
                               **more, **nested}
        leaves = ["weight", "weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{kind}"]
        leaves += ["weight.nested_absmax", "weight.nested_quant_map"] if more else []
        assert {leaf.removeprefix("up.") for leaf in folder.names()} == {*leaves, "head.weight"}
        assert folder.tensor("up.weight.absmax").equal(packed.tensors["weight_absmax"])
        [again] = layer_weights.weights(folder, layer)
        assert all(same_bits(again.tensors[key], tensor) for key, tensor in packed.tensors.items())
        assert folder.config["quantization_config"] == {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": bool(more), "llm_int8_skip_modules": ["head"]}
        assert layer.problems == () and not layer.others


def test_int8_of_bitsandbytes_has_the_config_that_it_loads(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}) | {"head.weight": torch.ones(2, 3)})
    requantized(path, tmp_path / "out", "bnb_int8", {})
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.format, layer.problems) == ("bnb_int8", ())
        assert set(folder.names()) == {"up.weight", "up.SCB", "head.weight"}
        assert folder.config["quantization_config"] == {"quant_method": "bitsandbytes", "load_in_8bit": True,
                                                        "llm_int8_skip_modules": ["head"]}


def test_requantized_in_parts(tmp_path: Path) -> None:
    """Their costs are kept until all is there; layers that have the format and its parameters change exactly, or not at all."""
    weights = {"up": weight(), "wide": int_group.quantize(torch.randn(8, 64), "gptq_v2", bits=8, group=32)}
    config = {"quantization_config": {**folders.GPTQ, "dynamic": {"wide": {"bits": 8}}}}
    every = folders.named(weights)
    shards = [{key: tensor for key, tensor in every.items() if key.startswith(name)} for name in weights]
    path = folders.folder(tmp_path / "in", *shards, config=config)
    options = {"bits": 4, "group": 32}
    requantized(path, tmp_path / "out", "int_group.gptq_v1", options, part=(1, 2))
    requantized(path, tmp_path / "out", "int_group.gptq_v1", options, part=(2, 2))
    report = merge(tmp_path / "out")
    assert list(report["requantized"]) == ["wide"] and 10 < report["snr_db"] < 40
    with Folder(tmp_path / "out") as folder:
        exact = int_group.convert(weights["up"], "gptq_v1")
        assert all(folder.tensor(f"up.{key}").equal(tensor) for key, tensor in exact.tensors.items())
        assert folder.entry("wide.qweight").shape == (8, 8)


def test_what_cannot_be_requantized(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}))
    for to, bits, message in (("nope", 4, "no format 'nope'"), ("int_group", 9, "bits is one of"),
                              ("int_group.nope", 8, "no storage 'nope'"), ("int_group.planar", 8, "when a checkpoint is loaded")):
        with pytest.raises(RewriteError, match=message):
            requantized(path, tmp_path / "out", to, {"bits": bits})
    with pytest.raises(RewriteError, match="cannot be cpu_avx2: it is made when a checkpoint is loaded"):
        requantized(path, tmp_path / "out", "int4pack.cpu_avx2", {})
    assert not (tmp_path / "out").exists()


# However it is cut


def test_bytes_do_not_depend_on_processes_or_parts(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "one")
    convert(sharded, tmp_path / "jobs", jobs=2)
    layers = []
    for part in ((2, 3), (1, 3)):
        assert not (tmp_path / "parts" / INDEX).exists()
        layers += convert(sharded, tmp_path / "parts", part=part)["layers"]
        if part == (2, 3):
            with pytest.raises(RewriteError, match=f"1 of 2 shards are not there, .*: {TWO[0]}"):
                merge(tmp_path / "parts")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        Folder(tmp_path / "parts")
    assert [layer["count"] for layer in merge(tmp_path / "parts")["layers"]] == [2] == [sum(layer["count"] for layer in layers)]
    assert folders.files(tmp_path / "one") == folders.files(tmp_path / "jobs") == folders.files(tmp_path / "parts")


def test_parts_are_of_about_the_same_size() -> None:
    shards = [type("S", (), {"name": str(size), "size": size})() for size in (3, 9, 4, 2, 8)]
    parts = [[shard.size for shard in share(shards, place, 2)] for place in (1, 2)]
    assert parts == [[3, 9, 2], [4, 8]]
    assert [share(shards[:1], place, 2) for place in (1, 2)] == [shards[:1], []]


def test_two_processes_do_not_write_one_shard(sharded: Path, tmp_path: Path) -> None:
    """Nor does one complete what another still writes; parts are written side by side, and what was begun is taken up."""
    convert(sharded, tmp_path / "one")
    out = tmp_path / "out"
    convert(sharded, out, part=(1, 2))
    with Folder(sharded) as folder:
        planned = plan.plan(folder, layers(folder), aim.Aim("", "awq"))
    room = next(stage.room(out / stage.STAGE, shard) for shard in planned.shards if not stage.is_whole(shard, out))
    room.mkdir()
    with stage.lock_folder(room), pytest.raises(RewriteError, match=rf"{room}: another process is writing here"):
        convert(sharded, out)
    with stage.lock_folder(out / stage.STAGE, shared=True):
        convert(sharded, out, part=(2, 2))
        with pytest.raises(RewriteError, match=rf"{out / stage.STAGE}: another process is writing here"):
            merge(out)
    assert not (out / INDEX).exists()
    before = [stage.place(shard, out).stat() for shard in planned.shards]
    work.write(planned.shards, out / stage.STAGE, 1, lambda done, name: None)                # planned before the other was done
    assert [stage.place(shard, out).stat() for shard in planned.shards] == before
    assert merge(out)["shards_written"] == 0
    gone = "does not exist any more; another process may have completed the work"
    with pytest.raises(RewriteError, match=gone), stage.lock_folder(out / stage.STAGE):
        pass
    assert folders.files(out) == folders.files(tmp_path / "one")


def test_only_what_is_missing_or_old_is_done_again(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert(sharded, out, part=(1, 1))["shards_written"] == 2
    assert convert(sharded, out, part=(1, 1))["shards_written"] == 0
    with pytest.raises(RewriteError, match="a conversion to awq was begun here"):
        convert(sharded, out, "gptq_v1")
    with Folder(sharded) as folder:
        head = folder.tensor("head").clone()
        scales = {name: folder.tensor(name).clone() for name in ("model.up.scales", "model.down.scales")}
    write(sharded / TWO[1], {"head": head + 1, **scales}, {"format": "pt"})
    with pytest.raises(RewriteError, match="2 of 2 shards are not there"):        # the first has the second's scales
        merge(out)
    assert convert(sharded, out)["shards_written"] == 2
    assert Folder(out).tensor("head").equal(head + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("index", [True, False])
def test_killed_at_any_moment(tmp_path: Path, index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader takes what is left for a checkpoint, and the next process makes the same bytes of it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    weights = {"w": weight()}
    every = folders.named(weights)
    parts = [every, {"norm": torch.ones(3)}] if index else [every]
    path = folders.folder(tmp_path / "in", *parts, index=index)
    step = 1 if index else 3
    assert step * len(list(folders.killed_everywhere(lambda out: convert(path, out), tmp_path, step))) > 20


def test_what_processes_left_is_removed(sharded: Path, tmp_path: Path) -> None:
    place = tmp_path / "out" / stage.STAGE / stage.SHARDS / TWO[0]
    place.mkdir(parents=True)
    (place / ".qdsl-0123.part").write_bytes(b"half")
    convert(sharded, tmp_path / "out")
    assert [name for name in folders.files(tmp_path / "out") if "qdsl" in name] == [checksums.FILE]


def test_a_note_of_a_stranger_is_refused(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / stage.STAGE).mkdir(parents=True)
    (tmp_path / "out" / stage.STAGE / stage.REQUEST).write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        convert(sharded, tmp_path / "out")
    asked = {"command": "convert", "work": "a conversion to awq", "format": "", "storage": "awq", "requantize": False,
             "params": {}}
    (tmp_path / "out" / stage.STAGE / stage.REQUEST).write_text(json.dumps(asked))
    convert(sharded, tmp_path / "out")


# The command


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_the_command_says_what_became_of_layers(sharded: Path, tmp_path: Path) -> None:
    result = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out", "--jobs", "1")
    size = sum((tmp_path / "out" / name).stat().st_size for name in TWO)
    assert (result.exit_code, result.stdout.splitlines()) == (0, [
        "note: pytorch_model.bin holds other weights, and was not copied", "2 layers from int_group.gptq_v2 to int_group.awq",
        "read by: qdsl, gptqmodel, vLLM", "not read by transformers: it asks gptqmodel to, where that is installed",
        f"written  {tmp_path / 'out'}: 2 files of tensors, {size} bytes"])
    again = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out")
    assert again.exit_code == 2 and "exists already, and no interrupted run left it; --force replaces" in again.stderr
    asked = ("--requantize", "fp8_block", "--param", "bn=32", "-o", tmp_path / "fp8", "-j", "1")
    result = command("convert", sharded, *asked, "--json")
    data = json.loads(result.stdout)
    assert data["schema"] == 1 and set(data["requantized"]) == {"model.up", "model.down"} and 20 < data["snr_db"] < 50
    worst = min(data["requantized"], key=lambda name: data["requantized"][name]["snr_db"])
    shutil.rmtree(tmp_path / "fp8")
    result = command("convert", sharded, *asked)
    assert f"signal to noise {data['snr_db']:.2f} dB, the least of '{worst}'" in result.stdout


@pytest.mark.parametrize(("to", "option", "expected"), [
    ("int_group", "symmetric=true", {"symmetric": True}), ("int_group", "symmetric=False", {"symmetric": False}),
    ("int_group", "span=FULL", "error: int_group: span is one of "),
    ("int_group", "symmetric=yes", "error: int_group: symmetric is one of True, False, not yes"),
    ("int_group", "bits=\u00b2", "error: int_group: bits is one of "), ("fp8_channel", "least=1e-3", {"least": 0.001}),
    ("fp8_channel", "least=nan", "error: fp8_channel: least is a positive number, not nan"),
    ("fp8_channel", "scale_type=f32", {"scale_type": "f32"}),
])
def test_parameters_are_numbers_words_and_truths(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str,
                                                 option: str, expected: dict[str, object] | str) -> None:
    aims: list[aim.Aim] = []
    monkeypatch.setattr(run, "convert", lambda source, detected, aim, out, **options: aims.append(aim) or {})
    monkeypatch.setattr("qdsl.cli.convert.print_converted", lambda *_: None)
    result = command("convert", sharded, "--requantize", to, "--param", option, "-o", tmp_path / "out")
    if isinstance(expected, str):
        assert result.exit_code == 2 and result.stderr.startswith(expected) and not aims
    else:
        assert result.exit_code == 0
        assert all(aims[0].params[key] == value and type(aims[0].params[key]) is type(value) for key, value in expected.items())


def test_parts_and_their_index_as_commands(sharded: Path, tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        result = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out", "--shard", part, "-j", "1")
        assert result.exit_code == 0 and f"written  part {part} of {tmp_path / 'out'}: 1 files of tensors" in result.stdout
    assert command("merge-index", tmp_path / "out").exit_code == 0
    assert len(Folder(tmp_path / "out").names()) == 8
    again = command("merge-index", tmp_path / "out")
    assert again.exit_code == 1 and "no work was begun here, or it is complete" in again.stderr


@pytest.mark.parametrize("arguments", [[], ["--to", "awq", "--requantize", "fp8_block"], ["--to", "awq", "--param", "bits=4"],
                                       *(["--to", "awq", "--shard", part] for part in ("0/2", "3/2", "1", "a/b", "1/-2", ""))])
def test_options_that_make_no_sense(sharded: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = command("convert", sharded, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and not (tmp_path / "out").exists()


# -- layers that stay, and what is told ------------------------------------------------------------------------------------


def awkward(path: Path) -> Path:
    """Two layers of which AWQ can hold one: the other's rows are no multiple of 8."""
    torch.manual_seed(0)
    weights = {"model.up": int_group.quantize(torch.randn(16, 256), "gptq_v2", group=64),
               "model.down": int_group.quantize(torch.randn(12, 256), "pack_quantized", group=64)}
    return folders.folder(path, folders.named(weights))


def test_one_awkward_layer_does_not_stop_a_folder(tmp_path: Path) -> None:
    """Its bytes stay what they were, and the report says why; without the option a message says the option."""
    path = awkward(tmp_path / "in")
    refused = command("convert", path, "--to", "awq", "-o", tmp_path / "out")
    assert refused.exit_code == 1 and "layer 'model.down'" in refused.stderr and "--keep-misfits leaves them" in refused.stderr
    asked = ("convert", path, "--to", "awq", "-o", tmp_path / "out", "--jobs", "1", "--json")
    report = json.loads(command(*asked, "--keep-misfits").stdout)
    assert list(report["left"]) == ["model.down"] and report["layers"][0]["count"] == 1
    with qdsl.open(path) as before, qdsl.open(tmp_path / "out") as after:
        storages = {name: layer.storage for name, layer in after.layers.items()}
        assert storages == {"model.up": "awq", "model.down": "pack_quantized"}
        for name in before.layers:
            assert same_bits(before.weight(name, dtype=torch.float32), after.weight(name, dtype=torch.float32))


def test_a_pattern_leaves_layers_as_they_are(tmp_path: Path) -> None:
    """Parts that are merged know it, too."""
    path = awkward(tmp_path / "in")
    asked = ("convert", path, "--requantize", "fp8_block", "--ignore", "down", "-o", tmp_path / "out", "-j", "1")
    assert command(*asked, "--shard", "1/1").exit_code == 0
    report = json.loads(command("merge-index", tmp_path / "out", "--json").stdout)
    assert report["left"] == {"model.down": "a pattern names it"} and report["readers"] == {"": "qdsl alone"}
    assert report["not_read_by"][""] == dict.fromkeys(["transformers", "vLLM"], "its own loaders know no settings of qdsl")
    with qdsl.open(tmp_path / "out") as after:
        formats = {name: layer.format for name, layer in after.layers.items()}
        assert formats == {"model.up": "fp8_block", "model.down": "int_group"}
    wrong = command("convert", path, "--to", "awq", "--ignore", "(", "-o", tmp_path / "out")
    assert wrong.exit_code == 2 and "--ignore '(' is no regular expression" in wrong.stderr


@pytest.mark.parametrize(("to", "params", "why"), [
    ("int_group.gptq_v2", {"symmetric": True, "bits": 3}, "gptq with bits 3"),
    ("ocp_mxfp4.modelopt", {}, "modelopt with quant_algo MXFP4"),
    ("ocp_mxfp6.compressed_tensors", {}, "compressed-tensors with format mxfp6-pack-quantized"),
    ("int_group.awq_gemv", {}, "awq with version gemv")])
def test_what_vllm_loads_no_more(to: str, params: dict[str, Any], why: str, tmp_path: Path) -> None:
    """The report names the setting, and the other readers."""
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", {"model.up.weight": torch.randn(64, 128).bfloat16()}, {})
    (tmp_path / "in" / "config.json").write_text("{}")
    report = run.quantize(tmp_path / "in", aim.aimed(to, True, params, ()), tmp_path / "out")
    assert report["not_read_by"][""]["vLLM"] == f"its loaders know no {why}"
    assert report["readers"][""].startswith("qdsl, ") and "vLLM" not in report["readers"][""]


def test_packed_words_of_compressed_tensors_are_symmetric_by_default(tmp_path: Path) -> None:
    """For its readers want no zero points; weights that are such already stay exact, and a parameter wins."""
    weights = {"model.up": fp8_block.quantize(torch.randn(16, 256))}
    path = folders.folder(tmp_path / "in", folders.named(weights))
    for params, names in (({}, False), ({"symmetric": False}, True)):
        requantized(path, tmp_path / f"out{names}", "int_group.pack_quantized", params)
        with Folder(tmp_path / f"out{names}") as folder:
            assert ("weight_zero_point" in layers(folder).layers[0].tensors) is names
    exact = awkward(tmp_path / "exact")
    report = requantized(exact, tmp_path / "same", "int_group.pack_quantized", {"group": 64})
    assert not report["requantized"] and qdsl.open(exact).weight("model.up", dtype=torch.float32).equal(
        qdsl.open(tmp_path / "same").weight("model.up", dtype=torch.float32))


def test_what_was_copied_and_is_stale_is_told(tmp_path: Path) -> None:
    """Scales of inputs, Mistral's own config, and settings that are of more than weights."""
    tensors = folders.named({"model.up": fp8_tensor.quantize(torch.randn(16, 256))}) | {"model.up.input_scale": torch.ones(1)}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "version": "0.12", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights}}, "kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {"a": 1}}
    path = folders.folder(tmp_path / "in", tensors, config={"quantization_config": settings})
    (path / "params.json").write_text(json.dumps({"dim": 256, "quantization": {"qformat_weight": "fp8_e4m3"}}))
    notes = requantized(path, tmp_path / "out", "int8_channel")["notes"]
    assert notes == ["the settings do not say kv_cache_scheme any more", "the settings do not say sparsity_config any more",
                     "the settings do not say version any more",
                     "1 tensors such as model.up.input_scale scale inputs of the old weights, and were copied",
                     "params.json says quantization of the old weights, and was copied",
                     "pytorch_model.bin holds other weights, and was not copied"]
