"""MLX beside us: folders that it wrote are read to the same bits, and it reads what we write.

Weights of tests/data/ckpt come from it; the live tests need the package, which `make live` installs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qdsl.checkpoint.detect.layer_weights import module_of, weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import TensorFile, write
from qdsl.cli import app
from tests.formats.test_goldens import DATA, disk, read
from tests.support.formats import same_bits

MODES = {"affine4_g64_bfloat16": ("affine", 4, 64, "mlx"), "affine3_g32_float16": ("affine", 3, 32, "mlx"),
         "mxfp4": ("mxfp4", 4, 32, "ocp_mxfp4"), "mxfp8": ("mxfp8", 8, 32, "ocp_mxfp8"),
         "nvfp4": ("nvfp4", 4, 16, "nvfp4_modelopt")}
TARGETS = {"mlx": ("affine", 4, 64), "mlx bits=6 group=32": ("affine", 6, 32), "ocp_mxfp4.mlx": ("mxfp4", 4, 32),
           "ocp_mxfp8.mlx": ("mxfp8", 8, 32), "nvfp4_modelopt.mlx": ("nvfp4", 4, 16)}
needs_mlx = pytest.mark.skipif(find_spec("mlx") is None, reason="needs the package mlx: see make live")


def write_folder(path: Path, kind: str) -> Tensor:
    """A folder as mlx-lm writes it, of one layer; the weight that MLX decodes."""
    mode, bits, group, _ = MODES[kind]
    tensors = read(DATA / "ckpt" / f"mlx_{kind}_N8_K256.npz")
    path.mkdir()
    write(path / "model.safetensors", {f"model.proj.{name}": tensor for name, tensor in disk(tensors).items()}, {"format": "mlx"})
    settings = {"group_size": group, "bits": bits, "mode": mode}
    (path / "config.json").write_text(json.dumps({"quantization": settings, "quantization_config": settings}))
    return tensors["dequant_f32"]


def decoded(path: Path) -> dict[str, tuple[str, Tensor]]:
    """The format and the numbers of every layer of a folder."""
    folder = Folder(path)
    return {layer.name: (f"{layer.format}.{layer.storage}", module_of(layer).dequantize(weights(folder, layer)[0], torch.float32))
            for layer in layers(folder).layers}


def run(*arguments: str | Path) -> None:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("kind", MODES)
def test_a_folder_of_mlx(kind: str, tmp_path: Path) -> None:
    """Its config and shapes say the format; no shape has to be given."""
    weight = write_folder(tmp_path / "in", kind)
    (format, numbers), = decoded(tmp_path / "in").values()
    assert format == f"{MODES[kind][3]}.mlx" and same_bits(numbers, weight)


def test_a_layer_with_settings_of_its_own(tmp_path: Path) -> None:
    weight = write_folder(tmp_path / "in", "affine3_g32_float16")
    own = {"group_size": 64, "bits": 4, "model.proj": {"group_size": 32, "bits": 3}}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization": own}))
    (_, numbers), = decoded(tmp_path / "in").values()
    assert same_bits(numbers, weight)


def test_a_folder_becomes_compressed_tensors_and_mlx_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "mxfp4")
    run("convert", tmp_path / "in", "--to", "compressed_tensors", "--out", tmp_path / "ct")
    assert "quantization" not in json.loads((tmp_path / "ct" / "config.json").read_text())
    run("convert", tmp_path / "ct", "--to", "mlx", "--out", tmp_path / "back")
    one, other = (TensorFile(tmp_path / name / "model.safetensors") for name in ("in", "back"))
    assert all(same_bits(one.tensor(name), other.tensor(name)) for name in one.header.tensors)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert config["quantization_config"]["quant_method"] == "mlx"


@needs_mlx
@pytest.mark.parametrize("target", TARGETS)
def test_mlx_reads_what_we_quantize(target: str, tmp_path: Path) -> None:
    """Its dequantize gives the bits of ours; of affine, the bytes are those that it chooses itself."""
    import mlx.core as mx

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": weight})
    (tmp_path / "in" / "config.json").write_text("{}")
    format, *params = target.split()
    run("quantize", tmp_path / "in", "--format", format, *(word for param in params for word in ("--param", param)),
        "--out", tmp_path / "out")
    settings: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    mode, bits, group = TARGETS[target]
    assert settings == {"mode": mode, "bits": bits, "group_size": group}
    stored = {name.rpartition(".")[2]: array for name, array in mx.load(str(tmp_path / "out" / "model.safetensors")).items()}
    scales = [stored[name].astype(mx.float32) if mode == "affine" else stored[name]
              for name in ("scales", "biases") if name in stored]
    dense = mx.dequantize(stored["weight"], *scales, **settings, dtype=mx.float32)
    (_, numbers), = decoded(tmp_path / "out").values()
    assert numbers.tolist() == dense.tolist()
    if mode == "affine":
        chosen = mx.quantize(mx.array(weight.float().numpy()).astype(mx.bfloat16), **settings)
        assert all(mx.array_equal(stored[name], array)
                   for name, array in zip(("weight", "scales", "biases"), chosen, strict=True))
