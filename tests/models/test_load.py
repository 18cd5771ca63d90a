"""qdsl.load_weights_: what becomes of each weight, what is an error, and what a report states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.core.places import UnknownSpec
from qdsl.generated import hlane, int_group, q8_0
from qdsl.models.plan import LoadError
from qdsl.runtime import FormatError
from tests.support.small_models import Mlp, files, folder, fp8_mlp, mlp, mlp_tensors, weight


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
    tensors = mlp_tensors({"weight": torch.zeros(256, 128, dtype=torch.int8)}, {"weight": torch.zeros(128, 256)})
    with pytest.raises(LoadError, match=r"'up' is not recognised: quantized in a way that is not known: .*weight I8"):
        qdsl.load_weights_(mlp(), folder(tmp_path / "in", tensors))


def test_tensors_without_a_place_are_reported(tmp_path: Path) -> None:
    extra = {"mtp.weight": torch.zeros(3), "up.k_scale": torch.ones(())}
    model = mlp()
    report = qdsl.load_weights_(model, fp8_mlp(tmp_path / "in", **extra))
    assert sorted(report.unused) == sorted(extra)
    qdsl.save_model(model, tmp_path / "out")
    with qdsl.open(tmp_path / "out") as checkpoint:              # what belongs to a layer is kept, as its settings speak of it
        assert checkpoint.layer("up").others == {"bias": "up.bias", "k_scale": "up.k_scale"}
        assert checkpoint.plain == ["norm.bias", "norm.weight"]


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
    assert [any(int(low, 16) <= pointer < int(high, 16) for low, high in regions) for pointer in pointers] == [True, False]
    mapped.up._parameters["weight"].view(torch.uint8).zero_()
    assert files(source) == before


def test_small_plain_tensors_are_aligned(tmp_path: Path) -> None:
    """torch's products with one row differ in bits by where a weight lies, and so would a saved model from itself."""
    torch.manual_seed(0)
    names = [f"{'n' * length}.weight" for length in range(1, 20)]
    dense = nn.ModuleDict({name.partition(".")[0]: nn.Linear(65, 65, bias=False) for name in names})
    source = folder(tmp_path / "in", {name: parameter.detach() for name, parameter in dense.named_parameters()})
    with torch.device("meta"):
        model = nn.ModuleDict({name.partition(".")[0]: nn.Linear(65, 65, bias=False) for name in names})
    qdsl.load_weights_(model, source)
    assert all(parameter.data_ptr() % 16 == 0 for parameter in model.parameters())
    x = torch.randn(1, 65)
    assert all(torch.equal(model[name](x), dense[name](x)) for name in model)


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
    with pytest.raises(LoadError, match=r"a torch dtype of floats, not torch\.int8"):
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


def test_others_share_the_first_weight_of_several(tmp_path: Path) -> None:
    """T5 has three embeddings and a head in one parameter, and its files may have the head by itself."""
    model = nn.ModuleDict({"shared": nn.Embedding(64, 128), "encoder": nn.Embedding(64, 128),
                           "head": nn.Linear(128, 64, bias=False)})
    model["encoder"].weight = model["head"].weight = model["shared"].weight
    plain, packed = weight(64, 128).float(), hlane.quantize(weight(64, 128, 1))
    tensors = {"shared.weight": plain} | {f"head.{name}": tensor for name, tensor in packed.tensors.items()}
    assert qdsl.load_weights_(model, folder(tmp_path / "in", tensors)).packed.keys() == {"head"}
    assert torch.equal(model["encoder"].weight, plain) and model["encoder"].weight is model["shared"].weight
    assert torch.equal(model["head"].dequantize(), hlane.dequantize(packed))


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


