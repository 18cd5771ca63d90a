"""Quantized layers in models: loaded, left empty, quantized in place, offloaded, adapted; embeddings."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import qdsl
from qdsl.generated import fp8_block, fp8_tensor, int_group, q4_0, q8_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.module import NoWeight
from qdsl.runtime.weight import assemble
from tests.support import formats
from tests.support.formats import same_bits
from tests.support.traits import TRAITS, W4, sample, stack, weights

# -- the module --------------------------------------------------------------------------------------------------------


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it comes in, and not when the layer runs: that would make a GPU wait."""
    layer = int_group.Linear(weights()["in order"][1].apply(torch.clone))
    calls: list[str] = []
    real = assemble.has_columns_in_order
    monkeypatch.setattr(assemble, "has_columns_in_order", lambda *args: calls.append("looked") or real(*args))
    x = sample(1, 64).requires_grad_()

    def looks(change: Callable[[nn.Module], Any]) -> int:
        change(layer)
        before = len(calls)
        for _ in range(3):
            layer(x).sum().backward()
        return len(calls) - before

    assert looks(lambda layer: layer) == 0
    assert looks(lambda layer: layer.half().float()) == 0
    assert looks(lambda layer: layer.load_state_dict(weights()["act-order"][1].tensors)) == 0
    layer = copy.deepcopy(layer)
    assert looks(lambda layer: layer) == 0
    index = nn.Parameter(weights()["in order"][1].tensors["g_idx"].clone(), requires_grad=False)
    assert looks(lambda layer: layer._parameters.update(g_idx=index)) == 1


def test_a_tensor_that_is_put_in_place_of_another_is_looked_at() -> None:
    """As offloading and loaders do that know nothing of load_state_dict."""
    ordered, shuffled = (weights()[name][1] for name in ("in order", "act-order"))
    x = sample(2, 64)
    for first, second in ((ordered, shuffled), (shuffled, ordered)):
        layer = int_group.Linear(first)
        layer._parameters["g_idx"] = nn.Parameter(second.tensors["g_idx"], requires_grad=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert "g_idx" in ops.weight_key(layer.packed)[1].names   # not looked at yet, and not taken to be in order
        assert same_bits(layer(x), int_group.linear(x, second))
    layer._parameters["g_idx"] = nn.Parameter(ordered.tensors["g_idx"] + 9, requires_grad=False)
    with pytest.raises(FormatError, match=r"'g_idx' puts column 0 into group 9; there are groups 0 to 1"):
        layer(x)
    layer = int_group.Linear(ordered)._apply(lambda tensor: torch.full_like(tensor, 9))      # as to_empty, but not by chance
    with pytest.raises(FormatError, match="group 9"):
        layer(x)
    layer = int_group.Linear(ordered)
    layer._parameters["scales"] = nn.Parameter(ordered.tensors["scales"].bfloat16(), requires_grad=False)
    with pytest.raises(FormatError, match=r"'scales' has become bfloat16 \[2, 64\]; the weight stores float16 \[2, 64\]"):
        layer(x)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("trait", "name", "dtype"), [
    ("in order", "scales", torch.float32), ("in order", "scales", torch.bfloat16), ("in order", "qweight", torch.int64),
    ("in order", "g_idx", torch.int64), ("fp8", "weight", torch.float32), ("fp8", "weight", torch.int8),
    ("without zeros", "weight", torch.float32), ("without zeros", "weight", torch.uint8), ("blocks", "blocks", torch.int8),
    ("fp8", "weight_scale_inv", torch.float64),
])
def test_a_dtype_that_torch_would_cast_is_refused(trait: str, name: str, dtype: torch.dtype, assign: bool) -> None:
    """With the key and both dtypes, beside what else is wrong; and nothing at all is loaded into that layer."""
    module, packed = weights()[trait]
    model = nn.Sequential(module.Linear(packed.apply(torch.clone)))
    state = {f"0.{key}": torch.zeros_like(tensor) for key, tensor in packed.tensors.items()}
    state[f"0.{name}"] = packed.tensors[name].to(dtype)
    stored = str(packed.tensors[name].dtype)[6:]
    with pytest.raises(RuntimeError, match=rf"dtype mismatch for 0\.{name}: .*has {str(dtype)[6:]}, .*stores {stored}"):
        model.load_state_dict(state, assign=assign)
    assert all(same_bits(tensor, packed.tensors[key]) for key, tensor in model[0].packed.tensors.items())


