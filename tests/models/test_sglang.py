"""The plug-in for SGLang against the signatures of its sources: it runs on modules that have these names, on two ranks."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qdsl.checkpoint.report.shards import ShardError
from qdsl.models import sglang as plugin
from tests.support.paths import ROOT
from tests.support.producer_folders import Stored, write_own
from tests.support.sglang_signatures import RECORDED

SIGNATURES = json.loads(RECORDED.read_text())["modules"]
SOURCE = ROOT / "qdsl" / "models" / "sglang" / "config.py"
BLOCK = "model.layers.0."
SHAPES = {"self_attn.q_proj": (512, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
          "self_attn.o_proj": (256, 512), "mlp.down_proj": (256, 512)}
Group = namedtuple("Group", "rank_in_group world_size")


class Layer(nn.Module):
    """A linear layer of SGLang, as far as the plug-in sees it."""

    def __init__(self, config: Any, prefix: str, sizes: list[int], columns: int, group: Group, is_row: bool = False,
                 **attributes: Any) -> None:
        super().__init__()
        self.__dict__ |= {"tp_group": group, "output_size": sum(sizes), **attributes}
        self.quant_method = config.get_quant_method(self, prefix)
        own = [size if is_row else size // group.world_size for size in sizes]
        self.quant_method.create_weights(self, columns // group.world_size if is_row else columns, own, columns, sum(sizes),
                                         torch.float32, weight_loader=None)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of these names; functions do what the test needs of SGLang's."""
    own = {"LinearBase": Layer, "VocabParallelEmbedding": type("VocabParallelEmbedding", (nn.Module,), {}),
           "QUANTIZATION_METHODS": {}, "add_quantization_method_choices": lambda names: None,
           "get_group_rank_size": lambda group: (0, 1) if group is None else tuple(group)}
    result = {}
    for name, values in SIGNATURES.items():
        for part in (name[:end] for end in [*(place for place, char in enumerate(name) if char == "."), len(name)]):
            result.setdefault(part, ModuleType(part))
            monkeypatch.setitem(sys.modules, part, result[part])
        for key in values:
            setattr(result[name], key, own[key] if key in own else type(key, (), {}))
    for name, module in result.items():
        if "." in name:
            setattr(result[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    monkeypatch.delitem(sys.modules, "qdsl.models.sglang.config", raising=False)
    return result


def test_everything_that_it_takes_is_there() -> None:
    imported = {(node.module, alias.name) for node in ast.walk(ast.parse(SOURCE.read_text()))
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang") for alias in node.names}
    imported -= {("sglang.srt.model_loader", "loader")}
    assert {(module, name) for module, name in imported if name not in SIGNATURES[module]} == set()
    linear = SIGNATURES["sglang.srt.layers.linear"]
    assert all("tp_group" in linear[name]["attributes"] for name in ("ColumnParallelLinear", "RowParallelLinear"))
    assert {"total_num_heads", "total_num_kv_heads", "head_size", "v_head_size"} <= {*linear["QKVParallelLinear"]["attributes"]}
    assert {"output_sizes"} <= {*linear["MergedColumnParallelLinear"]["attributes"]}
    assert {"shard_indices", "tp_group"} <= {
        *SIGNATURES["sglang.srt.layers.vocab_parallel_embedding"]["VocabParallelEmbedding"]["attributes"]}


def test_methods_take_what_they_are_called_with(modules: dict[str, ModuleType]) -> None:
    """The parameters of the base classes' methods, in their order."""
    from qdsl.models.sglang.config import PackedLinearMethod, QdslConfig

    recorded = SIGNATURES["sglang.srt.layers.quantization.base_config"]
    checked = set()
    for own, base in ((PackedLinearMethod, "LinearMethodBase"), (PackedLinearMethod, "QuantizeMethodBase"),
                      (QdslConfig, "QuantizationConfig")):
        for name, parameters in recorded[base]["methods"].items():
            if name.startswith("_") or not hasattr(own, name) or (base, name) == ("QuantizeMethodBase", "create_weights"):
                continue
            wanted = [part for part in parameters if part not in ("self", "cls") and "*" not in part]
            taken = [part for part in inspect.signature(getattr(own, name)).parameters if part != "self"]
            assert taken[:len(wanted)] == wanted, name
            checked.add(name)
    assert {"create_weights", "apply", "process_weights_after_loading", "get_quant_method", "from_config", "get_name",
            "get_min_capability", "get_config_filenames", "override_quantization_method", "get_scaled_act_names",
            "get_supported_act_dtypes"} <= checked


def test_two_ranks(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """q, k and v in one layer, and columns: the ranks together compute what the decoded weights do."""
    stored = {"self_attn.k_proj": Stored("fp8_channel", "safetensors"), "mlp.down_proj": Stored("hlane", "hlane")}
    draw = torch.Generator().manual_seed(0)
    packed = {BLOCK + name: stored.get(name, Stored("q8_0", "gguf")).pack(torch.randn(shape, generator=draw).bfloat16())
              for name, shape in SHAPES.items()}
    dense = {name: weight.format.dequantize(weight, torch.float32) for name, weight in packed.items()}
    write_own(tmp_path / "model", packed, {}, {})
    loader, tensors = modules["sglang.srt.model_loader.loader"], weights_of(tmp_path / "model")
    loader._get_quantization_config = lambda model_config, load_config: \
        modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS["qdsl"].from_config({"quant_method": "qdsl"})
    loader.DefaultModelLoader._get_all_weights = lambda self, model_config, model: iter(tensors.items())
    plugin.register()
    x, wide = torch.randn(3, 256, generator=draw), torch.randn(3, 512, generator=draw)
    sums: dict[str, Tensor] = {}
    heads = {"total_num_heads": 8, "total_num_kv_heads": 2, "head_size": 64, "v_head_size": 64}
    for rank in range(2):
        config = loader._get_quantization_config(SimpleNamespace(model_path=str(tmp_path / "model")), None)
        group = Group(rank, 2)
        layers = {"self_attn.qkv_proj": Layer(config, f"{BLOCK}self_attn.qkv_proj", [512, 128, 128], 256, group, **heads),
                  "self_attn.o_proj": Layer(config, f"{BLOCK}self_attn.o_proj", [256], 512, group, is_row=True),
                  "mlp.down_proj": Layer(config, f"{BLOCK}mlp.down_proj", [256], 512, group, is_row=True)}
        model = SimpleNamespace(quant_config=config)
        for name, tensor in loader.DefaultModelLoader()._get_all_weights(None, model):
            short, leaf = name.removeprefix(BLOCK).rsplit(".", 1)
            merged, shard = ("self_attn.qkv_proj", short[10]) if short[10] in "qkv" and "attn" in short else (short, None)
            param = layers[merged].get_parameter(leaf)
            param.weight_loader(param, tensor, *([] if shard is None else [shard]))
        for name, layer in layers.items():
            layer.quant_method.process_weights_after_loading(layer)
            own = x if "qkv" in name else wide.chunk(2, 1)[rank]
            product = layer.quant_method.apply(layer, own)
            if "qkv" in name:
                rows = torch.cat([dense[f"{BLOCK}self_attn.{part}_proj"].chunk(2)[rank] for part in "qkv"])
                torch.testing.assert_close(product, x @ rows.T, rtol=1e-5, atol=1e-4)
            else:
                sums[name] = sums.get(name, torch.zeros(())) + product
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        torch.testing.assert_close(sums[name], wide @ dense[BLOCK + name].T, rtol=1e-5, atol=1e-3)


def test_transforms_are_refused(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Before the model is built, with the layer, the transform and the reason."""
    packed = {f"{BLOCK}mlp.down_proj": Stored("q8_0", "gguf").pack(torch.zeros(64, 64, dtype=torch.bfloat16))}
    config = json.loads((write_own(tmp_path / "in", packed, {}, {}) / "config.json").read_text())
    config["quantization_config"]["transforms"] = {f"{BLOCK}mlp.down_proj": [{"kind": "rotate", "size": 32}]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    loader = modules["sglang.srt.model_loader.loader"]
    loader._get_quantization_config = lambda model_config, load_config: \
        modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS["qdsl"].from_config({"quant_method": "qdsl"})
    loader.DefaultModelLoader._get_all_weights = lambda self, model_config, model: iter(())
    plugin.register()
    with pytest.raises(ShardError, match=r"down_proj': the layer transforms x \(rotate 32\), which no engine does"):
        loader._get_quantization_config(SimpleNamespace(model_path=str(tmp_path / "in")), None)


def weights_of(path: Path) -> dict[str, Tensor]:
    from qdsl.checkpoint.files.folder import Folder

    with Folder(path) as folder:
        return {name: folder.tensor(name).clone() for name in folder.names()}
