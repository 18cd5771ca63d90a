"""Experts that a checkpoint has one by one, in a model that holds them in one parameter: loaded, run, and saved as they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.generated import fp8_block, fp8_channel, fp8_tensor, hlane, int8_channel, int_group, nf4, nf4_nested, q4_0, q8_0
from qdsl.jobs.convert.config import own_settings
from qdsl.models.load import fill_model
from qdsl.models.plan import LoadError
from qdsl.models.save import SaveError
from qdsl.runtime import FormatError, PackedWeight
from tests.checkpoint.test_open import gguf
from tests.models.test_load_formats import CASES, names_in_files
from tests.support import formats
from tests.support.small_models import files, folder, own_config, weight

E = 2                                                            # experts


def moe(experts: int = E, parent: str = "experts", transposed: bool = False, dtype: torch.dtype = torch.float32,
        **shapes: tuple[int, int]) -> nn.Module:
    """Parameters [E, N, K], or [E, K, N], on meta; shapes: (N, K) by name."""
    parameters = {name: torch.empty(experts, *(shape[::-1] if transposed else shape), device="meta", dtype=dtype)
                  for name, shape in shapes.items()}
    return nn.ModuleDict({parent: nn.ParameterDict(parameters)})


def one_by_one(weights: dict[str, PackedWeight]) -> dict[str, Tensor]:
    """The tensors of layers under the names of files."""
    return {full: packed.tensors[own] for name, packed in weights.items() for own, full in names_in_files(name, packed).items()}


def rows_of(weights: list[PackedWeight], experts: int = E) -> Tensor:
    """The numbers [E, N, K] of weights whose rows follow one another."""
    dense = torch.cat([packed.format.dequantize(packed, torch.float32) for packed in weights])
    return dense.view(experts, -1, dense.shape[1])


def check_stack(stack: qdsl.Experts, dense: Tensor) -> None:
    """Everything that a stack gives: shapes, numbers, packed weights of an expert, and products."""
    assert isinstance(stack, qdsl.Experts) and stack.shape == dense.shape
    numbers = dense.transpose(1, 2) if stack.transposed else dense                             # [E, N, K]
    assert formats.same_bits(stack.dequantize(), dense) and formats.same_bits(stack[1], dense[1])
    assert formats.same_bits(rows_of(stack.weights(-1), 1)[0], numbers[-1])
    x, bias = torch.randn(5, numbers.shape[2]), torch.randn(numbers.shape[:2])
    offsets = [0, *[2] * (len(dense) - 1), 5]
    wanted = torch.cat([nn.functional.linear(x[start:stop], numbers[expert], bias[expert])
                        for expert, (start, stop) in enumerate(pairwise(offsets))])
    torch.testing.assert_close(stack(x, offsets, bias), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), equal_nan=True)
    assert stack(x[:0], [0] * (len(dense) + 1)).shape == (0, numbers.shape[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_storage_fills_a_stack(case: formats.Case, tmp_path: Path) -> None:
    """Two layers an expert, joined or apart: the same numbers, and the same files again."""
    n, k = next(formats.shapes(case, (64, 128, 80), (256, 512, 64, 1024)))
    weights = {f"experts.{expert}.{piece}": formats.random_packed(case, (n, k), seed=2 * expert + seed)
               for expert in range(E) for seed, piece in enumerate(("gate_proj", "up_proj"))}
    first = next(iter(weights.values()))
    source = folder(tmp_path / "in", one_by_one(weights), own_config(first))
    model = moe(gate_up_proj=(2 * n, k))
    report = qdsl.load_weights_(model, source)
    stack = model.experts.gate_up_proj
    assert report.packed == {"experts.gate_up_proj": f"{first.format.name}.{first.storage}"} and report.unused == []
    assert len(stack.parts) in (1, 2 * E) and not (first.layout.streams and len(stack.parts) == 1)
    check_stack(stack, rows_of(list(weights.values())))
    saved = qdsl.save_model(model, tmp_path / "out")
    if saved.exact:
        assert files(tmp_path / "out") == files(source)
    else:                                                        # a producer's small tensors were missing
        again = moe(gate_up_proj=(2 * n, k))
        qdsl.load_weights_(again, tmp_path / "out")
        assert formats.same_bits(again.experts.gate_up_proj.dequantize(), stack.dequantize())
        assert qdsl.save_model(again, tmp_path / "twice").exact


# -- names, shapes and what does not fit -------------------------------------------------------------------------------


def fp8_experts(names: Sequence[str], shapes: Sequence[tuple[int, int]], experts: int = E, prefix: str = "experts.",
                ) -> dict[str, PackedWeight]:
    """FP8 layers of experts, by name: `prefix`0.`names[0]`, ..."""
    return {f"{prefix}{expert}.{name}": fp8_channel.quantize(weight(*shape, expert + 10 * number))
            for expert in range(experts) for number, (name, shape) in enumerate(zip(names, shapes, strict=True))}


def select(weights: dict[str, PackedWeight], *pieces: str) -> list[PackedWeight]:
    return [packed for name, packed in weights.items() if name.endswith(pieces)]


FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize("pieces", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("transposed", [False, True])
def test_usual_names(tmp_path: Path, pieces: tuple[str, str, str], transposed: bool) -> None:
    """As Qwen3-MoE, DeepSeek and Mixtral have them, under another prefix; [2 * 64, 128] is square."""
    weights = fp8_experts(pieces, [(64, 128), (64, 128), (128, 64)], 3, "model.block_sparse_moe.experts.")
    source = folder(tmp_path / "in", one_by_one(weights), FP8)
    model = moe(3, transposed=transposed, gate_up_proj=(128, 128), down_proj=(128, 64))
    report = qdsl.load_weights_(model, source, {"model.block_sparse_moe.": ""})
    assert report.packed == dict.fromkeys(("experts.gate_up_proj", "experts.down_proj"), "fp8_channel.safetensors")
    for name, parts in (("gate_up_proj", pieces[:2]), ("down_proj", pieces[2:])):
        dense = rows_of(select(weights, *parts), 3)
        check_stack(model.experts.get_submodule(name), dense.transpose(1, 2) if transposed else dense)
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_a_stack_of_its_layers_name(tmp_path: Path) -> None:
    """Also from GGUF files that have experts one by one."""
    weights = {f"experts.{expert}.up": q8_0.quantize(weight(64, 128, expert)) for expert in range(E)}
    sources = (folder(tmp_path / "in", one_by_one(weights), own_config(weights["experts.0.up"])),
               gguf(tmp_path / "m.gguf", {f"{name}.weight": ("Q8_0", packed.tensors["blocks"])
                                          for name, packed in weights.items()}))
    for number, source in enumerate(sources):
        model = moe(up=(64, 128))
        qdsl.load_weights_(model, source)
        check_stack(model.experts.up, rows_of(list(weights.values())))
        assert qdsl.save_model(model, tmp_path / f"out{number}").exact


def test_stated_stacks_win_over_usual_names(tmp_path: Path) -> None:
    weights = fp8_experts(("gate_proj", "up_proj"), [(64, 128)] * 2)
    model = moe(gate_up_proj=(128, 128))
    stacks = {"experts.gate_up_proj": [[f"experts.{expert}.up_proj", f"experts.{expert}.gate_proj"] for expert in (1, 0)]}
    source = folder(tmp_path / "in", one_by_one(weights), FP8)
    with qdsl.open(source) as checkpoint:
        fill_model(model, checkpoint, stacks=stacks)
    order = [weights[name] for expert in stacks["experts.gate_up_proj"] for name in expert]
    check_stack(model.experts.gate_up_proj, rows_of(order))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_rows_that_may_alternate_are_not_taken(tmp_path: Path) -> None:
    """gpt-oss, whose experts have biases, has rows of gate and up in turns."""
    weights = fp8_experts(("gate_proj", "up_proj"), [(64, 128)] * 2)
    model = moe(transposed=True, gate_up_proj=(128, 128))
    model.experts.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 128))
    with pytest.raises(LoadError, match=r"names do not tell the order of their rows: state it as stacks= of qdsl"):
        qdsl.load_weights_(model, folder(tmp_path / "in", one_by_one(weights), FP8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("plain", [["experts.1.up_proj"], ["experts.0.gate_proj", "experts.0.up_proj"]], ids=str)
def test_experts_that_stayed_plain(plain: list[str], transposed: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """One piece of an expert, or all of them, as where a producer leaves out experts that saw no tokens."""
    packed = fp8_experts(("gate_proj", "up_proj"), [(64, 192)] * 2)
    dense = {name: weight(64, 192, number).to(dtype) if name in plain else own.format.dequantize(own, torch.float32)
             for number, (name, own) in enumerate(packed.items())}
    tensors = one_by_one({name: own for name, own in packed.items() if name not in plain})
    tensors |= {f"{name}.weight": dense[name] for name in plain}
    model = moe(transposed=transposed, gate_up_proj=(128, 192))
    report = qdsl.load_weights_(model, folder(tmp_path / "in", tensors, FP8))
    rows = torch.stack([torch.cat([dense[f"experts.{expert}.{piece}"].float() for piece in ("gate_proj", "up_proj")])
                        for expert in range(E)])
    check_stack(model.experts.gate_up_proj, rows.transpose(1, 2) if transposed else rows)
    assert not report.unused and "fp8_channel.safetensors" in report.packed["experts.gate_up_proj"]
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(tmp_path / "in")


@pytest.mark.parametrize(("change", "message"), [
    ("missing", r"'experts\.gate_up_proj': 'experts\.1\.up_proj' is missing in the checkpoint, and other experts are packed"),
    ("int32", r"'experts\.1\.up_proj' is not recognised: .*'weight' has dtype int32"),
    ("unknown", r"'experts\.1\.up_proj' is not recognised: fp8_.* needs .*scale"),
    ("more", r"'experts\.gate_up_proj': 2 experts in the model, and 3 in the checkpoint"),
    ("longer", r"\[2, 128, 128\] in the model, and \[2, 128, 128\] and \[2, 192, 128\] in the checkpoint"),
    ("wider", r"\[2, 128, 128\] and \[2, 128, 192\] in the checkpoint")])
def test_stacks_that_do_not_fit(tmp_path: Path, change: str, message: str) -> None:
    """The model is unchanged."""
    weights = fp8_experts(("gate_proj", "up_proj"), [(64, 128)] * 2, 3 if change == "more" else 2)
    shape = {"longer": (128, 128), "wider": (64, 192)}.get(change, (64, 128))
    weights["experts.1.up_proj"] = fp8_channel.quantize(weight(*shape))
    tensors = one_by_one(weights)
    if change in ("missing", "int32", "unknown"):
        del tensors["experts.1.up_proj.weight_scale"]
        plain = {"int32": weight(64, 128).int(), "unknown": tensors.pop("experts.1.up_proj.weight"), "missing": None}[change]
        tensors |= {} if plain is None else {"experts.1.up_proj.weight": plain}
    model = moe(gate_up_proj=(128, 128))
    with pytest.raises(LoadError, match=message):
        qdsl.load_weights_(model, folder(tmp_path / "in", tensors, FP8))
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == ["experts.gate_up_proj"]


def test_stated_stacks_that_do_not_fit(tmp_path: Path) -> None:
    weights = fp8_experts(("gate_proj", "up_proj"), [(64, 128)] * 2)
    pieces = [[f"experts.{expert}.{piece}" for piece in ("gate_proj", "up_proj")] for expert in range(E)]
    with qdsl.open(folder(tmp_path / "in", one_by_one(weights), FP8)) as checkpoint:
        for stacks, message in (({"experts.w13": pieces}, r"'experts\.w13': the model has no parameter \[E, N, K\] of this name"),
                                ({"experts.gate_up_proj": pieces[:1]}, "2 experts in the model, and 1 in the checkpoint"),
                                ({"experts.gate_up_proj": [["a"], ["b"]]}, "1 parameters of the model have no weight")):
            with pytest.raises(LoadError, match=message):
                fill_model(moe(gate_up_proj=(128, 128)), checkpoint, stacks=stacks)


def test_shapes_that_files_do_not_state(tmp_path: Path) -> None:
    """NF4 without a quant_state takes the shape of the model, unless experts may be [E, K, N] there."""
    shapes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    weights = {f"experts.{expert}.{name}": nf4.quantize(weight(*shape, expert)) for expert in range(E)
               for name, shape in shapes.items()}
    source = folder(tmp_path / "in", one_by_one(weights), own_config(weights["experts.0.up_proj"]))
    model = moe(gate_up_proj=(128, 128), down_proj=(128, 64))
    qdsl.load_weights_(model, source)
    check_stack(model.experts.down_proj, rows_of(select(weights, "down_proj")))
    with pytest.raises(LoadError, match=r"'experts.0.down_proj' is not recognised: .*give shape=\(N, K\)"):
        qdsl.load_weights_(moe(transposed=True, gate_up_proj=(128, 128), down_proj=(128, 64)), source)


# -- what belongs to layers ---------------------------------------------------------------------------------------------


def nested_nf4(seed: int, name: str) -> dict[str, Tensor]:
    """A layer as bitsandbytes writes it, with its small tensors."""
    packed = nf4_nested.quantize(weight(64, 128, seed))
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128], "nested_blocksize": 256,
             "nested_dtype": "float32", "nested_offset": float(packed.tensors["weight_nested_offset"])}
    tables = next(description for description in descriptions() if description.name == "nf4_nested").tables
    small = {"absmax": packed.tensors["weight_absmax"], "nested_absmax": packed.tensors["weight_nested_absmax"],
             "quant_map": torch.tensor(tables["levels"]), "nested_quant_map": torch.tensor(tables["steps"]),
             "quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)}
    return {f"{name}.weight": packed.tensors["weight"]} | {f"{name}.weight.{leaf}": tensor for leaf, tensor in small.items()}


def test_small_tensors_of_a_producer_are_kept(tmp_path: Path) -> None:
    """Each layer has a quant_state with an offset of its own, so that they stay apart."""
    tensors: dict[str, Tensor] = {}
    for number in range(2 * E):
        tensors |= nested_nf4(number, f"experts.{number // 2}.{('gate_proj', 'up_proj')[number % 2]}")
    source = folder(tmp_path / "in", tensors, {"quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}})
    model = moe(gate_up_proj=(128, 128))
    assert qdsl.load_weights_(model, source).packed == {"experts.gate_up_proj": "nf4_nested.bitsandbytes"}
    assert len(model.experts.gate_up_proj.parts) == 2 * E
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


@pytest.mark.parametrize("same_order", [True, False])
def test_columns_in_act_order(tmp_path: Path, same_order: bool) -> None:
    """Layers with one g_idx are joined; others have an order each, and stay apart."""
    tensors: dict[str, Tensor] = {}
    for number, name in enumerate(f"experts.{expert}.{piece}" for expert in range(E) for piece in ("gate_proj", "up_proj")):
        packed = int_group.quantize(weight(64, 128, number), "gptq_v2", bits=4, group=32)
        generator = torch.Generator().manual_seed(0 if same_order else number)
        order = packed.tensors["g_idx"][torch.randperm(128, generator=generator)]
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in {**packed.tensors, "g_idx": order}.items()}
    source = folder(tmp_path / "in", tensors, {"quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}})
    model = moe(gate_up_proj=(128, 128))
    qdsl.load_weights_(model, source)
    with qdsl.open(source) as checkpoint:
        dense = [checkpoint.weight(name, dtype=torch.float32) for name in checkpoint.layers]
    assert len(model.experts.gate_up_proj.parts) == (1 if same_order else 2 * E)
    check_stack(model.experts.gate_up_proj, torch.cat(dense).view(E, 128, 128))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)
    assert qdsl.planar_(model).quantized and qdsl.save_model(model, tmp_path / "planar").exact


@pytest.mark.parametrize("module", [fp8_block, fp8_channel, fp8_tensor, int8_channel, q4_0])
def test_planar_stacks_are_saved_as_they_came(tmp_path: Path, module: Any) -> None:
    """Also blocks of rows, of which layers have whole ones."""
    weights = {f"experts.{expert}.up": module.quantize(weight(128, 128, expert)) for expert in range(3)}
    source = folder(tmp_path / "in", one_by_one(weights), own_config(weights["experts.0.up"]))
    model = moe(3, up=(128, 128))
    qdsl.load_weights_(model, source)
    assert len(model.experts.up.parts) == (3 if module is fp8_tensor else 1)
    assert qdsl.planar_(model).quantized
    check_stack(model.experts.up, rows_of(list(weights.values()), 3))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_scales_of_activations_are_kept(tmp_path: Path) -> None:
    """Experts do not use them; they are in the files again."""
    tensors = one_by_one(fp8_experts(("gate_proj", "up_proj"), [(64, 128)] * 2))
    scales = {f"experts.{expert}.{piece}.input_scale": torch.rand(1) for expert in range(E) for piece in ("gate_proj", "up_proj")}
    source = folder(tmp_path / "in", tensors | scales, FP8)
    model = moe(gate_up_proj=(128, 128))
    report = qdsl.load_weights_(model, source)
    assert sorted(report.unused) == sorted(scales) and report.packed.keys() == {"experts.gate_up_proj"}
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_stacked(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the order of rows that is stated; the model may be of another dtype."""
    pieces = ("gate_proj", "up_proj")
    weights = fp8_experts(pieces, [(64, 128)] * 2)
    biases = {f"{name}.bias": torch.randn(64).bfloat16() for name in weights}
    source = folder(tmp_path / "in", one_by_one(weights) | biases, FP8)
    model = moe(gate_up_proj=(128, 128), dtype=dtype)
    model.experts.gate_up_proj_bias = nn.Parameter(torch.empty(E, 128, device="meta", dtype=dtype))
    stacks = {"experts.gate_up_proj": [[f"experts.{expert}.{piece}" for piece in pieces] for expert in range(E)]}
    with qdsl.open(source) as checkpoint:
        assert fill_model(model, checkpoint, stacks=stacks).unused == []
    assert torch.equal(model.experts.gate_up_proj_bias, torch.stack(list(biases.values())).view(E, 128).to(dtype))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)
    with torch.no_grad():
        model.experts.gate_up_proj_bias += 1
    assert not qdsl.save_model(model, tmp_path / "trained").exact


