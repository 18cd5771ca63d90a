"""Packed layers treated as any layer is: made on meta, initialised, cast, copied, pickled, offloaded, wrapped, trained beside."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.generated import int_group
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.torch.module import WIDER
from qdsl.runtime.torch.no_weight import NoWeight
from tests.support.covering import quarter_of
from tests.support.formats import ROOT, SHIPPED, same_bits
from tests.support.packed_layers import CPU, is_unchanged, layer_of, module_of, quantized, sample, stored_bits

FORMATS = [path.stem for path in SHIPPED]


def columns_of(name: str) -> int:
    """1024 columns, few where k-means would take time, or as many as the format fixes."""
    variant = next(iter(module_of(name).FORMAT.variants.values()))
    return next(iter(variant.storages.values())).fixed.get("K", 16 if name.startswith(("aqlm", "vptq")) else 1024)

LAYERS = ["fp8_block", "fp8_tensor", "int8_channel", "nf4", "q4_0", "hlane"]


# -- torch.device("meta") ----------------------------------------------------------------------------------------------

META = """
import importlib, sys
import torch
with torch.device("meta"):
    modules = {name: importlib.import_module(f"qdsl.generated.{name}") for name in sys.argv[1:]}
for inside in (False, True):
    for name, module in modules.items():
        variant = next(iter(module.FORMAT.variants.values()))
        if variant.encode is None:
            continue
        fixed = next(iter(variant.storages.values())).fixed
        columns = 16 if name.startswith(("aqlm", "vptq")) else 1024    # k-means takes time; any_precision takes K by 1024
        weight = torch.randn(128, fixed.get("K", columns), device="cpu")
        with torch.device("meta" if inside else "cpu"):
            packed = module.quantize(weight)
            decoded = module.dequantize(packed, torch.float32)
            layer, rows = module.Linear(packed), module.Embedding(packed)
            product, row = layer(weight[:2]), rows(torch.tensor([3], device="cpu"))
        assert {decoded.device.type, product.device.type, layer.device.type, row.device.type} == {"cpu"}, name
        assert (decoded - weight).abs().mean() < 0.7 and torch.isfinite(product).all(), name
        assert row.equal(decoded[3:4]), name
"""


def test_formats_imported_under_meta_work() -> None:
    """A library that builds models on meta imports modules there, too, and may quantize there."""
    done = subprocess.run([sys.executable, "-c", META, *quarter_of(FORMATS)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*LAYERS, "fix4", "fix3", "df11"])
def test_a_layer_on_meta_takes_tensors(name: str) -> None:
    """By assigning, for streams too, whose sizes are those of the weights; and by copying into a layer on the CPU."""
    module, full = module_of(name), layer_of(name)
    x = sample(2, 128)
    with torch.device("meta"):
        built = module.Linear(quantized(name))
    assert built.device == CPU and same_bits(built.dequantize(), full.dequantize())
    for device, assign in (("meta", True), ("cpu", False)):
        empty = module.Linear.empty((64, 128), bias=True, device=device)
        empty.load_state_dict(full.state_dict(), assign=assign)
        assert same_bits(empty(x), full(x))


# -- state_dicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LAYERS, "fix4", "fix3", "df11"])
def test_part_of_a_state_dict(name: str) -> None:
    """A bias alone is loaded; some tensors of a stream without the others are refused, and nothing is loaded."""
    layer = layer_of(name)
    before = stored_bits(layer)
    result = layer.load_state_dict({"bias": sample(64, seed=9)}, strict=False)
    assert set(result.missing_keys) == before.keys() - {"bias"} and not result.unexpected_keys
    assert same_bits(layer.bias.detach(), sample(64, seed=9))
    assert is_unchanged(layer, {**before, "bias": sample(64, seed=9)})
    layer.load_state_dict({}, strict=False)
    if layer.packed.layout.streams:
        before = stored_bits(layer)
        *most, last = (key for key in before if key != "bias")
        with pytest.raises(RuntimeError, match=f"are loaded together, and the state_dict lacks {last}"):
            layer.load_state_dict({key: torch.zeros_like(before[key]) for key in most}, strict=False)
        assert is_unchanged(layer, before)


# -- weight ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_weight_has_the_compute_dtype(name: str) -> None:
    """Of every format; the stored tensors keep their names and dtypes, and another layer may be tied to them."""
    module, shape = module_of(name), (256, columns_of(name))
    layer = module.Linear.empty(shape, dtype=torch.bfloat16, device="cpu")
    stored = {key: tensor.dtype for key, tensor in layer.state_dict().items()}
    assert layer.weight.dtype == torch.bfloat16 and layer.half().weight.dtype == torch.float16
    assert {key: p.dtype for key, p in layer.named_parameters()} == stored
    assert (layer.weight.device, layer.weight.requires_grad, layer.weight.ndim) == (CPU, False, len(layer.weight.shape))
    if "weight" in stored:
        assert layer._parameters["weight"].data_ptr() == layer.weight.data_ptr()
        assert layer.get_parameter("weight").shape == layer._parameters["weight"].shape
        other = module.Linear.empty(shape, device="cpu")
        other.weight = layer.weight
        assert other._parameters["weight"] is layer._parameters["weight"]
    else:
        assert layer.weight.shape == shape


class Casts(nn.Module):
    """As many models do: activations in the dtype of the next layer's weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.layer.weight.dtype and self.layer.weight.dtype != torch.int8:
            x = x.to(self.layer.weight.dtype)
        return self.layer(x) + self.layer.weight.shape.numel()


