"""Files that torchao wrote: found by their tensors and their header, decoded bit for bit as torchao does, and written as it does.

tests/data/README.md says how they were made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.layer_weights import module_of, weights
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.files.components import open_models
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, TensorFile, read_header, write
from qdsl.cli import app
from qdsl.generated import fp8_channel, fp8_tensor, int8_channel, int_group, nvfp4_modelopt, ocp_mxfp4
from qdsl.jobs.convert.run import convert
from qdsl.jobs.convert.target import parse_conversion
from qdsl.jobs.engine import RewriteError
from tests.support.formats import ROOT, same_bits

DATA = ROOT / "tests" / "data" / "torchao"
CONFIG = {"quantization_config": {"quant_method": "torchao", "modules_to_not_convert": None,
                                  "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}}
# By the names of weights: format.storage, and parameters that are not what they always are.
DETECTED: dict[str, dict[str, tuple[str, dict[str, int | str]]]] = {
    "int8": {"row": ("int8_channel.torchao", {"scale_type": "f32"}), "tensor": ("int8_tensor.torchao", {"scale_type": "f32"}),
             "group": ("int_group.torchao_int8", {"bits": 8, "group": 32}), "asymmetric": ("int8_channel.torchao", {}),
             "asymmetric_group": ("int_group.torchao_int8", {"bits": 8, "group": 64})},
    "intx": {"int4_group": ("int_group.torchao_int8", {"bits": 8, "group": 32}), "int8_row": ("int8_channel.torchao", {})},
    "float8": {"row": ("fp8_channel.torchao", {"scale_type": "f32"}), "tensor": ("fp8_tensor.torchao", {}),
               "block": ("fp8_block.torchao", {"bn": 32, "bk": 32})},
    "mx": {f"{name}{end}": (f"{format}.torchao{end}", params) for end in ("", "_swizzled") for name, format, params in (
        ("fp8_e4m3", "ocp_mxfp8", {"code": "e4m3"}), ("fp8_e5m2", "ocp_mxfp8", {"code": "e5m2"}),
        ("fp6_e2m3", "ocp_mxfp6", {"code": "e2m3"}), ("fp6_e3m2", "ocp_mxfp6", {"code": "e3m2"}), ("fp4", "ocp_mxfp4", {}))},
    "nvfp4": {f"{name}{end}": (f"nvfp4_modelopt.torchao{end}", {}) for end in ("", "_swizzled") for name in ("plain", "scaled")},
    "int4": {"plain_int32": ("int_group.torchao_plain_int32", {"bits": 4, "group": 32}),
             "tile_packed": ("int4pack.tile_packed", {"group": 128}), "plain": ("int4pack.torchao", {"group": 64})},
}


def read(path: Path) -> Layers:
    with Folder(path) as folder:
        return detected_layers(folder)


def expected(file: str) -> dict[str, Tensor]:
    """What torchao decodes the weights to, float32 [N, K]."""
    with np.load(DATA / f"{file}.npz") as archive:
        return {name.removesuffix(".weight"): torch.from_numpy(archive[name]).view(torch.float32) for name in archive.files}


def decoded(path: Path) -> dict[str, Tensor]:
    with Folder(path) as folder:
        return {layer.name: module_of(layer).dequantize(weights(folder, layer)[0], torch.float32)
                for layer in layers(folder).layers}


def same(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return values.keys() == wanted.keys() and all(same_bits(values[name], wanted[name]) for name in wanted)


def alone(tmp_path: Path, file: str, config: dict[str, Any] | None = None) -> Path:
    """A folder with one of the files, and a config."""
    path = tmp_path / file
    path.mkdir()
    shutil.copy(DATA / f"{file}.safetensors", path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "no config"])
@pytest.mark.parametrize("file", DETECTED)
def test_weights_are_found_and_decoded(tmp_path: Path, file: str, config: dict[str, Any] | None) -> None:
    path = alone(tmp_path, file, config)
    detected = {layer.name: layer for layer in read(path).layers}
    assert {name: f"{layer.format}.{layer.storage}" for name, layer in detected.items()} == {
        f"model.{name}": label for name, (label, _) in DETECTED[file].items()}
    for name, (_, params) in DETECTED[file].items():
        layer = detected[f"model.{name}"]
        assert params.items() <= layer.params.items() and layer.problems == () and layer.why == "", layer
    assert same(decoded(path), expected(file))


@pytest.mark.parametrize("file", DETECTED)
def test_fields_are_packed_to_the_same_bytes(file: str) -> None:
    with Folder(DATA / f"{file}.safetensors") as folder:
        for layer in layers(folder).layers:
            packed = weights(folder, layer)[0]
            again = module_of(layer).pack(module_of(layer).unpack(packed), storage=packed.storage, **packed.params)
            assert all(same_bits(again.tensors[name], tensor) for name, tensor in packed.tensors.items()), layer.name
            assert again.tensors.keys() == packed.tensors.keys()


def test_bias_and_plain_tensors(tmp_path: Path) -> None:
    detected = read(alone(tmp_path, "int8", CONFIG))
    row = next(layer for layer in detected.layers if layer.name == "model.row")
    assert row.others == {"bias": "model.row.bias"} and detected.plain == ["model.norm.weight"] and detected.problems == []


def test_a_layer_is_loaded() -> None:
    """A Linear of what is found computes what the decoded weight computes."""
    with Folder(DATA / "int8.safetensors") as folder:
        layer = next(candidate for candidate in layers(folder).layers if candidate.name == "model.row")
        linear = int8_channel.Linear(weights(folder, layer)[0], folder.tensor(layer.others["bias"]), torch.float32)
    x = torch.randn(3, 128)
    wanted = torch.nn.functional.linear(x, expected("int8")["model.row"], torch.arange(16.0))
    assert torch.allclose(linear(x), wanted, atol=1e-4)


def test_what_no_format_is_is_not_taken_for_another() -> None:
    """Codes and scales of FP6 in blocks of 16 fit MXFP4 by their shapes; the header says what they are."""
    why = {layer.name: (layer.format, layer.why) for layer in read(DATA / "unknown.safetensors").layers}
    assert why.keys() == {"model.float8_e5m2", "model.fp4_block16", "model.fp6_block16"}
    assert all(format == "" for format, _ in why.values())
    assert why["model.fp6_block16"][1].startswith("quantized in a way that is not known: _type = MXTensor, ")
    assert "_data.block_size = 16" in why["model.fp6_block16"][1] and "_data.elem_dtype = fp6_e2m3" in why["model.fp6_block16"][1]
    assert "float8_e5m2" in why["model.float8_e5m2"][1]


# -- headers that are not torchao's --------------------------------------------------------------------------------------

def layer_with_header(tmp_path: Path, text: str | None, name: str = "model.fp4.weight") -> Layer:
    """The layer of a weight of which a header says something else, or nothing."""
    with TensorFile(DATA / "mx.safetensors") as file:
        tensors = {part: file.tensor(part) for part in file.names() if part.startswith("model.fp4._")}
        metadata = {key: value for key, value in file.header.metadata.items() if key != "model.fp4.weight"}
    write(tmp_path / "model.safetensors", tensors, metadata if text is None else {**metadata, name: text})
    (layer,) = read(tmp_path).layers
    return layer


def test_without_a_header_tensors_are_enough(tmp_path: Path) -> None:
    layer = layer_with_header(tmp_path, None)
    assert (layer.format, layer.storage, layer.shape) == ("ocp_mxfp4", "torchao", (8, 128))


JSON = read_header(DATA / "mx.safetensors").metadata["model.fp4.weight"]


@pytest.mark.parametrize(("text", "why"), [
    ("", "not JSON at character 0"), ("{", "not JSON"), ("[" * 99999, "characters are over the limit of 65536"),
    ("[" * 999, "nested deeper than 16"), ("[]", "not a JSON object"), ('"MXTensor"', "not a JSON object"),
    ("7", "not a JSON object"),
    (JSON[:-1] + ', "_type": "MXTensor"}', "key '_type' occurs twice"), (JSON.replace("32", "1e999"), "out of range"),
    (JSON.replace("32", "3" * 99), "a number of 99 digits"), (JSON.replace("null", "NaN"), "NaN is not JSON"),
    (JSON.replace("MXTensor", "\\ud800"), "half of a surrogate pair"),
    ("{}", "quantized in a way that is not known: "), ('{"_type": ["MXTensor"], "_data": 7}', "that is not known: _data = 7"),
    (JSON.replace("32", "true"), "not known"), (JSON.replace("32", "32.0"), "not known"),
    (JSON.replace("32", "[32]"), "_data.block_size = [32]"),
    (JSON.replace("false", "0"), "not known"), (JSON.replace("MXTensor", "Tensor"), "_type = Tensor"),
    (JSON.replace("false", "true"), "scale' has shape [8, 4]; the format needs"),
], ids=range(20))
def test_a_header_of_a_stranger(tmp_path: Path, text: str, why: str) -> None:
    """Nothing is guessed where it is wrong, and what is wrong is said with its place."""
    layer = layer_with_header(tmp_path, text)
    assert layer.format == "" and why in layer.why and len(layer.why) < 1000
    if "not JSON" in why or "limit" in why or "object" in why:
        assert layer.why.startswith(f"{tmp_path / 'model.safetensors'}: 'model.fp4.weight' of the header's metadata: ")


@pytest.mark.parametrize("file", ["int8", "float8", "int4"])
def test_extents_that_are_none(tmp_path: Path, file: str) -> None:
    """Shapes and blocks of any kind are not those of the tensors."""
    with TensorFile(DATA / f"{file}.safetensors") as source:
        tensors, metadata = {name: source.tensor(name) for name in source.names()}, source.header.metadata
    for value in ('"x"', "null", "-1", "[]", "[1]", "[1, -1]", "[0, 0]", "[1.5, 32]", "[[1, 32]]", "{}", f"[{10 ** 60}, 1]"):
        headers = {}
        for name, text in metadata.items():
            data = json.loads(text) if name.startswith("model.") else None
            if data is not None and "_data" in data:
                changed = {**data, "_data": {**data["_data"], "block_size": "?", "shape": "?"}}
                headers[name] = json.dumps(changed).replace('"?"', value)
        write(tmp_path / "model.safetensors", tensors, {**metadata, **headers})
        assert {layer.format for layer in read(tmp_path).layers} == {""}, value


def test_files_that_differ_in_what_they_say(tmp_path: Path) -> None:
    layer_with_header(tmp_path, JSON)
    write(tmp_path / "other.safetensors", {"x": torch.zeros(1)}, {"model.fp4.weight": JSON.replace("32", "16")})
    (layer,) = read(tmp_path).layers
    assert layer.why.endswith("other.safetensors") and " contradicts " in layer.why and layer.format == ""


def padded(path: Path, shape: str) -> Layers:
    """The tiles of 16 rows and 1024 columns as those of another weight, which torchao pads to 8 rows and 1024 columns."""
    with TensorFile(DATA / "int4.safetensors") as file:
        tensors = {name: file.tensor(name) for name in file.names() if name.startswith("model.tile_packed.")}
        text = file.header.metadata["model.tile_packed.weight"]
    write(path / "model.safetensors", tensors, {"model.tile_packed.weight": text.replace("[16, 1024]", shape)})
    return read(path)


@pytest.mark.parametrize(("n", "k"), [(16, 896), (13, 1024), (9, 120)])
def test_padded_tiles(tmp_path: Path, n: int, k: int) -> None:
    (layer,) = padded(tmp_path, f"[{n}, {k}]").layers
    assert (layer.format, layer.storage, layer.shape) == ("int4pack", "tile_packed", (n, k))
    assert same(decoded(tmp_path), {"model.tile_packed": expected("int4")["model.tile_packed"][:n, :k]})


@pytest.mark.parametrize(("shape", "why"), [
    ("[8, 1024]", "the format needs [ceil(N/8), 8*ceil(K/1024), 128] = [1, 8, 128]"),
    ("[16, 1152]", "the format needs [ceil(N/8), 8*ceil(K/1024), 128] = [2, 16, 128]")])
def test_tiles_of_another_weight(tmp_path: Path, shape: str, why: str) -> None:
    (layer,) = padded(tmp_path, shape).layers
    assert layer.format == "" and why in layer.why


def test_tensors_of_a_type_that_nobody_knows(tmp_path: Path) -> None:
    """Even where their names are no format's."""
    write(tmp_path / "model.safetensors", {"a._weight_codes": torch.zeros(4, 4), "b.weight": torch.zeros(4, 4)},
          {"a.weight": '{"_type": "NewTensor"}', "b.weight": '{"_type": "Tensor"}', "format": "pt"})
    (layer,) = read(tmp_path).layers
    assert (layer.name, layer.why) == ("a", "quantized in a way that is not known: _type = NewTensor")