@pytest.mark.parametrize("assign", [False, True])
def test_what_means_the_same_is_loaded(assign: bool) -> None:
    """16-bit scales into float32, bytes into 8-bit floats, and axes of one element."""
    packed = fp8_block.quantize(sample(64, 64), bn=128, bk=128)
    narrow = {**packed.tensors, "weight_scale_inv": packed.tensors["weight_scale_inv"].bfloat16()}
    wanted = fp8_block.wrap(narrow)
    layer = fp8_block.Linear(packed.apply(torch.zeros_like))
    layer.load_state_dict({**narrow, "weight": narrow["weight"].view(torch.uint8)}, assign=assign)
    assert same_bits(layer.dequantize(torch.float32), fp8_block.dequantize(wanted, torch.float32))
    assert [str(p.dtype)[6:] for p in layer.parameters()] == ["float8_e4m3fn", "float32"]
    one = fp8_tensor.quantize(sample(64, 64))
    layer = fp8_tensor.Linear(one.apply(torch.zeros_like))
    layer.load_state_dict({**one.tensors, "weight_scale": one.tensors["weight_scale"].reshape(1, 1)}, assign=assign)
    assert same_bits(layer.dequantize(torch.float32), fp8_tensor.dequantize(one, torch.float32))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_layer_without_a_weight_waits_for_one(trait: str) -> None:
    """On meta without a byte of it; loaded by assigning; or made room for, and loaded by copying."""
    module, packed = weights()[trait]
    optional = [name for name, stored in packed.layout.tensors.items() if stored.optional and name in packed.tensors]
    bias = sample(64)
    full = module.Linear(packed, bias)
    x = sample(2, 64)
    for device, assign in (("meta", True), ("meta", False), ("cpu", False)):
        layer = module.Linear.empty(packed.shape, packed.storage, bias=True, device=device, optional=optional, **packed.params)
        assert isinstance(layer, nn.Linear) and {p.device.type for p in layer.parameters()} == {device}
        assert {name: (p.shape, p.dtype) for name, p in layer.named_parameters()} == {
            name: (p.shape, p.dtype) for name, p in full.named_parameters()}
        layer = layer if assign or device == "cpu" else layer.to_empty(device="cpu")
        layer.load_state_dict(full.state_dict(), assign=assign)
        assert same_bits(layer(x), full(x)) and same_bits(copy.deepcopy(layer)(x), full(x))
    assert not list(module.Linear.empty((128, 256)).buffers())


def test_an_empty_layer_says_what_does_not_fit() -> None:
    with pytest.raises(FormatError, match=r"q4_0.gguf: K = 33 must be a multiple of 32"):
        q4_0.Linear.empty((8, 33))
    with pytest.raises(FormatError, match="no storage 'awq' for bits=8"):
        int_group.Linear.empty((64, 64), "awq", bits=8)
    with pytest.raises(FormatError, match=r"int_group\.gptq_v2 has no optional tensor 'scales'; it has g_idx"):
        int_group.Linear.empty((64, 64), "gptq_v2", optional=["scales"])
    assert int_group.Linear.empty((64, 64), "gptq_v2", dtype=torch.bfloat16).compute_dtype == torch.bfloat16


def test_what_stands_for_the_weight() -> None:
    """Shape, device and the dtype of a dense layer; no numbers, and a word of where they are."""
    layer = q4_0.Linear(q4_0.quantize(sample(8, 64)))
    assert isinstance(layer.weight, NoWeight) and hasattr(layer, "weight") and not hasattr(layer.weight, "clone")
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((8, 64), torch.float32, torch.device("cpu"))
    assert (layer.weight.size(1), layer.weight.dim(), layer.weight.numel()) == (64, 2, 512)
    assert layer.half().weight.dtype == torch.float16 and layer.to("meta").weight.device.type == "meta"
    assert copy.deepcopy(nn.Sequential(layer).bfloat16())[0].weight.dtype == torch.bfloat16
    for use in (lambda: nn.functional.linear(sample(2, 64), layer.weight), lambda: layer.weight.data.clone(),
                lambda: layer.weight.T, lambda: layer.weight + 1, lambda: layer.weight.data.mul_(2), lambda: list(layer.weight)):
        with pytest.raises((AttributeError, TypeError), match=r"dequantize\(\) gives it, dense\(\)"):
            use()
    with pytest.raises(FormatError, match="loaded or quantized, not initialised"):
        layer.reset_parameters()
    other = fp8_block.Linear(weights()["fp8"][1])
    assert isinstance(other.get_parameter("weight"), nn.Parameter) and other.weight.dtype == torch.float32
    assert dict(other.named_parameters())["weight"].dtype == torch.float8_e4m3fn
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing


