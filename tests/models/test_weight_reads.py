"""Modules that need the numbers of other modules' weights, and square weights [K, N] left as they are: logits are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qdsl
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.weight_reads import weight_reads
from tests.support import producer_folders, tiny_models
from tests.support.producer_folders import KINDS

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")
IDS = torch.arange(24).view(2, 12)
RWKV = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "rescale_every": 1, "context_length": 32,
        "attention_hidden_size": 64, "intermediate_size": 96}


def model_of(model_type: str) -> Any:
    torch.manual_seed(0)
    if model_type != "rwkv":
        return tiny_models.tiny_model(model_type).float().eval()
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**RWKV)).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(IDS).logits
    return result


def near(value: Tensor, wanted: Tensor) -> bool:
    return bool((value - wanted).norm() <= 1e-5 * wanted.norm())


def fp8_folder(model: Any, folder: Path, transposed: tuple[str, ...] = ()) -> None:
    """Write a model with FP8 numbers in all its projections, with the axes that it has; the model gets these numbers.

    transposed: names of modules whose weights are written with the other axes.
    """
    kind = KINDS["compressed-tensors fp8 channel"]
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D) and name.endswith("weight") and "head" not in name:
            is_transposed = name.removesuffix(".weight").endswith(transposed or ("none",))
            packed = kind.stored.pack(tensor.t().contiguous() if is_transposed else tensor)
            tensors |= producer_folders.named(name.removesuffix(".weight"), packed)
            dense = packed.format.dequantize(packed, torch.float32)
            tensor.copy_(dense.t() if is_transposed else dense)
        else:
            tensors[name] = tensor.clone()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    producer_folders.write_files(folder, tensors, {"config.json": {**config, "quantization_config": dict(kind.settings or {})}},
                                 model.config.model_type)


# By model type: the layers that its code reads.
READS = {"rwkv": {"attention.output", "feed_forward.value"}, "mamba": {"mixer.dt_proj"}, "falcon_mamba": {"mixer.dt_proj"},
         "mamba2": set(), "bloom": set(), "gpt2": set(), "openai-gpt": set()}


@pytest.mark.parametrize("model_type", READS)
def test_fp8_as_the_model_has_its_axes(model_type: str, tmp_path: Path) -> None:
    """Right in transformers and by load_weights_, also of the saved folder; only weights that code reads are plain."""
    model = model_of(model_type)
    fp8_folder(model, tmp_path / "in")
    loaded = plugin.from_pretrained(tmp_path / "in", dtype=torch.float32)
    filled = type(model)(model.config)
    report = qdsl.load_weights_(filled, tmp_path / "in")
    loaded.save_pretrained(tmp_path / "again")              # RWKV changes its weights when it runs
    wanted = logits(model)
    assert near(logits(loaded), wanted) and near(logits(filled), wanted)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name]
    read = {name for name in linears if name.endswith(tuple(READS[model_type]) or ("none",))}
    assert {name for name in linears if not isinstance(loaded.get_submodule(name), QuantizedLinear)} == read
    assert {name for name, why in report.dense.items() if "uses its weight as a plain tensor" in why} == {
        f"{name}.weight" for name in read}
    load = plugin.from_pretrained if loaded.hf_quantizer.report.packed else type(model).from_pretrained
    assert near(logits(load(tmp_path / "again", dtype=torch.float32)), wanted)


@pytest.mark.parametrize("model_type", ["gpt2", "openai-gpt"])
def test_squares_are_stored_as_the_others_or_refused(model_type: str, tmp_path: Path) -> None:
    """Where the others are [N, K], squares are; where they are both, nobody can tell."""
    model = model_of(model_type)
    fp8_folder(model, tmp_path / "all", ("c_attn", "c_fc", "c_proj"))
    assert near(logits(plugin.from_pretrained(tmp_path / "all", dtype=torch.float32)), logits(model))
    fp8_folder(model_of(model_type), tmp_path / "some", ("c_attn",))
    with pytest.raises(LoadError, match=r"attn\.c_proj.* is square, and others of its class are stored both ways"):
        plugin.from_pretrained(tmp_path / "some", dtype=torch.float32)


@pytest.mark.parametrize("model_type", ["rwkv", "mamba"])
def test_quantized_models_run(model_type: str) -> None:
    """quantize_ and quantization while a model is loaded leave such weights, and say so."""
    model = model_of(model_type)
    report = qdsl.quantize_(model, "int8_channel")
    read = {name for name, why in report.skipped.items() if "plain tensor" in why}
    assert read and all(name.endswith(tuple(READS[model_type])) for name in read) and report.quantized
    assert logits(model).isfinite().all()


class Around(nn.Module):
    """A block that uses its layers in every way that counts, and in some that do not."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.slow = slow
        self.called, self.read, self.asked, self.written, self.unused = (nn.Linear(4, 4) for _ in range(5))
        self.inner: Any = nn.ModuleDict({"deep": nn.Linear(4, 4), "slowly": nn.Linear(4, 4)})
        self.named = nn.Linear(4, 4)
        self.listed, self.visited = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = functional.linear(self.called(x).to(self.asked.weight.dtype), self.read.weight)
        if self.slow and x.dim():
            x = x @ self.inner.slowly.weight
        if self.training:
            x = x @ self.called.weight
        return self.other(x) if isinstance(self.asked.weight, Tensor) else x

    def other(self, x: Tensor) -> Any:
        self.written.weight.div_(2)
        block, layer = self, self.called
        layer = self.named
        for own in self.visited:
            x = x @ own.weight
        x = layer(x) @ layer.weight @ self.listed[1].weight
        return x @ block.inner.deep.weight

    def never_called(self) -> Tensor:
        return self.unused.weight


@pytest.mark.parametrize("slow", [False, True])
def test_reads_are_found(slow: bool) -> None:
    model = nn.Sequential(Around(slow))
    lists = {f"0.{name}.{place}" for name in ("listed", "visited") for place in (0, 1)}
    wanted = {"0.read", "0.written", "0.inner.deep", "0.named", *lists} | ({"0.inner.slowly"} if slow else set())
    reasons = weight_reads(dict(model.named_modules()))
    assert reasons == dict.fromkeys(wanted, "Around uses its weight as a plain tensor")
    assert set(qdsl.quantize_(model, "int8_channel").skipped) == wanted
