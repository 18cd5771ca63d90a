"""FP8 files of ComfyUI: scales under its names, what its tensors and headers say of formats, and casts without scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.checkpoint.report.contents import contents
from qdsl.cli import app
from qdsl.generated import fp8_tensor, nvfp4_modelopt
from qdsl.models.plan import LoadError
from qdsl.runtime.gpu import launch

FP8 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = "double_blocks.0.img_attn.qkv"
SETTINGS = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}


def bytes_of_json(settings: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def cast(weight: Tensor) -> dict[str, Tensor]:
    return {"weight": weight.to(FP8)}


def old(weight: Tensor) -> dict[str, Tensor]:
    """With the names of 2024: their reader multiplies codes by scale_weight."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(FP8), "scale_weight": scale.view(1), "scale_input": torch.ones(1)}


def new(weight: Tensor) -> dict[str, Tensor]:
    """With those of 2026, and JSON of the layer in a tensor."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor(0.5),
            "comfy_quant": bytes_of_json(SETTINGS)}


@pytest.mark.parametrize(("header", "why"), [
    ({"layers": {LAYER: SETTINGS}, "format_version": "1.0"}, ""),
    ({"layers": {}, "rotate": 64}, "rotate is 64, which may change"),
    ({"layers": {LAYER: {**SETTINGS, "format": "nvfp4"}}}, "the header .*'format': 'nvfp4'"),
    ({"layers": {LAYER: "float8_e5m2"}}, "the header .*'format': 'float8_e5m2'")])
def test_headers_that_say_more_than_the_tensors_of_json(header: dict[str, Any], why: str, tmp_path: Path) -> None:
    """ComfyUI takes the header's (utils.convert_old_quants); other keys there are not known."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    write(tmp_path / "model.safetensors", {f"{LAYER}.{leaf}": tensor for leaf, tensor in new(weight).items()},
          {"_quantization_metadata": json.dumps(header)})
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
    if why:
        with pytest.raises((CheckpointError, LoadError), match=why):
            qdsl.load_weights_(model, tmp_path / "model.safetensors", {LAYER: "0"})
    else:
        qdsl.load_weights_(model, tmp_path / "model.safetensors", {LAYER: "0"})


@pytest.mark.parametrize("content", [b"\0" * 8, b"{}"], ids=["zeros", "empty"])
@pytest.mark.parametrize("kind", ["plain", "scaled", "nvfp4"])
def test_tensors_of_json_that_say_nothing(kind: str, content: bytes, tmp_path: Path) -> None:
    """Beside plain weights and FP8 (ComfyUI#15410); beside codes of four bits nothing says their order."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    tensors = {"plain": {"weight": weight.bfloat16()}, "scaled": {**new(weight)},
               "nvfp4": dict(nvfp4_modelopt.quantize(weight, "comfyui").tensors)}[kind]
    tensors |= {"comfy_quant": torch.tensor(list(content), dtype=torch.uint8)}
    write(tmp_path / "model.safetensors", {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()})
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
    if kind == "nvfp4":
        with pytest.raises(LoadError, match=r"comfy_quant': not JSON|not known"):
            qdsl.load_weights_(model, tmp_path, {LAYER: "0"})
        return
    qdsl.load_weights_(model, tmp_path, {LAYER: "0"})
    assert torch.equal(model.float()(torch.eye(64)).t(), expected(tensors))


def test_codes_beside_layers_with_json(tmp_path: Path) -> None:
    """NVFP4 of ComfyUI has ModelOpt's names and shapes: in a file of ComfyUI's, a layer without JSON is refused."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    named = {f"a.{name}": tensor for name, tensor in new(weight).items()}
    own = dict(nvfp4_modelopt.quantize(weight, "comfyui").tensors)
    own["weight_scale"] = own["weight_scale"].view(128, 4)       # as files have it
    write(tmp_path / "model.safetensors", {**named, **{f"b.{name}": tensor for name, tensor in own.items()}})
    with Folder(tmp_path) as folder:
        by_name = {layer.name: layer for layer in layers(folder).layers}
    assert by_name["a"].format == "fp8_tensor"
    assert by_name["b"].why == "the tensors fit nvfp4_modelopt.modelopt, and nothing says that they are that"


FILES = {"cast": cast, "old": old, "new": new}