@pytest.mark.parametrize("trait", TRAITS)
def test_a_layer_becomes_dense(trait: str) -> None:
    module, packed = weights()[trait]
    layer = module.Linear(packed, sample(64)).bfloat16()
    dense = layer.dense()
    assert type(dense) is nn.Linear and dense.bias is layer.bias
    assert same_bits(dense.weight.detach(), module.dequantize(packed, torch.bfloat16))
    torch.testing.assert_close(dense(sample(3, 64).bfloat16()), layer(sample(3, 64).bfloat16()), rtol=2e-2, atol=2e-2)


# -- quantize_ ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers of every sort that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.first = nn.Linear(64, 96)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(96, 64, bias=False)), nn.Sequential(nn.Linear(64, 64))])
        self.again = self.blocks[1][0]
        self.odd = nn.Linear(33, 8)
        self.attention = nn.MultiheadAttention(64, 2)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda *_: None)
        self.on_meta = nn.Linear(64, 64, device="meta")
        self.done = q8_0.Linear(q8_0.quantize(sample(64, 64)))
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_is_quantized_in_place() -> None:
    torch.manual_seed(0)
    model = Model().bfloat16().eval()
    dense = copy.deepcopy(model)
    report = qdsl.quantize_(model, q4_0)
    assert list(report.quantized) == ["first", "blocks.0.0", "blocks.1.0", "again", "head"]
    assert report.quantized["first"] == (2 * 96 * 64, 18 * 96 * 2)
    reasons = {"odd": "K = 33 must be a multiple of 32", "attention.out_proj": "NonDynamicallyQuantizableLinear is more",
               "hooked": "hooks", "on_meta": "on meta", "done": "weight of q8_0 already"}
    assert report.skipped.keys() == reasons.keys() and all(reasons[name] in why for name, why in report.skipped.items())
    assert list(report.notes) == ["head"] and "embed.weight" in report.notes["head"]
    assert all(f"  {name}: {why}" in str(report) for name, why in report.skipped.items()) and str(report).startswith("5 layers")
    assert model.again is model.blocks[1][0] and not model.first.training and model.head.compute_dtype == torch.bfloat16
    for name in report.quantized:
        new, old = model.get_submodule(name), dense.get_submodule(name)
        assert isinstance(new, q4_0.Linear)
        assert same_bits(new.packed.tensors["blocks"], q4_0.quantize(old.weight).tensors["blocks"])
        assert (new.bias is None) == (old.bias is None)
    again = qdsl.quantize_(model, q4_0)
    assert not again.quantized and len(again.skipped) == 10


def test_a_bias_stays_the_parameter_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    bias = model[0].bias
    qdsl.quantize_(model, "q4_0")
    assert model[0].bias is bias and isinstance(model[0], q4_0.Linear)


def test_which_layers_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers to skip by pattern, and by layer and name; options of the format; a format by its spec."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "w4.yaml").write_text(W4)
    model = Model()
    report = qdsl.quantize_(model, tmp_path / "w4.yaml",
                            lambda layer, name: not name.startswith("blocks") or layer.in_features != 64)
    assert list(report.quantized) == ["blocks.1.0", "again"] and not report.skipped
    report = qdsl.quantize_(model, int_group, lambda layer, name: name != "first", storage="awq", bits=4, group=64)
    assert model.first.packed.storage == "awq" and model.first.packed.params == {"bits": 4, "group": 64, "scale_type": "f16"}


@pytest.mark.parametrize(("options", "message"), [
    ({"bits": 9}, "bits is one of"), ({"colour": 1}, "has no parameter 'colour'"), ({"storage": "gguf"}, "no storage 'gguf'"),
    ({"storage": "awq", "bits": 8}, "no storage 'awq'"),
])
def test_options_are_refused_before_anything_changes(options: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(FormatError, match=message):
        qdsl.quantize_(model, int_group, **options)
    with pytest.raises(FormatError, match="no quantizer yet"):
        qdsl.quantize_(model, formats.module(formats.NO_QUANTIZER))
    with pytest.raises(FormatError, match="itself a linear layer"):
        qdsl.quantize_(nn.Linear(64, 64), q4_0)
    assert type(model.first) is nn.Linear


def test_one_layer_at_a_time_and_nothing_lost_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is quantized, the one before is gone; when that fails, the model still runs, and can be gone on with."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    weight_refs = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    real = type(q4_0.FORMAT).quantize

    def quantize(self: Any, weight: Tensor, **options: Any) -> PackedWeight:
        gc.collect()
        alive.append(sum(ref() is not None for ref in weight_refs))
        if len(alive) == 3:
            raise KeyboardInterrupt
        return real(self, weight, **options)

    monkeypatch.setattr(type(q4_0.FORMAT), "quantize", quantize)
    with pytest.raises(KeyboardInterrupt):
        qdsl.quantize_(model, q4_0)
    assert alive == [4, 3, 2]
    assert [isinstance(layer, QuantizedLinear) for layer in model] == [True, True, False, False]
    model(sample(2, 64))
    assert list(qdsl.quantize_(model, q4_0).quantized) == ["2", "3"]


# -- accelerate and PEFT, where they are installed ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_accelerate_offloads_and_loads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    model, x = stack(), sample(3, 64)
    wanted = model(x)
    for offloaded in (accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu"),
                      accelerate.disk_offload(copy.deepcopy(model), str(tmp_path / "disk"), execution_device="cpu")):
        assert {p.device.type for p in offloaded.parameters()} == {"meta"}
        assert same_bits(offloaded(x), wanted)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    places = {str(i): "disk" if i % 3 == 1 else "cpu" for i in range(len(model))}
    for device_map in ({"": "cpu"}, places):
        empty = copy.deepcopy(model).to("meta")
        loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "model.safetensors"), device_map=device_map,
                                                         offload_folder=str(tmp_path / "offload"))
        assert same_bits(loaded(x), wanted)
    cast = accelerate.load_checkpoint_and_dispatch(copy.deepcopy(model).to("meta"), str(tmp_path / "model.safetensors"),
                                                   device_map={"": "cpu"}, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match=r"'scales' has become bfloat16"):
        cast(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["q4_0", "int_group", "fp8_block", "int8_channel", "bf16"])
