"""Modules that multiply as nn.Linear does, by another class or with a weight [K, N]: packed where they do, plain elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import qdsl
from qdsl.cli import app
from qdsl.jobs.compress import run as compression
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.convert.config import own_settings
from qdsl.models.dense import make_dense
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.products import product_of
from tests.support import producer_folders, tiny_models
from tests.support.producer_folders import KINDS

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")
IDS = torch.arange(24).view(2, 12)


class Other(nn.Linear):
    """A linear layer with another forward, which `how` names."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T if self.bias is None else functional.linear(x, self.weight) + self.bias
        return {"": out, "clamped": out.clamp(-1e4, 1e4), "scaled": out * 1.01, "rounded": out.half().float(),
                "squeezed": out.flatten(), "double": out.double(), "offset": out + 1e-3}[self.how]


def with_way(how: str, bias: bool) -> nn.Module:
    layer = Other(16, 24, bias=bias)
    layer.how = how
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["", "clamped", "scaled", "rounded", "squeezed", "double", "offset"])
def test_a_forward_of_its_own_is_run(how: str, bias: bool) -> None:
    """Whatever it is called: one that computes anything else stays as it is, also where models are quantized."""
    layer = with_way(how, bias)
    assert product_of(layer) == ("" if how else "linear")
    model = nn.Sequential(layer, nn.Linear(24, 16))
    report = qdsl.quantize_(model, "int8_channel")
    assert ("0" in report.quantized) == (not how)
    make_dense(model)
    assert type(model[0]) is Other and type(model[1]) is nn.Linear


def test_classes_of_libraries() -> None:
    """On meta, too, square or not; parameters or modules of its own make a module more than a product."""
    falcon = transformers.models.falcon.modeling_falcon.FalconLinear
    conv = transformers.pytorch_utils.Conv1D
    for shape in ((8, 12), (8, 8), (5, 3), (3, 3)):
        assert product_of(falcon(*shape)) == "linear" == product_of(falcon(*shape, device="meta"))
        assert product_of(conv(*shape)) == "transposed" == product_of(copy.deepcopy(conv(*shape)).to("meta"))
    gate = nn.Linear(8, 8)
    gate.scale = nn.Parameter(torch.ones(8))
    assert product_of(gate) == "linear"                          # its forward is nn.Linear's
    more = with_way("", True)
    more.scale = nn.Parameter(torch.ones(8))
    attention = nn.MultiheadAttention(8, 2)
    others = [more, nn.Embedding(4, 4), nn.Bilinear(2, 2, 2), attention.out_proj, nn.Conv1d(4, 4, 1), nn.LayerNorm(4)]
    assert [product_of(other) for other in others] == [""] * 6


# -- folders ---------------------------------------------------------------------------------------------------------------

PACKED = ["bitsandbytes nf4", "bitsandbytes nested nf4", "bitsandbytes fp4", "bitsandbytes int8", "gptq v1", "hqq", "own q8_0"]
SMALL = {"gptq v1": {"group": 64}}


def gpt2(name: str, folder: Path, modules: tuple[str, ...]) -> Any:
    """Write a GPT-2 whose modules of these names a producer has quantized as nn.Linear; returns the model of these numbers."""
    model = tiny_models.tiny_model("gpt2")
    kind = KINDS["own q8_0, embedding too" if name == "own q8_0" else name]
    stored = dataclasses.replace(kind.stored, params={**kind.stored.params, **SMALL.get(name, {})})
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()
    for full, tensor in state.items():
        layer = full.removesuffix(".weight")
        if full.endswith(".weight") and layer.endswith(modules) and tensor.dim() == 2:
            packed = stored.pack(tensor.t().contiguous())
            tensors |= producer_folders.named(layer, packed)
            tensor.copy_(packed.format.dequantize(packed, torch.float32).t())
        else:
            tensors[full] = tensor.clone()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": ["GPT2LMHeadModel"]}
    settings = dict(kind.settings) if kind.settings is not None else None
    if settings is None:
        packed_layers = {full.rpartition(".")[0] for full in tensors if full.rpartition(".")[0].endswith(modules)}
        settings = own_settings({layer: {"format": "q8_0", "storage": "gguf"} for layer in packed_layers}, ())
    if name == "gptq v1":
        settings["group_size"] = 64
    producer_folders.write_files(folder, tensors, {"config.json": {**config, "quantization_config": settings}}, "gpt2")
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(IDS).logits
    return result


def near(value: Tensor, wanted: Tensor) -> bool:
    return bool((value - wanted).norm() <= 1e-5 * wanted.norm())


