"""A model filled from a checkpoint, run, and saved as the same bytes: every format, every kind of place for a weight."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.descriptions import descriptions
from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.safetensors import CheckpointError, write
from qdsl.compress.run import compress
from qdsl.compress.units import Aim
from qdsl.convert.plan import full_name
from qdsl.generated import fp8_block, fp8_tensor, hlane, int8_channel, int_group, nf4, q4_0, q8_0
from qdsl.models.plan import LoadError
from qdsl.models.save import SaveError
from qdsl.runtime import PackedWeight
from qdsl.runtime.layers import QuantizedEmbedding, QuantizedLinear
from tests.support import formats

E = 2                                                            # experts


class Stack(nn.Module):
    """Experts in one parameter, as a model's forward uses them: one by one, and all in a product."""

    def __init__(self, experts: int, n: int, k: int, transposed: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, k, n) if transposed else torch.zeros(experts, n, k))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        weights = self.up if self.transposed else self.up[:].transpose(1, 2)
        return torch.bmm(x.expand(len(self.up), *x.shape), weights) if self.transposed else x @ weights


class Net(nn.Module):
    """An embedding, a head that shares its weight, a layer with a bias, experts as modules and in a stack, norm and buffer."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n, k)
        self.norm = nn.LayerNorm(k)
        self.up = nn.Linear(k, n)
        self.experts = nn.ModuleList([nn.Linear(k, n, bias=False) for _ in range(E)])
        self.stack = Stack(E, n, k)
        self.head = nn.Linear(k, n, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("angles", torch.arange(k).float().cpu(), persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.norm(self.embed(ids)) + self.angles
        return [self.up(x), *(expert(x) for expert in self.experts), *self.stack(x), self.head(x)]


def net(n: int, k: int, dtype: torch.dtype = torch.float32) -> Net:
    """A model on meta but for what its modules compute."""
    model = Net(n, k).to(dtype)
    angles = model.angles
    model = model.to("meta")
    model.head.weight = model.embed.weight
    model.angles = angles
    return model


def names_in_files(layer: str, packed: PackedWeight) -> dict[str, str]:
    """What a checkpoint calls the tensors of a layer."""
    return {name: full_name(Layer(layer), name, packed.layout.tensors[name].aliases) for name in packed.tensors}


def stacked(weights: list[PackedWeight], name: str) -> Tensor:
    """A tensor of all experts: run together where rows of one follow those of the other in it, else with an axis in front."""
    tensors = [weight.tensors[name] for weight in weights]
    is_flat = any(axis.dim == "N*K" for axis in weights[0].layout.tensors[name].axes)
    return torch.cat(tensors) if is_flat else torch.stack(tensors)


def plain_tensors(n: int, k: int) -> dict[str, Tensor]:
    return {"norm.weight": torch.linspace(0.5, 2, k), "norm.bias": torch.linspace(-1, 1, k), "up.bias": torch.linspace(-2, 2, n),
            "steps": torch.tensor([3, 1, 2])}


def own_config(packed: PackedWeight) -> dict[str, Any]:
    return {"model_type": "toy", "quantization_config": {"quant_method": "qdsl", "format": packed.format.name,
                                                         "storage": packed.storage, **packed.params}}


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True)
    write(path / "model.safetensors", tensors, {"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


IN_FILES = {(each.name, storage) for each in descriptions() for storages in each.variants.values() for storage in storages
            if not {"safetensors", "parts"} & each.detect.keys()}
CASES = [case for case in formats.cases() if (case.path.stem, case.storage) in IN_FILES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_place_of_a_model_holds_every_storage(case: formats.Case, tmp_path: Path) -> None:
    """Linear, Embedding, tied head, experts as modules and stacked: loaded, run, saved as the same bytes."""
    n, k = next(shape for shape in formats.shapes(case, (64, 128, 80), (256, 512, 64))
                if case.storage != "hqq_3bit" or shape[0] % 5 == 0)         # experts that begin inside a block are none
    names = ("embed", "up", "experts.0", "experts.1")
    weights = {name: formats.random_packed(case, (n, k), seed) for seed, name in enumerate(names)}
    stack = [formats.random_packed(case, (n, k), 10 + expert) for expert in range(E)]
    tensors = plain_tensors(n, k)
    for name, packed in weights.items():
        tensors |= {full: packed.tensors[own] for own, full in names_in_files(name, packed).items()}
    if stack[0].layout.streams:                                  # its files have a matrix of all experts' rows
        whole = case.module.quantize(torch.cat([each.format.dequantize(each) for each in stack]))
        tensors |= {full: whole.tensors[own] for own, full in names_in_files("stack.up", whole).items()}
    else:
        tensors |= {full: stacked(stack, own) for own, full in names_in_files("stack.up", stack[0]).items()}
    source = folder(tmp_path / "in", tensors, own_config(stack[0]))
    decoded = {name: packed.format.dequantize(packed, torch.float32) for name, packed in weights.items()}
    decoded_stack = torch.stack([packed.format.dequantize(packed, torch.float32) for packed in stack])

    model = net(n, k)
    report = qdsl.load_weights_(model, source)
    assert report.packed.keys() == {*weights, "head", "stack.up"} and report.unused == [] and report.dense == {}
    assert isinstance(model.up, QuantizedLinear) and isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.stack.up, qdsl.Experts) and model.stack.up.shape == (E, n, k)
    for name, weight in decoded.items():
        assert formats.same_bits(model.get_submodule(name).dequantize(torch.float32), weight)
    assert formats.same_bits(model.stack.up.dequantize(), decoded_stack)

    dense = Net(n, k)
    dense.load_state_dict({**plain_tensors(n, k), **{f"{name}.weight": weight for name, weight in decoded.items()},
                           "stack.up": decoded_stack, "head.weight": decoded["embed"]})
    ids = torch.tensor([[1, n - 1, 0]])
    with torch.no_grad():
        for ours, theirs in zip(model(ids), dense(ids), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), equal_nan=True)

    saved = qdsl.save_model(model, tmp_path / "out")
    again = files(tmp_path / "out")
    if saved.exact:
        assert again == files(source)
    else:                                                        # a producer's small tensors were missing
        kept = tensors.keys() - qdsl.open(tmp_path / "out").layer("up").others.keys()
        reloaded = net(n, k)
        qdsl.load_weights_(reloaded, tmp_path / "out")
        assert kept and formats.same_bits(reloaded.stack.up.dequantize(), decoded_stack)
        assert qdsl.save_model(reloaded, tmp_path / "twice").exact


# -- one trait at a time -----------------------------------------------------------------------------------------------


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Mlp(nn.Module):
    """Two layers and a norm."""

    def __init__(self, k: int = 128, n: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(k)
        self.up = nn.Linear(k, n)
        self.down = nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def mlp() -> Mlp:
    with torch.device("meta"):
        return Mlp().bfloat16()


def mlp_tensors(up: dict[str, Tensor], down: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    tensors = {"norm.weight": torch.ones(128).bfloat16(), "norm.bias": torch.zeros(128).bfloat16(),
               "up.bias": torch.linspace(-1, 1, 256).bfloat16()}
    tensors |= {f"up.{name}": tensor for name, tensor in up.items()} | {f"down.{name}": tensor for name, tensor in down.items()}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def fp8_mlp(path: Path, prefix: str = "", **more: Tensor) -> Path:
    up, down = (fp8_block.quantize(weight(*shape)) for shape in ((256, 128), (128, 256)))
    return folder(path, mlp_tensors(up.tensors, down.tensors, prefix) | more, {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}})


def test_every_parameter_needs_a_weight(tmp_path: Path) -> None:
    """The error lists what is missing, and the model is as it was."""
    source = folder(tmp_path / "in", {"norm.weight": torch.ones(128), "down.weight": torch.zeros(128, 256)})
    model = mlp()
    with pytest.raises(LoadError, match=r"3 parameters of the model have no weight .*: norm.bias, up.weight, up.bias"):
        qdsl.load_weights_(model, source)
    assert all(parameter.is_meta for parameter in model.parameters()) and type(model.down) is nn.Linear


def test_shapes_must_agree(tmp_path: Path) -> None:
    source = fp8_mlp(tmp_path / "in")
    with torch.device("meta"):
        model = Mlp(128, 384)
    with pytest.raises(LoadError, match=r"'up' is \[384, 128\] in the model, and \[256, 128\] in the checkpoint"):
        qdsl.load_weights_(model, source)


def test_buffers_on_meta_are_an_error(tmp_path: Path) -> None:
    model = mlp()
    model.register_buffer("angles", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(LoadError, match=r"1 buffers are on meta and not in the checkpoint: angles"):
        qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))


@pytest.mark.parametrize("rename", [{"model.": ""}, lambda name: name.removeprefix("model.")], ids=["prefix", "function"])
def test_names_of_the_checkpoint_can_be_renamed(tmp_path: Path, rename: Any) -> None:
    source = fp8_mlp(tmp_path / "in", "model.")
    with pytest.raises(LoadError, match=r"pass rename=\{'model.': ''\}"):
        qdsl.load_weights_(mlp(), source)
    model = mlp()
    assert qdsl.load_weights_(model, source, rename).packed.keys() == {"up", "down"}
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_a_wrong_file_is_an_error_with_its_place(tmp_path: Path) -> None:
    tensors = mlp_tensors({"weight": torch.zeros(256, 128).to(torch.float8_e4m3fn)}, {"weight": torch.zeros(128, 256)})
    with pytest.raises(LoadError, match=r"'up' is not recognised: .*weight_scale"):
        qdsl.load_weights_(mlp(), folder(tmp_path / "in", tensors))


def test_tensors_without_a_place_are_reported(tmp_path: Path) -> None:
    extra = {"mtp.weight": torch.zeros(3), "up.k_scale": torch.ones(())}
    report = qdsl.load_weights_(mlp(), fp8_mlp(tmp_path / "in", **extra))
    assert sorted(report.unused) == sorted(extra)


def test_what_a_report_states(tmp_path: Path) -> None:
    model = mlp()
    report = qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))
    dense = 2 * (2 * 256 * 128 + 2 * 128 + 256)
    packed = 2 * 256 * 128 + 4 * (2 + 2) + 2 * (2 * 128 + 256)
    assert (report.bytes_before, report.bytes_after, report.device_bytes) == (dense, packed, {"cpu": packed})
    assert report.packed == {"up": "fp8_block.safetensors", "down": "fp8_block.safetensors"} and report.resident_bytes > packed
    assert str(report).splitlines()[0] == "2 layers packed: 2 fp8_block.safetensors"


def test_weights_on_a_cpu_stay_mapped_unless_they_are_copied(tmp_path: Path) -> None:
    """Mapped weights are private: what is written to them stays out of the file."""
    source = fp8_mlp(tmp_path / "in")
    before = files(source)
    mapped, owned = mlp(), mlp()
    qdsl.load_weights_(mapped, source)
    qdsl.load_weights_(owned, source, copy=True)
    pointers = [model.up._parameters["weight"].data_ptr() for model in (mapped, owned)]
    regions = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(source) in line]
    assert [any(int(low, 16) <= each < int(high, 16) for low, high in regions) for each in pointers] == [True, False]
    mapped.up._parameters["weight"].view(torch.uint8).zero_()
    assert files(source) == before


def test_a_model_that_is_not_on_meta_keeps_its_parameters(tmp_path: Path) -> None:
    """Plain numbers are copied into them, in the dtype that the model has."""
    model = Mlp()
    norm, bias = model.norm.weight, model.up.bias
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))
    assert model.norm.weight is norm and model.up.bias is bias and bias.dtype == torch.float32
    assert torch.equal(bias, torch.linspace(-1, 1, 256).bfloat16().float())
    assert model.up.compute_dtype == torch.float32


def test_a_dtype_is_that_of_plain_numbers_and_of_products(tmp_path: Path) -> None:
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"), dtype=torch.float32)
    assert model.norm.weight.dtype == model.up.bias.dtype == model.up.compute_dtype == torch.float32
    assert model.up._parameters["weight"].dtype == torch.float8_e4m3fn
    qdsl.save_model(model, tmp_path / "out")                     # bfloat16 holds the numbers still
    assert files(tmp_path / "out") == files(tmp_path / "in")
    with pytest.raises(LoadError, match="a float, not int8"):
        qdsl.load_weights_(mlp(), tmp_path / "in", dtype=torch.int8)


def test_hooks_modes_and_biases_stay(tmp_path: Path) -> None:
    model = mlp()
    calls: list[str] = []
    model.up.register_forward_hook(lambda *_: calls.append("up"))
    model.down.eval()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))
    model(torch.randn(2, 128).bfloat16())
    assert calls == ["up"] and model.up.training and not model.down.training and model.up.bias is not None


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("head", [hlane, None], ids=["packed", "plain"])
def test_a_head_with_a_weight_of_its_own_is_untied(tmp_path: Path, head: Any, on_meta: bool) -> None:
    """Whatever the model shares, each layer gets the weight that the checkpoint has for it."""
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
            self.head.weight = self.embed.weight

    first, second = (weight(64, 128, seed) for seed in (0, 1))
    own = {"weight": second} if head is None else head.quantize(second).tensors
    tensors = {f"embed.{name}": tensor for name, tensor in q8_0.quantize(first).tensors.items()}
    source = folder(tmp_path / "in", tensors | {f"head.{name}": tensor for name, tensor in own.items()})
    model = Tied().bfloat16()
    model = model.to("meta") if on_meta else model
    model.head.weight = model.embed.weight
    qdsl.load_weights_(model, source)
    assert torch.equal(model.embed.dequantize(), q8_0.dequantize(q8_0.quantize(first)))
    if head is None:
        assert torch.equal(model.head.weight, second)
    else:
        assert torch.equal(model.head.dequantize(), head.dequantize(head.quantize(second)))


def test_a_model_that_is_itself_a_layer(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", dict(q8_0.quantize(weight(64, 128)).tensors))
    with pytest.raises(LoadError, match=r"the model is itself a layer"):
        qdsl.load_weights_(nn.Linear(128, 64, bias=False), source)


def test_a_layer_with_a_forward_of_its_own_becomes_dense(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = mlp()
    model.down = Doubled(256, 128, bias=False, device="meta", dtype=torch.bfloat16)
    source = fp8_mlp(tmp_path / "in")
    report = qdsl.load_weights_(model, source)
    assert report.dense == {"down.weight": "a Doubled takes plain numbers"}
    with qdsl.open(source) as checkpoint:
        assert torch.equal(model.down.weight, checkpoint.weight("down", dtype=torch.bfloat16))
    qdsl.save_model(model, tmp_path / "out")
    again = mlp()
    assert qdsl.load_weights_(again, tmp_path / "out").packed.keys() == {"up"}
    assert torch.equal(again.down.weight, model.down.weight)


def test_a_scale_of_the_input_goes_into_the_weight(tmp_path: Path) -> None:
    """Nothing else multiplies x by 'pre_quant_scale', which a packed weight cannot hold."""
    scale = torch.linspace(0.5, 2, 128)
    source = fp8_mlp(tmp_path / "in", **{"up.pre_quant_scale": scale})
    model = mlp()
    report = qdsl.load_weights_(model, source, dtype=torch.float32)
    assert report.dense["up.weight"] == "'pre_quant_scale' multiplies its input"
    with qdsl.open(source) as checkpoint:
        assert torch.equal(model.up.weight, checkpoint.weight("up", dtype=torch.float32) * scale)


def test_verify_finds_damage_before_the_model_changes(tmp_path: Path) -> None:
    up, down = hlane.quantize(weight(256, 128)), hlane.quantize(weight(128, 256))
    words = up.tensors["words"].clone()
    words[:64] = -1
    source = folder(tmp_path / "in", mlp_tensors({**up.tensors, "words": words}, down.tensors))
    model = mlp()
    with pytest.raises(CheckpointError, match=r"layer up: .*the stream of 'exponents' is damaged"):
        qdsl.load_weights_(model, source, verify=True)
    assert all(parameter.is_meta for parameter in model.parameters())


# -- quantized on the way ----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A head, a router and a layer, of which default patterns leave the first two dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 128)
        self.gate = nn.Linear(128, 4, bias=False)
        self.up = nn.Linear(128, 256)
        self.lm_head = nn.Linear(256, 64, bias=False)


def tiny() -> Tiny:
    with torch.device("meta"):
        return Tiny().bfloat16()


def plain_folder(path: Path) -> tuple[Path, dict[str, Tensor]]:
    tensors = {name: torch.randn(parameter.shape).bfloat16() for name, parameter in Tiny().named_parameters()}
    return folder(path, tensors, {"model_type": "toy"}), tensors


def test_plain_layers_are_quantized_on_the_way(tmp_path: Path) -> None:
    source, tensors = plain_folder(tmp_path / "in")
    model = tiny()
    report = qdsl.load_weights_(model, source, format="int_group", bits=4, group=32, storage="gptq_v2")
    assert report.packed == {"up": "int_group.gptq_v2"}
    assert report.dense == {"embed_tokens": "plain in the checkpoint", "gate": "left out by a pattern",
                            "lm_head": "left out by a pattern"}
    wanted = int_group.quantize(tensors["up.weight"], "gptq_v2", bits=4, group=32)
    assert torch.equal(model.up.packed.tensors["qweight"], wanted.tensors["qweight"])
    assert torch.equal(model.up.bias, tensors["up.bias"])
    qdsl.save_model(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "qdsl", "format": "int_group", "storage": "gptq_v2", "bits": 4, "group": 32, "scale_type": "f16",
        "modules_to_not_convert": ["embed_tokens", "gate", "lm_head"]}
    assert "qdsl-formats" in config["transformers_weights"]
    again = tiny()
    assert qdsl.load_weights_(again, tmp_path / "out").packed == report.packed
    assert torch.equal(again.up.packed.tensors["qweight"], wanted.tensors["qweight"])


def test_patterns_choose_what_stays_dense(tmp_path: Path) -> None:
    source, _ = plain_folder(tmp_path / "in")
    assert qdsl.load_weights_(tiny(), source, format="q4_0", skip=["up"]).packed.keys() == {"gate", "lm_head"}
    assert qdsl.load_weights_(tiny(), source, format="q4_0", skip=[]).packed.keys() == {"gate", "up", "lm_head"}


def test_a_layer_that_a_format_cannot_hold_stays_dense(tmp_path: Path) -> None:
    report = qdsl.load_weights_(tiny(), plain_folder(tmp_path / "in")[0], format="q4_k", skip=["lm_head", "gate"])
    assert report.packed == {} and "256" in report.dense["up"]


def test_a_format_that_contradicts_the_folder_is_an_error(tmp_path: Path) -> None:
    source = fp8_mlp(tmp_path / "in")
    with pytest.raises(LoadError, match=r"format='q4_0' contradicts the checkpoint, whose layers are fp8_block"):
        qdsl.load_weights_(mlp(), source, format="q4_0")
    assert qdsl.load_weights_(mlp(), source, format="fp8_block").packed.keys() == {"up", "down"}
    with pytest.raises(LoadError, match="need format="):
        qdsl.load_weights_(mlp(), source, bits=4)


# -- experts -----------------------------------------------------------------------------------------------------------


class Moe(nn.Module):
    def __init__(self, n: int, k: int, transposed: bool) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (2 * n, k), "down_proj": (k, n)}
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(E, *((columns, rows) if transposed else (rows, columns)))))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * n))


@pytest.mark.parametrize("n", [64, 128])
def test_transposed_experts_are_told_by_their_module(tmp_path: Path, n: int) -> None:
    """gpt-oss has [E, K, N]; where N = K nothing but the other weight of the module tells."""
    from qdsl.generated import ocp_mxfp4

    weights = {name: torch.randn(E, *shape) for name, shape in (("gate_up_proj", (2 * n, 128)), ("down_proj", (128, n)))}
    tensors = {"gate_up_proj_bias": torch.randn(E, 2 * n)}
    for name, dense in weights.items():
        packed = ocp_mxfp4.quantize(dense.flatten(0, 1), "gpt_oss")
        for leaf, tensor in packed.tensors.items():
            tensors[f"{name}_{leaf.removeprefix('weight_')}"] = tensor.view(E, -1, *tensor.shape[1:])
        weights[name] = ocp_mxfp4.dequantize(packed, torch.float32).view(E, *dense.shape[1:])
    source = folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    with torch.device("meta"):
        model = Moe(n, 128, transposed=True)
    qdsl.load_weights_(model, source)
    assert torch.equal(model.gate_up_proj_bias, tensors["gate_up_proj_bias"])
    x = torch.randn(E, 3, 128)
    assert torch.equal(model.down_proj[1], weights["down_proj"][1].t())
    assert torch.equal(torch.bmm(x, model.gate_up_proj), torch.bmm(x, weights["gate_up_proj"].transpose(1, 2)))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


@pytest.mark.parametrize("shape", [(E,), ()], ids=["for each", "for all"])
def test_experts_with_a_scale_for_each(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """fp8_tensor has one scale for a weight: experts that differ in it are weights of their own."""
    packed = [fp8_tensor.quantize(weight(64, 128, expert)) for expert in range(E)]
    scales = torch.stack([each.tensors["weight_scale"].reshape(()) for each in packed]) if shape else torch.tensor(0.01)
    tensors = {"up": torch.stack([each.tensors["weight"] for each in packed]), "up_scale": scales}
    source = folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "fp8"}})
    model = nn.Module()
    model.up = nn.Parameter(torch.empty(E, 64, 128, device="meta"))
    qdsl.load_weights_(model, source)
    dense = tensors["up"].float() * (scales.view(-1, 1, 1) if shape else scales)
    assert torch.equal(model.up.dequantize(), dense)
    x = torch.randn(5, 128)
    torch.testing.assert_close(model.up(x, [0, 2, 5]), torch.cat([x[:2] @ dense[0].t(), x[2:] @ dense[1].t()]))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_experts_stand_for_the_dense_tensor() -> None:
    packed = q8_0.quantize(weight(3 * 32, 64))
    dense = q8_0.dequantize(packed, torch.float32).view(3, 32, 64)
    experts = qdsl.Experts(packed, 3, dtype=torch.float32)
    assert (experts.shape, experts.size(1), experts.dim(), len(experts), experts.dtype) == ((3, 32, 64), 32, 3, 3, torch.float32)
    chosen = torch.tensor([2, 0, 2]), torch.tensor(1), torch.tensor([[0, 1], [2, 2]])
    for index in (0, -1, slice(1, None), ..., (1, slice(0, 4)), *chosen):
        assert torch.equal(experts[index], dense[index])
    assert experts[torch.tensor([], dtype=torch.int64)].shape == (0, 32, 64)
    with pytest.raises(IndexError):
        experts.weight(3)
    x, offsets = torch.randn(6, 64), torch.tensor([0, 1, 1, 6])
    torch.testing.assert_close(experts(x, offsets), torch.cat([x[:1] @ dense[0].t(), x[1:] @ dense[2].t()]))
    copied = copy.deepcopy(experts)
    assert torch.equal(copied.dequantize(), dense) and torch.equal(torch.einsum("eij,j->ei", experts, x[0]), dense @ x[0])


# -- DF11 groups -------------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Blocks of which DF11 holds all weights together, and a head that shares the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = nn.ModuleList([Mlp() for _ in range(2)])
        self.lm_head = nn.Linear(128, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.lm_head(x)
        return result


def df11_folder(path: Path, model: nn.Module) -> Path:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    folder(path / "plain", tensors, {"model_type": "toy"})
    patterns = {r"layers\.\d+": ["up", "down"], "embed": []}
    compress(path / "plain", Aim("df11", patterns=patterns), path / "df11")
    return path / "df11"


def layered() -> Layered:
    with torch.device("meta"):
        return Layered().bfloat16()


def test_groups_are_decoded_for_each_block(tmp_path: Path) -> None:
    dense = Layered().bfloat16()
    source = df11_folder(tmp_path, dense)
    model = layered()
    report = qdsl.load_weights_(model, source)
    names = [*(f"layers.{number}.{name}" for number in range(2) for name in ("up", "down")), "embed"]
    assert report.packed == dict.fromkeys(names, "df11.df11")
    ids = torch.tensor([[1, 5, 63]])
    with torch.no_grad():
        assert torch.equal(model(ids), dense(ids))
    assert model.layers[0].up.weight.is_meta                     # between calls nothing is decoded
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(ids), dense(ids))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_gradients_flow_through_groups(tmp_path: Path) -> None:
    """Autograd keeps the weights of each block: the next one is decoded into other memory."""
    dense = Layered().bfloat16()
    model = layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    for each in (model, dense):
        each.requires_grad_(False)
        each.layers[0].norm.weight.requires_grad_()
        each(torch.tensor([1, 2])).float().square().sum().backward()
    assert torch.equal(model.layers[0].norm.weight.grad, dense.layers[0].norm.weight.grad)


def test_a_group_whose_weights_are_no_modules_of_a_block_is_decoded(tmp_path: Path) -> None:
    dense = Layered().bfloat16()
    source = df11_folder(tmp_path, dense)

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = layered()
    model.layers[1].up = Doubled(128, 256, device="meta", dtype=torch.bfloat16)
    report = qdsl.load_weights_(model, source)
    assert report.dense["layers.1.up.weight"] == "'layers.1.up.weight' is no weight of a module inside of 'layers.1'"
    assert torch.equal(model.layers[1].up.weight, dense.layers[1].up.weight)


# -- saving ------------------------------------------------------------------------------------------------------------


def test_planar_weights_are_saved_as_they_came(tmp_path: Path) -> None:
    model = mlp()
    source = fp8_mlp(tmp_path / "in")
    qdsl.load_weights_(model, source)
    qdsl.planar_(model)
    assert model.up.packed.storage == "planar"
    assert qdsl.save_model(model, tmp_path / "out").exact
    assert files(tmp_path / "out") == files(source)


def test_a_model_that_was_quantized_here_states_all_that_a_reader_needs(tmp_path: Path) -> None:
    """Codes without settings load as numbers up to 448, or not at all."""
    model = Mlp().bfloat16()
    qdsl.quantize_(model, "fp8_block", lambda module, name: name == "up")
    qdsl.quantize_(model, "nf4", lambda module, name: name == "down")
    before = {name: model.get_submodule(name).dequantize(torch.float32) for name in ("up", "down")}
    qdsl.planar_(model)
    assert not qdsl.save_model(model, tmp_path / "out", {"model_type": "toy"}).exact
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config["quantization_config"]["quantized_layers"]
    assert layers == {"up": {"format": "fp8_block", "storage": "safetensors", "bn": 128, "bk": 128, "scale_type": "f32"},
                      "down": {"format": "nf4", "storage": "bitsandbytes", "block": 64}}
    again = mlp()
    qdsl.load_weights_(again, tmp_path / "out")
    assert all(torch.equal(again.get_submodule(name).dequantize(torch.float32), numbers) for name, numbers in before.items())


def test_settings_of_a_producer_are_kept(tmp_path: Path) -> None:
    """bitsandbytes' quant_state and quant_map lie in no module, and are in the files again."""
    packed = nf4.quantize(weight(128, 256))
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 256]}).encode()
    levels = next(each for each in descriptions() if each.name == "nf4").tables["levels"]
    tensors = {"weight": packed.tensors["weight"], "weight.absmax": packed.tensors["weight_absmax"],
               "weight.quant_map": torch.tensor(levels),
               "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8)}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    source = folder(tmp_path / "in", mlp_tensors({"weight": weight(256, 128)}, tensors), config)
    model = mlp()
    qdsl.load_weights_(model, source)
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_files_of_a_checkpoint_stay_divided(tmp_path: Path) -> None:
    tensors = mlp_tensors(*(fp8_block.quantize(weight(*shape)).tensors for shape in ((256, 128), (128, 256))))
    source = tmp_path / "in"
    source.mkdir()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, half in zip(names, halves, strict=True):
        write(source / name, half, {"format": "pt"})
    placed = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"kept": 1}, "weight_map": placed}))
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}')
    (source / "tokenizer.json").write_text("{}")
    model = mlp()
    qdsl.load_weights_(model, source)
    assert qdsl.save_model(model, tmp_path / "out").files == tuple(names)
    assert files(tmp_path / "out") == files(source)