def test_peft_trains_an_adapter(name: str) -> None:
    """Adapters beside packed layers, in float32, with the dense model's gradients, and no other parameter trained."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    assert len(qdsl.quantize_(model, name, **({"group": 32} if name == "int_group" else {})).quantized) == 2
    dense = nn.Sequential(model[0].dense(torch.float32), nn.Tanh(), model[2].dense(torch.float32))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
    x = sample(5, 64)
    adapted = []
    for base in (model, dense):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(base, config))
        trained = {key: p for key, p in adapted[-1].named_parameters() if p.requires_grad}
        assert len(trained) == 4 and all("lora" in key and p.dtype == torch.float32 for key, p in trained.items())
        adapted[-1](x).square().mean().backward()
    for key, p in trained.items():
        torch.testing.assert_close(adapted[0].get_parameter(key).grad, p.grad, rtol=1e-5, atol=1e-6)
    first = adapted[0](x).square().mean()
    torch.optim.SGD([p for p in adapted[0].parameters() if p.requires_grad], 0.05).step()
    assert adapted[0](x).square().mean() < first
    for key, tensor in before.items():
        layer, leaf = key.split(".")
        assert same_bits(dict(adapted[0].named_parameters())[f"base_model.model.{layer}.base_layer.{leaf}"].detach(), tensor)
    if name == "q4_0":
        with pytest.raises((TypeError, ValueError), match=r"qdsl\.models\.peft\.merge\(model\)"):
            adapted[0].merge_and_unload()


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q6_k", "int8_channel", "fp8_block", "hlane", "df11", "nf4"])
def test_embeddings_are_rows_of_the_weight(name: str) -> None:
    form = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = form.quantize(weight)
    layer, ids = form.Embedding(packed, padding_idx=3), torch.tensor([[5, 0, 95], [7, 7, 64]])
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)
        wanted = torch.nn.functional.embedding(ids, form.dequantize(packed, dtype))
        assert same_bits(layer(ids), wanted) and same_bits(layer.dense()(ids), wanted)
    assert layer(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 256)
    again = form.Embedding.empty((96, 256), packed.storage, **packed.params)
    again.load_state_dict(layer.state_dict(), assign=True)
    assert same_bits(again.dequantize(), layer.dequantize())
    with pytest.raises(IndexError):
        layer(torch.tensor([96]))


def test_rows_alone_are_decoded_where_each_is_stored_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = q4_0.Embedding(q4_0.quantize(torch.randn(1000, 64)))
    shapes: list[tuple[int, int]] = []
    decode = q4_0.FORMAT.dequantize
    monkeypatch.setattr(q4_0.FORMAT, "dequantize", lambda packed, dtype: shapes.append(packed.shape) or decode(packed, dtype))
    layer(torch.tensor([1, 999, 1]))
    assert shapes == [(3, 64)]


def test_one_packed_weight_for_words_and_for_their_logits() -> None:
    """Tied weights: both layers hold the same memory."""
    packed = q4_0.quantize(torch.randn(96, 64))
    words, head = q4_0.Embedding(packed), q4_0.Linear(packed)
    ids = torch.arange(96)
    assert same_bits(words(ids), head.dequantize(torch.float32))
    assert words.blocks.data_ptr() == head.blocks.data_ptr()