def test_weights_of_other_names(tmp_path: Path) -> None:
    """Two weights in one module, of whose names the tensors' are made."""
    with TensorFile(DATA / "mx.safetensors") as file:
        tensors = {f"experts._{weight}_{leaf}": file.tensor(f"model.{of}._weight_{leaf}") for leaf in ("qdata", "scale")
                   for weight, of in (("up_proj", "fp4"), ("down_proj", "fp8_e4m3"))}
        headers = {f"experts.{weight}": file.header.metadata[f"model.{of}.weight"]
                   for weight, of in (("up_proj", "fp4"), ("down_proj", "fp8_e4m3"))}
    write(tmp_path / "model.safetensors", tensors, headers)
    assert {layer.name: (layer.format, layer.storage) for layer in read(tmp_path).layers} == {
        "experts.up_proj": ("ocp_mxfp4", "torchao"), "experts.down_proj": ("ocp_mxfp8", "torchao")}


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no .safetensors file in this folder; pytorch_model\.bin is a pickle, whose code"):
        read(tmp_path)


# -- written anew --------------------------------------------------------------------------------------------------------

def converted(path: Path, out: Path, to: str, **options: Any) -> dict[str, Any]:
    with open_models(path) as models:
        (folder,) = models.values()
        return convert(folder, layers(folder), parse_conversion(to, **options), out)