@pytest.mark.parametrize(("shape", "missing", "message"), [
    ((E, 128), True, r"'experts\.up_bias': 1 of 2 layers of experts have a bias"),
    ((E, 64), False, r"'experts\.up_bias' is \[2, 64\] in the model, and layers of experts have 256 rows")])
def test_biases_that_do_not_fit(tmp_path: Path, shape: tuple[int, int], missing: bool, message: str) -> None:
    weights = fp8_experts(("up",), [(128, 128)])
    biases = {f"{name}.bias": torch.ones(128) for name in list(weights)[missing:]}
    model = moe(up=(128, 128))
    model.experts.up_bias = nn.Parameter(torch.empty(shape, device="meta"))
    with pytest.raises(LoadError, match=message):
        qdsl.load_weights_(model, folder(tmp_path / "in", one_by_one(weights) | biases, FP8))


def test_biases_without_a_place_are_refused_or_kept(tmp_path: Path) -> None:
    weights = fp8_experts(("up",), [(128, 128)])
    biases = {f"{name}.bias": torch.ones(128) for name in weights}
    source = folder(tmp_path / "in", one_by_one(weights) | biases, FP8)
    model = moe(up=(128, 128))
    with pytest.raises(CheckpointError, match=r"tensor experts\.0\.up\.bias"):
        qdsl.load_weights_(moe(up=(128, 128)), source)
    assert qdsl.load_weights_(model, source, allow_unknown=True).unused == list(biases)
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