def expected(tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight of a layer, as ComfyUI computes it in float32."""
    scale = tensors.get("scale_weight", tensors.get("weight_scale"))
    return tensors["weight"].float() * (1 if scale is None else scale.float())


def read(path: Path) -> Layers:
    with Folder(path) as folder:
        return layers(folder)


def write_layers(path: Path, modules: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str] | None = None,
                 **others: Tensor) -> Path:
    write(path, {**{f"{module}.{leaf}": tensor for module, tensors in modules.items() for leaf, tensor in tensors.items()},
                 **others}, metadata)
    return path


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_layers_of_a_file(kind: str, prefix: str, tmp_path: Path) -> None:
    """Weights are ComfyUI's; norms and biases of 8 bits are plain numbers, and so is its marker."""
    tensors = FILES[kind](torch.randn(96, 64))
    others = {f"{prefix}norm.scale": torch.ones(64).to(FP8), f"{prefix}conv.weight": torch.ones(8, 4, 2, 2).to(FP8),
              **({} if kind == "cast" else {f"{prefix}scaled_fp8": torch.empty(2, dtype=FP8)})}
    path = write_layers(tmp_path / "model.safetensors", {prefix + LAYER: {**tensors, "bias": torch.ones(96).to(FP8)}}, **others)
    with Folder(path) as folder:
        detected = layers(folder)
        [layer] = detected.layers
        [weight] = weights(folder, layer)
    assert (layer.name, layer.format, layer.why, layer.problems) == (prefix + LAYER, "fp8_tensor", "", ())
    assert fp8_tensor.dequantize(weight, torch.float32).equal(expected(tensors)) and sorted(detected.plain) == sorted(others)
    data = contents(path)
    assert data["layers"][0]["params"] == ({} if kind == "cast" else {"scale_type": "f32"}) and not data["contradictions"]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_header_says_the_formats_of_layers(prefix: str, tmp_path: Path) -> None:
    """Names in it may lack the prefix of the tensors' names."""
    blocks = {"format": "int8_blockwise", "group_size": 128}
    header = json.dumps({"format_version": "1.0", "layers": {LAYER: SETTINGS, "other": blocks}})
    tensors = {name: tensor for name, tensor in new(torch.randn(128, 128)).items() if name != "comfy_quant"}
    path = write_layers(tmp_path / "model.safetensors", {prefix + LAYER: tensors, prefix + "other": {
        "weight": torch.ones(128, 128, dtype=torch.int8), "weight_scale": torch.ones(1, 1)}}, {"_quantization_metadata": header})
    one, other = read(path).layers
    assert (one.format, one.why) == ("fp8_tensor", "")
    assert other.why == "quantized in a way that is not known: format = int8_blockwise, group_size = 128"


def in_tiles(scales: Tensor) -> Tensor:
    """Scales as cuBLAS reads them, in tiles of 128 rows and 4 columns, as comfy-kitchen's to_blocked gives them."""
    rows, columns = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    padded = torch.zeros(128 * rows, 4 * columns, dtype=torch.uint8)
    padded[:scales.shape[0], :scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows, 128, columns, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4).transpose(1, 2)
    return tiles.reshape(128 * rows, 4 * columns).view(scales.dtype)


def nvfp4(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """A byte has the first of two columns in its high bits."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    data, scales = torch.randint(256, (n, k // 2)).to(torch.uint8), torch.rand(n, k // 16).mul(448).to(FP8)
    codes = torch.stack([data >> 4, data & 15], 2).view(n, k).int()
    weight = numbers[codes] * (0.25 * scales.float()).repeat_interleave(16, 1)
    return {"weight": data, "weight_scale": in_tiles(scales), "weight_scale_2": torch.tensor(0.25)}, weight


def mxfp8(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = torch.randn(n, k).to(FP8), torch.randint(120, 130, (n, k // 32)).to(torch.uint8)
    weight = codes.float() * (scales.float() - 127).exp2().repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": in_tiles(scales).view(torch.float8_e8m0fnu)}, weight


def int8(*shape: int) -> Callable[[int, int], tuple[dict[str, Tensor], Tensor]]:
    def layer(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale = torch.randint(-127, 128, (n, k)).to(torch.int8), torch.rand(shape and (n, 1))
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    return layer


FORMATS = {"nvfp4": ("nvfp4", "nvfp4_modelopt", nvfp4), "mxfp8": ("mxfp8", "ocp_mxfp8", mxfp8),
           "a scale": ("int8_tensorwise", "int8_tensor", int8()), "rows": ("int8_tensorwise", "int8_channel", int8(1))}
PER_TILE = {"nvfp4": 64, "mxfp8": 128}                           # columns of a tile of scales


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(128, 64), (192, 320), (256, 128)], ids=str)
def test_formats_of_blocks_and_integers(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """What comfy-kitchen's dequantize gives; tensors of NVFP4 and MXFP8 without JSON are those of other programs."""
    name, format, make = FORMATS[kind]
    tensors, weight = make(*shape)
    marked = {**tensors, "comfy_quant": bytes_of_json({"format": name})}
    path = write_layers(tmp_path / "model.safetensors", {LAYER: marked})
    with Folder(path) as folder:
        [layer] = layers(folder).layers
        [packed] = weights(folder, layer)
    assert (layer.format, layer.why, layer.problems, layer.contradictions) == (format, "", (), ())
    assert packed.format.dequantize(packed, torch.float32).equal(weight)
    [bare] = read(write_layers(tmp_path / "bare.safetensors", {LAYER: tensors})).layers
    is_padded = name in PER_TILE and (shape[0] % 128 > 0 or shape[1] % PER_TILE[name] > 0)
    assert bare.format == ("" if is_padded else format) and bare.storage != "comfyui"
    rotated = {**tensors, "comfy_quant": bytes_of_json({"format": name, "convrot": True})}
    path = write_layers(tmp_path / "rotated.safetensors", {LAYER: rotated})
    with pytest.raises(CheckpointError, match="convrot is True, which changes x"):
        qdsl.load_weights_(torch.nn.Sequential(torch.nn.Linear(*shape[::-1], bias=False)), path, {LAYER: "0"})


@pytest.mark.parametrize("defect", ["bytes", "json", "scale", "scale_weight"])
def test_damaged_files(defect: str, tmp_path: Path) -> None:
    """Text that is no JSON, a scale that is missing though the file states one, and bytes that may be anything."""
    tensors, others = new(torch.randn(96, 64)), {}
    if defect == "scale":
        del tensors["weight_scale"]
    elif defect == "scale_weight":
        tensors, others = cast(torch.randn(96, 64)), {"scaled_fp8": torch.empty(0, dtype=FP8)}
    elif defect == "json":
        tensors["comfy_quant"] = tensors["comfy_quant"][:-1]
    else:
        tensors = {"weight": tensors["weight"].view(torch.uint8)}
    [layer] = read(write_layers(tmp_path / "model.safetensors", {LAYER: tensors}, **others)).layers
    what = {"bytes": "not known: weight U8", "json": "JSON", "scale": "needs a scale", "scale_weight": "needs a scale"}
    assert layer.format == "" and what[defect] in layer.why


def test_commands_on_files(tmp_path: Path) -> None:
    """The same weights under both names are equal; conversion keeps them, and what spoke of the old tensors goes."""
    weight = torch.randn(96, 64)
    paths = {kind: write_layers(tmp_path / f"{kind}.safetensors", {LAYER: {
        leaf: tensor for leaf, tensor in make(weight).items() if leaf not in ("scale_input", "input_scale")}})
        for kind, make in FILES.items()}
    assert run("verify", paths["old"], paths["new"], "--decoded") == "equal\n"
    for kind, path in paths.items():
        run("convert", path, "--to", "torchao", "--out", tmp_path / kind)
        assert run("verify", path, tmp_path / kind, "--decoded") == "equal\n"
        run("convert", path, "--requantize", "q8_0", "--out", tmp_path / f"{kind}-q8_0")
        with Folder(tmp_path / f"{kind}-q8_0") as folder:
            assert [*folder.names()] == [f"{LAYER}.blocks"]


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_kernels_without_a_scale() -> None:
    """They compute what those of a scale of 1 do, and so does the planar storage."""
    codes = (torch.randn(48, 64) * 3).to(FP8)
    bare, scaled = fp8_tensor.wrap({"weight": codes}), fp8_tensor.wrap({"weight": codes, "weight_scale": torch.ones(1)})
    assert list(bare.tensors) == ["weight"]
    x = torch.randn(3, 64)
    for one, other in ((bare, scaled), (fp8_tensor.FORMAT.planar(bare), fp8_tensor.FORMAT.planar(scaled))):
        weight, out, same = (torch.empty(shape, device=DEVICE) for shape in ((48, 64), (3, 48), (3, 48)))
        launch.dequantize(one.to(DEVICE), weight)
        launch.linear(x.to(DEVICE), one.to(DEVICE), None, out)
        launch.linear(x.to(DEVICE), other.to(DEVICE), None, same)
        assert weight.cpu().equal(codes.float()) and out.equal(same)