def metadata(path: Path) -> dict[str, str]:
    return read_header(path / "model.safetensors").metadata


# Storages that others read, for a file's formats; those without one stay.
AWAY = {"int8": ["int8_channel.safetensors", "int8_tensor.safetensors", "int_group.pack_quantized"],
        "float8": ["fp8_channel.safetensors", "fp8_tensor.safetensors", "fp8_block.safetensors"],
        "mx": ["ocp_mxfp4.compressed_tensors", "ocp_mxfp6.compressed_tensors", "ocp_mxfp8.compressed_tensors"],
        "nvfp4": ["nvfp4_modelopt.modelopt"]}
BACK = {"int_group": "torchao_int8"}
# Zeros, which compressed-tensors leaves out, and a one that ModelOpt writes.
FREE = {"model.group._weight_zero_point", "model.plain._weight_per_tensor_scale", "model.plain_swizzled._weight_per_tensor_scale"}


@pytest.mark.parametrize("file", AWAY)
def test_there_and_back_again(tmp_path: Path, file: str) -> None:
    """Every number stays, and torchao's files come back: all tensors, and all that the header says of them."""
    path = first = alone(tmp_path, file, CONFIG)
    for to in AWAY[file]:
        converted(path, out := tmp_path / to.replace(".", "-"), to)
        path = out
    assert same(decoded(path), expected(file))
    left = [label for label, _ in DETECTED[file].values()
            if not any(to.split(".")[0] == label.split(".")[0] for to in AWAY[file])]
    assert left == [] and all("_weight_" not in name for name in read_header(path / "model.safetensors").tensors)
    assert not any("_type" in text for text in metadata(path).values()) and "tensor_names" not in metadata(path)
    for to in AWAY[file]:
        format = to.split(".")[0]
        converted(path, out := tmp_path / f"back-{format}", f"{format}.{BACK.get(format, 'torchao')}")
        path = out
    assert same(decoded(path), expected(file))
    after, before = metadata(path), metadata(first)
    assert after.keys() == before.keys()
    for name, text in before.items():
        swizzled = "_swizzled" in name                           # where all scales are plain now
        if name == "tensor_names":
            assert sorted(json.loads(after[name])) == sorted(json.loads(text))
        elif name != "format" and not swizzled:
            assert _alike(name, json.loads(after[name])) == _alike(name, json.loads(text))
    with Folder(first) as one, Folder(path) as other:
        assert set(one.names()) ^ set(other.names()) == FREE & {*one.names(), *other.names()}
        for name in {*one.names()} & {*other.names()}:
            if "_swizzled" not in name:
                assert one.entry(name).shape == other.entry(name).shape and same_bits(one.tensor(name), other.tensor(name)), name