def test_trained_numbers_are_saved_as_they_are(tmp_path: Path) -> None:
    """A plain tensor that bfloat16 cannot hold any more is written in the dtype that it has."""
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"), dtype=torch.float32, copy=True)
    with torch.no_grad():
        model.norm.weight += 1e-6
    assert not qdsl.save_model(model, tmp_path / "out").exact
    again = mlp()
    qdsl.load_weights_(again, tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.norm.weight, model.norm.weight)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    source = fp8_mlp(tmp_path / "in")
    model = mlp()
    qdsl.load_weights_(model, source)
    before = files(source)
    (tmp_path / "link").symlink_to(source)
    for wrong, message in ((source, "mapped from this folder"), (tmp_path / "link", "mapped from this folder"),
                           (source / "config.json", "is a file")):
        with pytest.raises(SaveError, match=message):
            qdsl.save_model(model, wrong)
    qdsl.save_model(model, tmp_path / "out")
    with pytest.raises(SaveError, match="holds weights already"):
        qdsl.save_model(model, tmp_path / "out")
    with pytest.raises(SaveError, match=r"'norm.weight' is on meta"):
        qdsl.save_model(mlp(), tmp_path / "empty")
    assert files(source) == before and not (tmp_path / "empty").exists()


@pytest.mark.parametrize("build", [lambda: int8_channel, lambda: q4_0, lambda: hlane])
def test_a_filled_model_can_be_filled_again(tmp_path: Path, build: Callable[[], Any]) -> None:
    packed = [build().quantize(weight(*shape, seed)) for seed in (0, 1) for shape in ((256, 128), (128, 256))]
    model = mlp()
    for number in (0, 1):
        source = folder(tmp_path / str(number), mlp_tensors(packed[2 * number].tensors, packed[2 * number + 1].tensors),
                        own_config(packed[0]))
        qdsl.load_weights_(model, source)
        assert torch.equal(model.up.dequantize(), packed[2 * number].format.dequantize(packed[2 * number]))