def test_a_dense_weight_contains_the_scale_of_the_input(tmp_path: Path) -> None:
    """'pre_quant_scale', by which a packed layer multiplies x."""
    scale = torch.linspace(0.5, 2, 128)
    source = fp8_mlp(tmp_path / "in", **{"up.pre_quant_scale": scale})
    model = mlp()
    assert qdsl.load_weights_(model, source, dtype=torch.float32, skip=["up"]).unused == []
    with qdsl.open(source) as checkpoint:
        assert torch.equal(model.up.weight, checkpoint.weight("up", dtype=torch.float32) * scale)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_static_scale_of_activations_is_held_and_used(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = fp8_mlp(tmp_path / "in", **{"up.input_scale": torch.full(shape, 0.01)})
    model = mlp()
    assert qdsl.load_weights_(model, source).unused == []
    assert torch.equal(model.up.input_scale, torch.full(shape, 0.01)) and model.down.input_scale is None
    x = torch.randn(3, 128).bfloat16()
    exact, model.up.quantize_x = model.up(x), True
    codes = (x.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    wanted = nn.functional.linear(codes * torch.tensor(0.01), model.up.dequantize(torch.float32), model.up.bias.float())
    torch.testing.assert_close(model.up(x).float(), wanted, rtol=2 ** -8, atol=1e-3)
    assert not torch.equal(model.up(x), exact)
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"dtype": "bfloat16"}, "a torch dtype of floats, not 'bfloat16'"), ({"skip": "lm_head"}, r"give \['lm_head'\]"),
    ({"skip": ["("]}, "not a regular expression"), ({"format": "q4_zero"}, "no format 'q4_zero'; `qdsl list` prints all"),
    ({"device": "nowhere"}, "device 'nowhere' cannot be used"), ({"device": "cuda:7"}, "device 'cuda:7' cannot be used")])
def test_arguments_that_are_wrong(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((LoadError, UnknownSpec), match=message):
        qdsl.load_weights_(mlp(), fp8_mlp(tmp_path / "in"), **arguments)


def test_tables_of_streams_are_checked_before_the_model_changes(tmp_path: Path) -> None:
    up, down = hlane.quantize(weight(256, 128)), hlane.quantize(weight(128, 256))
    starts = down.tensors["starts"].flip(1)
    model = mlp()
    with pytest.raises(CheckpointError, match=r"layer 'down': .*starts do not rise"):
        qdsl.load_weights_(model, folder(tmp_path / "in", mlp_tensors(up.tensors, {**down.tensors, "starts": starts})))
    assert type(model.up) is nn.Linear and all(parameter.is_meta for parameter in model.parameters())


def test_verify_finds_damage_before_the_model_changes(tmp_path: Path) -> None:
    up, down = hlane.quantize(weight(256, 128)), hlane.quantize(weight(128, 256))
    words = up.tensors["words"].clone()
    words[:64] = -1
    source = folder(tmp_path / "in", mlp_tensors({**up.tensors, "words": words}, down.tensors))
    model = mlp()
    with pytest.raises(CheckpointError, match=r"layer up: .*the stream of 'exponents' is damaged"):
        qdsl.load_weights_(model, source, verify=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    hlane.wrap({**up.tensors, "words": words}, up.shape)
    with pytest.raises(FormatError, match="the stream of 'exponents' is damaged"):
        hlane.wrap({**up.tensors, "words": words}, up.shape, verify=True)


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
    assert report.dense == {"embed_tokens": "Embedding is no nn.Linear", "gate": "left out by a pattern",
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


def test_patterns_make_packed_layers_dense(tmp_path: Path) -> None:
    """For a layer whose weight a model multiplies by itself."""
    source = fp8_mlp(tmp_path / "in")
    model = mlp()
    report = qdsl.load_weights_(model, source, skip=["up"])
    assert report.packed.keys() == {"down"} and report.dense == {"up.weight": "left out by a pattern"}
    with qdsl.open(source) as checkpoint:
        assert torch.equal(model.up.weight, checkpoint.weight("up", dtype=torch.bfloat16))


def test_what_is_no_linear_layer_is_reported(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(32, 32, 3), "up": nn.Linear(32, 64)})
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = qdsl.load_weights_(model, folder(tmp_path / "in", tensors), format="q8_0")
    assert report.packed == {"up": "q8_0.gguf"} and report.dense == {"conv.weight": "Conv1d is no nn.Linear"}


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
