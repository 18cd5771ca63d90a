"""Configs of compressed-tensors in a converted folder: what its loaders are told of bits, types, scales and zero points."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import fp8_tensor, int8_channel, int8_tensor, int_group
from qdsl.jobs.convert import run, target
from tests.support import folders
from tests.support.converted_folders import convert, group_of, requantized, two_layers, weight
from tests.support.formats import same_bits

weights = pytest.fixture(two_layers)


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


@pytest.mark.parametrize(("to", "params", "why"), [
    ("int_group.gptq_v2", {"symmetric": True, "bits": 3}, "gptq with bits 3"),
    ("ocp_mxfp4.modelopt", {}, "modelopt with quant_algo MXFP4"),
    ("ocp_mxfp6.compressed_tensors", {}, "compressed-tensors with format mxfp6-pack-quantized"),
    ("int_group.awq_gemv", {}, "awq with version gemv")])
def test_what_vllm_loads_no_more(to: str, params: dict[str, Any], why: str, tmp_path: Path) -> None:
    """The report names the setting, and the other readers."""
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", {"model.up.weight": torch.randn(64, 128).bfloat16()}, {})
    (tmp_path / "in" / "config.json").write_text('{"model_type": "toy", "architectures": ["Toy"]}')
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    report = run.quantize(tmp_path / "in", target.parse_conversion(to, True, params, ()), tmp_path / "out")
    assert report["not_read_by"][""]["vLLM"] == f"its loaders know no {why}"
    assert report["readers"][""].startswith("qdsl, ") and "vLLM" not in report["readers"][""]