# -- dense, mixed and mapped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaled", "transposed"), [(False, False), (False, True), (True, False)])
def test_dense_stacks(tmp_path: Path, scaled: bool, transposed: bool) -> None:
    """By a pattern, or as something multiplies the input of a layer; the report states the reason."""
    weights = fp8_experts(("gate_proj", "up_proj"), [(64, 192)] * 2)
    scale = torch.linspace(0.5, 2, 192)
    more = {"experts.1.up_proj.pre_quant_scale": scale} if scaled else {}
    model = moe(transposed=transposed, gate_up_proj=(128, 192))
    source = folder(tmp_path / "in", one_by_one(weights) | more, FP8)
    report = qdsl.load_weights_(model, source, skip=None if scaled else ["gate_up_proj"])
    label = "multiply by experts.1.up_proj.pre_quant_scale"
    why = f"the input of its experts is transformed ({label})" if scaled else "left out by a pattern"
    assert report.dense == {"experts.gate_up_proj": why} and report.packed == {} and report.unused == []
    dense = rows_of(list(weights.values()))
    if scaled:
        dense[1, 64:] *= scale
    assert torch.equal(model.experts.gate_up_proj, dense.transpose(1, 2) if transposed else dense)
    assert not qdsl.save_model(model, tmp_path / "out").exact
    again = moe(transposed=transposed, gate_up_proj=(128, 192))
    qdsl.load_weights_(again, tmp_path / "out")
    assert torch.equal(again.experts.gate_up_proj, model.experts.gate_up_proj)