@pytest.mark.parametrize("name", LAYERS)
def test_activations_cast_to_the_weights_dtype(name: str) -> None:
    torch.compiler.reset()
    model, x = Casts(layer_of(name, torch.bfloat16)), sample(2, 128)
    assert model(x).dtype == torch.bfloat16
    wanted = model(x).detach()
    assert same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x).detach(), wanted)
    for strict in (False, True):
        assert same_bits(torch.export.export(model, (x,), strict=strict).module()(x).detach(), wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_initialisers_leave_a_packed_weight_alone(name: str) -> None:
    layer = layer_of(name)
    before = stored_bits(layer)
    for init in (nn.init.normal_, nn.init.uniform_, nn.init.zeros_, nn.init.ones_, nn.init.xavier_uniform_,
                 nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_,
                 nn.init.orthogonal_, lambda weight: weight.uniform_().mul_(2),
                 lambda weight: nn.init.constant_(weight, 1.0), lambda weight: nn.init.sparse_(weight, 0.1),
                 lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=1.0, b=2.0),
                 lambda weight: weight.data.normal_(0, 0.02), lambda weight: weight.data[3].zero_(),
                 lambda weight: weight[1:3].fill_(1.0)):
        assert issubclass(type(init(layer.weight)), NoWeight)
    assert is_unchanged(layer, before)
    for use in (lambda weight: weight.mul_(2), lambda weight: weight[0] + 1, lambda weight: weight.data.clone(),
                lambda weight: weight.copy_(sample(64, 128)), lambda weight: torch.stack([weight[0]]), lambda weight: weight.T,
                lambda weight: list(weight), lambda weight: setattr(weight, "data", sample(64, 128)), lambda weight: 2 * weight,
                lambda weight: weight.__setitem__(0, 1.0), copy.deepcopy, lambda weight: weight.float(),
                lambda weight: weight.requires_grad_()):
        with pytest.raises((AttributeError, TypeError), match=r"dequantize\(\) gives it"):
            use(layer.weight)
    assert is_unchanged(layer, before)


# -- copies and pickles ------------------------------------------------------------------------------------------------


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "quanto" and all(
        variant.encode for variant in module_of(name).FORMAT.variants.values())])
def test_copies_and_pickles(name: str) -> None:
    """Of weights and layers of every format; torch's own pickle of 8-bit floats cannot be read."""
    module, packed = module_of(name), module_of(name).quantize(sample(128 if name == "flute" else 64, columns_of(name)))
    wanted = module.dequantize(packed, torch.float32)
    for value in (packed, module.Linear(packed), module.Embedding(packed)):
        for way in (copy.copy, copy.deepcopy, by_torch, lambda value: pickle.loads(pickle.dumps(value))):  # noqa: S301
            other = way(value)
            other = other if isinstance(other, PackedWeight) else other.packed
            assert same_bits(module.dequantize(other, torch.float32), wanted)
    assert copy.deepcopy(packed).known_finite == packed.known_finite


def test_tied_layers_stay_tied_in_a_deep_copy() -> None:
    words, head = layer_of("fp8_block"), layer_of("fp8_block")
    head.weight = words.weight
    model = copy.deepcopy(nn.ModuleList([words, head]))
    assert model[0]._parameters["weight"] is model[1]._parameters["weight"]
    assert model[0]._parameters["weight"] is not words._parameters["weight"]


# -- casts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_a_sweep_over_parameters_keeps_codes_or_is_an_error(name: str, dtype: torch.dtype) -> None:
    """`p.data = p.data.to(dtype)`: what only widened numbers is undone, and all else is refused at the next use."""
    layer, x = layer_of(name), sample(2, 128)
    before, wanted = stored_bits(layer), layer(x)
    for p in layer.parameters():
        if p is not layer.bias:
            p.data = p.data.to(dtype)
    stored = [tensor.dtype for key, tensor in before.items() if key != "bias"]
    if all(kind == dtype or dtype in WIDER.get(kind, ()) for kind in stored):
        assert same_bits(layer(x), wanted) and is_unchanged(layer, before)
        return
    for _ in range(2):
        with pytest.raises(FormatError, match="has become"):
            layer(x)
    torch.compiler.reset()
    with pytest.raises(Exception, match="were cast"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)


