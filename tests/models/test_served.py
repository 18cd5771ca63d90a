"""What engines take of checkpoints whose tensors are not those of single weights: the same numbers, weight by weight."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.files.crc import FILE, text
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.checkpoint.report.shards import is_plain, piece
from qdsl.core.places import UnknownSpec
from qdsl.models.engine import EngineConfig
from qdsl.models.served import Served, assembled, decoding, gguf_path, open_gguf, source_tensors
from qdsl.models.shards import Collector
from tests.support import gguf_models, language_models
from tests.support.producer_folders import Stored, write_files, write_folder


def collected(layers: Iterable[Layer], weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The numbers of layers, by name, of tensors as a loader brings them."""
    collectors = {layer.name: Collector(layer, [piece(layer.name, layer, "N", 0, layer.shape[0])]) for layer in layers}
    places = {f"{name}.{leaf}": (own, leaf) for name, own in collectors.items() for leaf in own.storage_names}
    for name, tensor in weights:
        if name in places:
            places[name][0].take(places[name][1], tensor)
    return {name: own.parts()[0].dequantize(torch.float32) for name, own in collectors.items()}


def tensors_of(path: Path) -> dict[str, Tensor]:
    with Folder(path) as folder:
        return {name: folder.tensor(name).clone() for name in folder.names()}


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The messages of qdsl's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("qdsl").addHandler(handler)
    yield messages
    logging.getLogger("qdsl").removeHandler(handler)