def test_layers_of_different_formats_stay_apart(tmp_path: Path) -> None:
    """Formats and sizes of gate and up may differ."""
    weights = {f"experts.{expert}.{name}": module.quantize(weight(n, 128, expert)) for expert in range(E)
               for name, module, n in (("gate_proj", hlane, 64), ("up_proj", q8_0, 96))}
    settings = {name: {"format": packed.format.name, "storage": packed.storage, **packed.params}
                for name, packed in weights.items()}
    source = folder(tmp_path / "in", one_by_one(weights), {"quantization_config": own_settings(settings, [])})
    model = moe(gate_up_proj=(160, 128))
    assert qdsl.load_weights_(model, source).packed == {"experts.gate_up_proj": "hlane.hlane + q8_0.gguf"}
    dense = [packed.format.dequantize(packed, torch.float32) for packed in weights.values()]
    check_stack(model.experts.gate_up_proj, torch.stack([torch.cat(dense[:2]), torch.cat(dense[2:])]))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)
    with pytest.raises(LoadError, match=r"format='nf4' contradicts the checkpoint, whose layers are hlane, q8_0"):
        qdsl.load_weights_(moe(gate_up_proj=(160, 128)), source, format="nf4")


@pytest.mark.parametrize("module", [fp8_channel, fp8_tensor, hlane])
def test_weights_that_stay_apart_stay_mapped(tmp_path: Path, module: Any) -> None:
    """Joined ones are a copy; `copy=True` owns all, once."""
    weights = {f"experts.{expert}.up": module.quantize(weight(64, 128, expert)) for expert in range(E)}
    source = folder(tmp_path / "in", one_by_one(weights), own_config(weights["experts.0.up"]))
    for copy in (False, True):
        model = moe(up=(64, 128))
        qdsl.load_weights_(model, source, copy=copy)
        regions = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(source) in line]
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        mapped = [any(int(low, 16) <= pointer < int(high, 16) for low, high in regions) for pointer in pointers]
        assert all(mapped) if not copy and module is not fp8_channel else not any(mapped)