@pytest.mark.parametrize("modules", [("attn.c_proj",), ("c_attn", "c_fc", "c_proj")], ids=["square", "all"])
@pytest.mark.parametrize("name", PACKED)
def test_gpt2_quantized_as_linear_layers(name: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    """Producers put an nn.Linear in place of a Conv1D, so that packed weights are [N, K]; square ones look alike."""
    wanted = logits(gpt2(name, tmp_path / "in", modules))
    model = plugin.from_pretrained(tmp_path / "in", dtype=torch.float32, quantization_config=plugin.QdslConfig())
    assert isinstance(model.transformer.h[0].attn.c_proj, QuantizedLinear)
    assert near(logits(model), wanted)
    model.save_pretrained(tmp_path / "again")
    assert producer_folders.same_weights(tmp_path / "in", tmp_path / "again")
    for ignore in ([], ["c_proj"]):                              # packed, and decoded while it is loaded
        filled = transformers.GPT2LMHeadModel(tiny_models.tiny_config("gpt2")).eval()
        qdsl.load_weights_(filled, tmp_path / "in", skip=ignore)
        assert near(logits(filled), wanted)
    dense = model.dequantize()
    assert type(dense.transformer.h[0].attn.c_proj) is transformers.pytorch_utils.Conv1D and near(logits(dense), wanted)
    dense.save_pretrained(tmp_path / "dense")
    assert near(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), wanted)


@pytest.mark.parametrize("modules", [("attn.c_proj",), ("c_attn", "c_fc", "c_proj")], ids=["square", "all"])
@pytest.mark.parametrize("name", ["bitsandbytes nf4", "gptq v1", "own q8_0"])
def test_gpt2_dequantized_by_the_command(name: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    """Plain weights are [K, N] again, as the class has them: written whole, in parts, and by a conversion to plain numbers."""
    wanted = logits(gpt2(name, tmp_path / "in", modules))
    parts = [["--shard", "1/2"], ["--shard", "2/2"]]
    for number, runs in enumerate(([["dequantize"]], [["dequantize", *part] for part in parts],
                                   [["convert", "--requantize", "f32"]])):
        out = tmp_path / str(number)
        merge = [["merge-index", str(out)]] if len(runs) > 1 else []
        for arguments in [*([*own, str(tmp_path / "in"), "--out", str(out), "--jobs", "1"] for own in runs), *merge]:
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
        assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)), wanted)


@pytest.mark.parametrize("modules", [("attn.c_proj",), ("c_attn", "c_fc", "c_proj")], ids=["square", "all"])
@pytest.mark.parametrize("lacks", ["architectures", "transformers"])
def test_gpt2_dequantized_without_its_class(modules: tuple[str, ...], lacks: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of the model tells."""
    wanted = logits(gpt2("bitsandbytes nf4", tmp_path / "in", modules))
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != lacks}))
    if lacks == "transformers":
        monkeypatch.setitem(sys.modules, "qdsl.models.shapes", None)
    done = CliRunner().invoke(app, ["dequantize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)), wanted)


@pytest.mark.parametrize("format", ["hlane", "fix4", "fix3"])
def test_gpt2_compressed_without_loss(format: str, tmp_path: Path) -> None:
    """Matrices keep the axes that files give them, square or not."""
    model = tiny_models.tiny_model("gpt2").bfloat16()
    model.save_pretrained(tmp_path / "plain")
    compression.compress(tmp_path / "plain", Compression(format), tmp_path / "in")
    assert near(logits(plugin.from_pretrained(tmp_path / "in", dtype=torch.float32)), logits(model.float()))


def test_falcon_is_packed(tmp_path: Path) -> None:
    """By load_weights_ from a folder of GPTQ, quantized on the way, and by quantize_; dense again it has its own class."""
    model = tiny_models.tiny_model("falcon")
    model.save_pretrained(tmp_path / "plain")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=plugin.QdslConfig("int8_channel"), dtype=torch.float32)
    report = qdsl.quantize_(model, "int8_channel", ["lm_head"])
    linear = loaded.transformer.h[0].self_attention.dense
    assert len(report.quantized) == len(loaded.hf_quantizer.report.packed) == 12 and isinstance(linear, QuantizedLinear)
    wanted = logits(model)
    assert near(logits(loaded), wanted) and near(logits(loaded.dequantize()), wanted)
    assert type(loaded.transformer.h[0].self_attention.dense).__name__ == "FalconLinear"