def test_some_sweeps_are_undone() -> None:
    """Of 8-bit codes with float32 scales, and of what torch's own casts touch."""
    assert torch.float32 in WIDER[torch.float16] and torch.bfloat16 not in WIDER[torch.float16]
    for name in ("fp8_tensor", "nf4"):
        layer = layer_of(name)
        before = stored_bits(layer)
        for p in layer.parameters():
            p.data = p.data.to(torch.float32)
        assert is_unchanged(layer, before)                       # what is saved is what was loaded, before any use
        before.pop("bias")
        after = layer.half().bfloat16().double().float().state_dict()
        assert all(same_bits(after[key], tensor) for key, tensor in before.items())
    layer = layer_of("fp8_tensor")
    layer._parameters["weight"].data = layer._parameters["weight"].data.float() * 1.01
    with pytest.raises(FormatError, match="'weight' has become float32"):
        layer(sample(2, 128))


@pytest.mark.parametrize("dtype", [dtype for dtype in WIDER if dtype.itemsize == 1])
def test_casts_of_codes_can_be_undone(dtype: torch.dtype) -> None:
    """Every code of 8 bits comes back from every wider float."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    for wide in WIDER[dtype]:
        back = codes.to(wide).to(dtype)
        is_number = ~codes.float().isnan()
        assert same_bits(back[is_number].view(torch.uint8), codes[is_number].view(torch.uint8))
        assert back.float().isnan().equal(~is_number)


# -- accelerate and PEFT -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_accelerate_offloads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It loads tensors in the dtype of the attribute `weight`, and into the parameter."""
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    model = nn.Sequential(*[module_of(name).Linear(quantized(name, 64, 64), sample(64).to(dtype)) for _ in range(3)])
    x = sample(3, 64).to(dtype)
    wanted = model(x)
    for offloaded in (accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu"),
                      accelerate.disk_offload(copy.deepcopy(model), str(tmp_path / "disk"), execution_device="cpu")):
        for _ in range(2):
            assert same_bits(offloaded(x), wanted)
            assert {p.device.type for p in offloaded.parameters()} == {"meta"} and offloaded[0].weight.dtype == dtype
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    loaded = accelerate.load_checkpoint_and_dispatch(
        copy.deepcopy(model).to("meta"), str(tmp_path / "model.safetensors"), device_map={"0": "cpu", "1": "disk", "2": "cpu"},
        offload_folder=str(tmp_path / "offload"))
    assert same_bits(loaded(x), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*LAYERS, "fix4"])
def test_peft_adapts_linears_and_embeddings(name: str) -> None:
    peft = pytest.importorskip("peft")
    module = module_of(name)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = module.Embedding(quantized(name), padding_idx=0)
            self.first = module.Linear(quantized(name, 128, 128), sample(128))

        def forward(self, ids: Tensor) -> Tensor:
            return self.first(self.words(ids))

    model, ids = Model(), torch.tensor([[1, 63, 7]])
    plain, before = model(ids), stored_bits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["words", "first"], r=4, init_lora_weights=True))
    torch.testing.assert_close(adapted(ids), plain)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 4 and {p.dtype for p in trained} == {torch.float32}
    optimizer = torch.optim.Adam(trained, 0.01)
    losses = []
    for _ in range(4):
        loss = adapted(ids).square().mean()
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    adapters = peft.get_peft_model_state_dict(adapted)
    peft.set_peft_model_state_dict(adapted, adapters)            # by load_state_dict(strict=False)
    adapted.unload()
    assert is_unchanged(model, before)


# -- DDP and FSDP2: see also test_peft.py --------------------------------------------------------------------------------


def test_packed_parameters_by_name() -> None:
    model = nn.Sequential(layer_of("fp8_block"), nn.Linear(64, 8), nn.Sequential(layer_of("q4_0")))
    packed = qdsl.packed_parameters(model)
    assert list(packed) == ["0.weight", "0.weight_scale_inv", "2.0.blocks"]
    assert all(packed[name] is dict(model.named_parameters())[name] for name in packed)
    model._ddp_params_and_buffers_to_ignore = ["1.bias"]
    assert qdsl.ignore_packed_(model) == set(packed.values())
    assert set(model._ddp_params_and_buffers_to_ignore) == {"1.bias", *packed}
    assert list(qdsl.packed_parameters(model[0])) == ["weight", "weight_scale_inv"]


def test_an_index_that_is_changed_in_place_is_checked_again() -> None:
    """Where it was in order, kernels did not read it; one whose groups do not exist would be read from elsewhere."""
    packed = int_group.quantize(torch.randn(32, 64), "gptq_v2", bits=4, group=32)
    layer = int_group.Linear(packed)
    x = torch.randn(2, 64)
    before = layer(x)
    layer.g_idx.copy_(layer.g_idx.flip(0))
    changed = int_group.wrap({**packed.tensors, "g_idx": layer.g_idx.detach().clone()}, packed.shape, "gptq_v2", bits=4, group=32)
    assert torch.equal(layer(x), int_group.linear(x, changed)) and not torch.equal(layer(x), before)
    layer.g_idx[3] = 2
    with pytest.raises(FormatError, match="puts column 3 into group 2; there are groups 0 to 1"):
        layer(x)