@pytest.mark.parametrize(("format", "storage"), [("fp8_block", "safetensors"), ("int_group", "pack_quantized")])
def test_experts_of_a_stack(format: str, storage: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    packed = [Stored(format, storage).pack(torch.randn(256, 128, generator=draw).bfloat16()) for _ in range(3)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stacks = {f"{name}.{own}": torch.stack([weight.tensors[own] for weight in packed]) for own in packed[0].tensors}
    write_files(tmp_path / "model", stacks, {"config.json": {}}, "")
    served = Served.of_folder(tmp_path / "model")
    assert list(served.packed) == [f"model.layers.0.mlp.experts.{expert}.gate_up_proj" for expert in range(3)]
    result = collected(served.packed.values(), assembled(stacks.items(), served.assemblies))
    for weight, dense in zip(packed, result.values(), strict=True):
        assert torch.equal(dense, weight.format.dequantize(weight, torch.float32))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """By the names under which vLLM takes them one by one."""
    decoded = write_folder(tmp_path / "model", "mxfp4", "gpt_oss")
    served = Served.of_folder(tmp_path / "model")
    weights = dict(assembled(tensors_of(tmp_path / "model").items(), served.assemblies))
    first = "model.layers.0.mlp.experts.0."
    assert {f"{first}w13_weight", f"{first}w13_weight_scale", f"{first}w2_weight", f"{first}w2_weight_scale"} <= weights.keys()
    numbers = {}
    for name, layer in served.packed.items():
        collector = Collector(layer, [piece(name, layer, "N", 0, layer.shape[0])])
        for leaf in collector.storage_names:
            collector.take(leaf, weights[f"{name}_{leaf}"])
        numbers[name] = collector.parts()[0].dequantize(torch.float32)
    wanted = decoded["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(torch.stack([numbers[f"model.layers.0.mlp.experts.{expert}.w13"].t() for expert in range(4)]), wanted)


def test_weights_that_are_coded_together(tmp_path: Path) -> None:
    """Of DF11's groups come plain matrices, which are to be encoded."""
    plain = write_folder(tmp_path / "df11", "df11", "qwen3")
    config = EngineConfig()
    config.plan(Served.of_folder(tmp_path / "df11"))
    assert config.encoded == config.layers.keys() and all(map(is_plain, config.layers.values()))
    weights = dict(config.assembled(tensors_of(tmp_path / "df11").items()))
    for name, layer in config.layers.items():
        assert torch.equal(weights[f"{name}.weight"].float(), plain[f"{name}.weight"])
        assert config.collector(layer, []).encode is not None


def of_experts(name: str, wanted: Mapping[str, Tensor]) -> Tensor:
    """A weight by the name under which engines take it: gate and up of an expert may come as one, or by themselves."""
    stem, _, below = name.rpartition(".experts.")
    number, _, last = below.partition(".")
    if not stem:
        return wanted[f"{name}.weight"]
    if last in ("gate_proj", "up_proj"):
        gate, up = wanted[f"{stem}.experts.gate_up_proj"][int(number)].chunk(2)
        return gate if last == "gate_proj" else up
    return wanted[f"{stem}.experts.{last}"][int(number)]


@pytest.mark.parametrize("type", ["Q4_0", *TORCH, "Q4_0 F16", "BF16 Q4_0 F32", "F16 BF16 I32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_gguf_files(model_type: str, type: str, tmp_path: Path) -> None:
    """Rows in the order of the map, experts one by one, also those of plain numbers; and a file that is named."""
    file, model = gguf_models.written(tmp_path, model_type, type=type)
    assert gguf_path(tmp_path) == gguf_path(file) == gguf_path("elsewhere", str(file)) == file
    with closing(open_gguf(file, model.config)) as source:
        served, weights = Served.of_gguf(source), dict(source_tensors(source))
    wanted: Mapping[str, Tensor] = model.state_dict()
    assert bool(served.packed) == ("Q4_0" in type)
    assert {layer.format for layer in served.plain.values()} <= {kind.lower() for kind in type.split()} | {"f32"}
    for layers in (served.packed, served.plain):
        for name, dense in collected(layers.values(), weights.items()).items():
            assert torch.equal(dense, of_experts(name, wanted)), name
    for name in weights.keys() & wanted.keys():
        assert torch.equal(weights[name].float(), wanted[name]), name
    EngineConfig().plan(served)                                  # which asks for no format
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="has 2 GGUF files; name one"):
        gguf_path(tmp_path)


def test_parts_of_a_module_may_be_plain(tmp_path: Path) -> None:
    """Of one whose other parts are packed; a module whose parts are all plain is the engine's own."""
    file, model = gguf_models.written(tmp_path, "llama", type="Q4_0 F16 F64")
    with closing(open_gguf(file, model.config)) as source:
        config = EngineConfig()
        config.plan(Served.of_gguf(source))
    kinds = {tuple(layer.format for layer in config.parts(f"model.layers.{block}.{module}", nn.Module()))
             for block in range(4) for module in ("self_attn.qkv_proj", "mlp.gate_up_proj")}
    assert {("f16", "f32", "q4_0"), ("q4_0", "f16", "f32"), ("f32", "q4_0")} <= kinds
    assert not config.encoded


@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"])
@pytest.mark.parametrize("packed", [True, False])
def test_biases_without_a_place_are_refused(packed: bool, place: str, tmp_path: Path, warnings: list[str]) -> None:
    """Engines leave them out: beside packed and plain matrices, in merged modules too; zeros, and those with a place, pass."""
    write_folder(tmp_path / "model", "own q4_0", "qwen3") if packed else language_models.write_plain(tmp_path / "model", "qwen3")
    name, weights = f"model.layers.1.{place}.bias", tensors_of(tmp_path / "model")
    served = Served.of_folder(tmp_path / "model")
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

    def loaded(bias: Tensor, has_bias: bool, **settings: bool) -> list[str]:
        config = EngineConfig({"quant_method": "qdsl", **({} if packed else {"format": "q8_0", "skip": ["proj"]}), **settings})
        config.plan(served)
        for block in range(2):
            for module in modules:
                config.parts(f"model.layers.{block}.{module}", nn.Linear(4, 4, bias=has_bias, device="meta"))
        names = [name for name, _ in config.assembled({**weights, name: bias}.items())]
        assert not config.modules
        return names

    bias = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is bfloat16 \[4\], which may change what the layer"):
        loaded(bias, has_bias=False)
    assert name in loaded(bias, has_bias=True) and name in loaded(torch.zeros(4), has_bias=False) and not warnings
    assert name in loaded(bias, has_bias=False, allow_unknown=True) and f"not computed: tensor {name}" in "".join(warnings)


def test_a_plain_file_may_be_quantized(tmp_path: Path) -> None:
    file, model = gguf_models.written(tmp_path, "llama", type="F16")
    with closing(open_gguf(file, model.config)) as source:
        served = Served.of_gguf(source)
    config = EngineConfig({"quant_method": "qdsl", "format": "q8_0", "skip": ["down_proj"]})
    config.plan(served)
    assert config.encoded == {name for name in served.plain if "_proj" in name and "down_proj" not in name}
    with pytest.raises(UnknownSpec, match="no format 'q9'"):
        EngineConfig({"quant_method": "qdsl", "format": "q9"})


def test_layers_that_no_module_takes_are_decoded(tmp_path: Path) -> None:
    decoded = write_folder(tmp_path / "model", "own q4_0", "qwen3")
    served = Served.of_folder(tmp_path / "model")
    weights = tensors_of(tmp_path / "model")
    result = dict(assembled(weights.items(), [decoding(layer, torch.float32) for layer in served.packed.values()]))
    assert result.keys() == decoded.keys()
    assert all(torch.equal(tensor.float(), decoded[name]) for name, tensor in result.items())


@pytest.mark.parametrize(("kind", "is_narrow"), [
    ("compressed-tensors int8", True), ("fp8 tensor, static", True), ("modelopt fp8", True), ("fp8 block", True),
    ("compressed-tensors int4", False), ("torchao int8", False)])
def test_layers_whose_inputs_have_8_bits(kind: str, is_narrow: bool, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", kind, "qwen3")
    served = Served.of_folder(tmp_path / "model")
    assert served.quantizing_x == (served.packed.keys() if is_narrow else frozenset())


def test_entry_points_are_light() -> None:
    """Engines call them in all of their processes: nothing heavy is imported for them."""
    code = ("import sys, qdsl.models.vllm, qdsl.models.omni, qdsl.models.sglang; "
            "heavy = {'torch', 'transformers', 'vllm', 'triton'} & sys.modules.keys(); assert not heavy, heavy; "
            "qdsl.models.omni.register()")
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "qdsl is not available in this vllm-omni" in result.stderr


def test_files_are_verified_where_settings_say_so(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.ones(4)})
    config = EngineConfig({"quant_method": "qdsl", "verify": True})
    assert config.options == {} and config.verified(tmp_path) == tmp_path      # which states no checksums
    (tmp_path / FILE).write_text(text({"model.safetensors": {"a": 7}}))
    assert EngineConfig({"quant_method": "qdsl"}).verified(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="tensor 'a' is damaged"):
        config.verified(tmp_path)


def test_a_plain_model_needs_a_format(tmp_path: Path) -> None:
    plain = Served.of_folder(language_models.write_plain(tmp_path / "plain", "qwen3"))
    with pytest.raises(CheckpointError, match="None is no format to quantize them in"):
        EngineConfig({"quant_method": "qdsl"}).plan(plain)
    config = EngineConfig({"quant_method": "qdsl", "format": "q8_0", "skip": ["down_proj"]})
    config.plan(plain)
    assert config.encoded == {name.removesuffix(".weight") for name in language_models.weights("qwen3")
                              if language_models.is_projection(name) and "down_proj" not in name}


def test_x_in_8_bits_excludes_batch_invariance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hears of it before a weight is loaded; 'auto' leaves x as it is."""
    plain = Served.of_folder(language_models.write_plain(tmp_path / "plain", "qwen3"))
    monkeypatch.setattr(EngineConfig, "batch_invariant", True)
    settings = {"quant_method": "qdsl", "format": "q8_0"}
    with pytest.raises(CheckpointError, match=r'plain: products .* are not batch-invariant; leave "quantize_x" out'):
        EngineConfig({**settings, "quantize_x": True}).plan(plain)
    EngineConfig({**settings, "quantize_x": "auto"}).plan(plain)


@pytest.mark.parametrize(("setting", "is_warned"), [(True, True), ("auto", True), (False, False)])
def test_experts_take_x_as_it_is_and_say_so(setting: bool | str, is_warned: bool, warnings: list[str]) -> None:
    """Once for a model, where settings or the checkpoint want x in 8 bits."""
    config = EngineConfig({"quant_method": "qdsl", "quantize_x": setting})
    layer = Layer("model.experts.0.up_proj")
    config.checkpoint = Served(quantizing_x=frozenset({layer.name}))
    for _ in range(2):
        config.warn_of_experts("model.experts", [layer])
    assert warnings == is_warned * [
        "model.experts: products of packed experts take x as it is; quantize_x is for linear layers"]