def test_damage_in_a_layer_is_an_error_before_the_model_changes(tmp_path: Path) -> None:
    weights = {f"experts.{expert}.up": hlane.quantize(weight(256, 128, expert)) for expert in range(E)}
    weights["experts.1.up"].tensors["words"][:64] = -1
    model = moe(up=(256, 128))
    source = folder(tmp_path / "in", one_by_one(weights), own_config(weights["experts.0.up"]))
    with pytest.raises(CheckpointError, match=r"layer experts\.1\.up: .*the stream of 'exponents' is damaged"):
        qdsl.load_weights_(model, source, verify=True)
    assert isinstance(model.experts.up, nn.Parameter)


# -- Experts of several weights each --------------------------------------------------------------------------------------


def test_experts_of_several_weights() -> None:
    """One expert's weights are joined where that is exact; products have gradients."""
    joinable = [q8_0.quantize(weight(n, 64, n).float()) for _ in range(3) for n in (32, 96)]
    stack = qdsl.Experts(joinable, 3)
    assert stack.weight(1).shape == (128, 64) and torch.equal(stack[1], rows_of([stack.weight(1)], 1)[0])
    apart = qdsl.Experts([fp8_tensor.quantize(weight(32, 64, seed)) for seed in range(4)], 2)
    with pytest.raises(FormatError, match="cannot be joined"):
        apart.weight(0)
    with pytest.raises(IndexError, match="expert 2 of 2"):
        apart.weights(2)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(2, 64, requires_grad=True)
    dense = apart.dequantize()
    wanted = torch.cat([x[:2] @ dense[0].t() + bias[0], x[2:] @ dense[1].t() + bias[1]])
    gradients = [torch.autograd.grad(y.square().sum(), (x, bias)) for y in (apart(x, [0, 2, 5], bias), wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    with pytest.raises(FormatError, match=r"bias \[2, 63\] does not fit 2 experts of 64 rows"):
        apart(x, [0, 2, 5], bias[:, 1:])


@pytest.mark.parametrize(("shapes", "experts", "message"), [
    ([(32, 64)] * 3, 2, "3 weights of 96 rows together do not divide among 2 experts"),
    ([], 1, "0 weights of 0 rows"),
    ([(32, 64), (32, 64), (32, 64), (64, 64)], 2, r"experts have one shape \[N, K\]: N is \[64, 96\], and K is \[64\]"),
    ([(32, 64), (32, 32)], 2, r"N is \[32\], and K is \[32, 64\]")])
def test_weights_that_are_no_experts(shapes: list[tuple[int, int]], experts: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        qdsl.Experts([q8_0.quantize(weight(*shape)) for shape in shapes], experts)


def test_experts_that_no_file_has_are_not_saved(tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": qdsl.Experts([fp8_tensor.quantize(weight(32, 64, seed)) for seed in range(4)], 2)})
    with pytest.raises(SaveError, match=r"experts 'experts' have several weights each, which no file of stacks has: .*joined"):
        qdsl.save_model(model, tmp_path / "out")