def _alike(name: str, header: dict[str, Any]) -> dict[str, Any]:
    """What is said, but for an order, and for tensors that may be left out."""
    parts = [part for part in header.get("_tensor_data_names", []) if f"{name.removesuffix('weight')}_weight_{part}" not in FREE]
    return {**header, "_tensor_data_names": sorted(parts)}


def test_scales_are_swizzled_as_torchao_does(tmp_path: Path) -> None:
    path = alone(tmp_path, "mx", CONFIG)
    for step, to in enumerate(("ocp_mxfp4.torchao", "ocp_mxfp4.torchao_swizzled")):
        converted(path, out := tmp_path / str(step), to)
        path = out
    with Folder(DATA / "mx.safetensors") as one, Folder(path) as other:
        name = "model.fp4_swizzled._weight_scale"
        assert one.entry(name).shape == other.entry(name).shape == (32, 16) and same_bits(one.tensor(name), other.tensor(name))
        assert json.loads(metadata(path)["model.fp4.weight"]) == json.loads(metadata(path)["model.fp4_swizzled.weight"]) == \
            json.loads(one.files()[0].header.metadata["model.fp4_swizzled.weight"])


def test_the_config_is_torchaos(tmp_path: Path) -> None:
    """Of layers that compressed-tensors had, too; and each file says all weights, as those that load it want."""
    packed = ocp_mxfp4.quantize(torch.randn(8, 64), "compressed_tensors")
    path = tmp_path / "ct"
    path.mkdir()
    for name in ("a", "b"):
        write(path / f"{name}.safetensors", {f"{name}.{key}": tensor for key, tensor in packed.tensors.items()} |
              {f"{name}_norm.weight": torch.ones(4)}, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}}}}))
    out = tmp_path / "out"
    converted(path, out, "torchao")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"
    assert config["quant_type"] == {"default": {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": {}}}
    metadata = [read_header(out / f"{name}.safetensors").metadata for name in ("a", "b")]
    assert metadata[0] == metadata[1]
    assert set(json.loads(metadata[0]["tensor_names"])) == {"a.weight", "b.weight", "a_norm.weight", "b_norm.weight"}
    assert json.loads(metadata[0]["a_norm.weight"]) == {"_type": "Tensor"}
    assert {layer.storage for layer in read(out).layers} == {"torchao"} and read(out).problems == []


def of_experts(path: Path, format: Any, storage: str) -> Path:
    """A file with a weight of two experts [2, 8, 128] in one tensor."""
    packed = [format.quantize(torch.randn(8, 128), storage).tensors for _ in range(2)]
    stacked = {f"e.{name}": torch.stack([one[name] for one in packed]) for name in packed[0]}
    write(path, {**stacked, "e.norm.weight": torch.ones(4)})
    return path


def test_experts_are_said_as_torchao_says_them(tmp_path: Path) -> None:
    """Blocks are of one expert, and names are of the weight, which is in no module of its own."""
    path = of_experts(tmp_path / "in.safetensors", fp8_channel, "safetensors")
    with TensorFile(path) as file:
        tensors = {name: file.tensor(name) for name in file.names()}
    write(path, {name.replace("e.weight", "e.down_proj"): tensor for name, tensor in tensors.items()})
    before = experts_of(path)
    converted(path, out := tmp_path / "out", "torchao")
    header = read_header(out / "in.safetensors")
    assert {name: entry.shape for name, entry in header.tensors.items()} == {
        "e._down_proj_qdata": (2, 8, 128), "e._down_proj_scale": (2, 8, 1), "e.norm.weight": (4,)}
    header_json = json.loads(header.metadata["e.down_proj"])
    assert header_json["_type"] == "Float8Tensor" and header_json["_data"]["block_size"] == [1, 1, 128]
    assert set(json.loads(header.metadata["tensor_names"])) == {"e.down_proj", "e.norm.weight"}
    after = experts_of(out)
    assert after.keys() == before.keys() == {"e.down_proj"} and same_bits(after["e.down_proj"], before["e.down_proj"])
    converted(out, back := tmp_path / "back", "safetensors")
    assert not any("down_proj" in name for name in read_header(back / "in.safetensors").metadata)
    with TensorFile(path) as one, TensorFile(back / "in.safetensors") as other:
        assert {*one.names()} == {*other.names()} and all(same_bits(one.tensor(name), other.tensor(name)) for name in one.names())


@pytest.mark.parametrize("block", ["[128]", "[1, 128]", "[3, 1, 128]", "[true, 1, 128]", "[1, 1, 1, 128]", "[1, 2, 128]"])
def test_blocks_of_experts_that_are_none(tmp_path: Path, block: str) -> None:
    converted(of_experts(tmp_path / "in.safetensors", fp8_channel, "safetensors"), out := tmp_path / "out", "torchao")
    with TensorFile(out / "in.safetensors") as file:
        tensors, metadata = {name: file.tensor(name) for name in file.names()}, dict(file.header.metadata)
    metadata["e.weight"] = metadata["e.weight"].replace("[1, 1, 128]", block)
    write(tmp_path / "other.safetensors", tensors, metadata)
    (layer,) = read(tmp_path / "other.safetensors").layers
    assert layer.format == "" and layer.why


@pytest.mark.parametrize(("format", "storage", "to", "why"), [
    (fp8_tensor, "safetensors", "torchao", None), (nvfp4_modelopt, "modelopt", "torchao", "one number for all experts there"),
    (ocp_mxfp4, "modelopt", "torchao_swizzled", "torchao has no scales of experts in tiles"),
    (int_group, "pack_quantized", "torchao_plain_int32", "torchao has no Int4PlainInt32Tensor of experts in one tensor"),
])
def test_experts_that_torchao_has_not(tmp_path: Path, format: Any, storage: str, to: str, why: str | None) -> None:
    path = of_experts(tmp_path / "in.safetensors", format, storage)
    if why is None:
        converted(path, tmp_path / "out", to)
        assert same_bits(experts_of(tmp_path / "out")["e"], experts_of(path)["e"])
        return
    with pytest.raises(RewriteError, match=why):
        converted(path, tmp_path / "out", to)


def experts_of(path: Path) -> dict[str, Tensor]:
    """What layers decode to, float32 [E, N, K]."""
    with Folder(path) as folder:
        return {layer.name: torch.stack([module_of(layer).dequantize(weight, torch.float32) for weight in weights(folder, layer)])
                for layer in layers(folder).layers}


def test_inspect_prints_layers_and_what_is_not_known(tmp_path: Path) -> None:
    """A line for all weights of a kind, and none for each of them that the header names."""
    path = alone(tmp_path, "int8", CONFIG)
    printed = CliRunner().invoke(app, ["inspect", str(path)]).output
    assert "int8_channel.torchao" in printed and "int_group.torchao_int8" in printed
    assert "Int8Tensor" not in printed.split("layers")[0]
    printed = CliRunner().invoke(app, ["inspect", str(DATA / "unknown.safetensors")]).output
    assert "quantized in a way that is not known: _type = MXTensor" in printed
    assert "qdata' has dtype float8_e5m2; the format needs float8_e4m3fn" in printed
