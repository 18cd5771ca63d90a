"""Experts in one tensor, under the names that Hugging Face's models have: found, decoded one by one, and written so again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.layer_weights import module_of, weights
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import read_header, write
from qdsl.cli import app
from qdsl.generated import fp8_block, fp8_channel, fp8_tensor, nf4, nvfp4_modelopt, ocp_mxfp4, ocp_mxfp8
from qdsl.jobs.convert.run import convert
from qdsl.jobs.convert.target import parse_conversion
from qdsl.jobs.engine import RewriteError
from tests.support.formats import same_bits

E, INNER, HIDDEN = 3, 64, 256
LEVELS = next(description for description in descriptions() if description.name == "nf4").tables["levels"]
AT = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{AT}.gate_up_proj", f"{AT}.down_proj"


def experts(module: Any, storage: str, n: int, k: int, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of experts [E, ...], and what they stand for, float32 [E, N, K]."""
    generator = torch.Generator().manual_seed(n)
    packed = [module.quantize(torch.randn(n, k, generator=generator), storage, **options) for _ in range(E)]
    return ({name: torch.stack([one.tensors[name] for one in packed]) for name in packed[0].tensors},
            torch.stack([module.dequantize(one, torch.float32) for one in packed]))


def stacked(weight: str, tensors: dict[str, Tensor], whole: bool = False) -> dict[str, Tensor]:
    """Their names, made of the weight's: transformers' and, whole, ModelOpt's."""
    return {weight if name == "weight" else f"{weight}_{name}" if whole else weight + name.removeprefix("weight"): tensor
            for name, tensor in tensors.items()}


def read(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Layers:
    write(path / "model.safetensors", tensors)
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with Folder(path) as folder:
        return detected_layers(folder)


def decoded(path: Path) -> dict[str, Tensor]:
    with Folder(path) as folder:
        return {layer.name: torch.stack([module_of(layer).dequantize(weight, torch.float32) for weight in weights(folder, layer)])
                for layer in layers(folder).layers}


# A format's storage, names as ModelOpt makes them, what weights are called, and the config of those that have it so.
STACKS: dict[str, tuple[Any, str, bool, tuple[str, str], dict[str, Any]]] = {
    "transformers fp8": (fp8_block, "safetensors", False, ("gate_up_proj", "down_proj"),
                         {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "transformers fp4": (ocp_mxfp4, "deepseek", False, ("gate_up_proj", "down_proj"),
                         {"quant_method": "fp8", "expert_dtype": "fp4"}),
    "inkling mxfp8": (ocp_mxfp8, "compressed_tensors", False, ("w13_weight", "w2_weight"), {}),
    "modelopt nvfp4": (nvfp4_modelopt, "modelopt", True, ("gate_up_proj", "down_proj"),
                       {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "rows": (fp8_channel, "safetensors", False, ("gate_up_proj", "down_proj"), {}),
}


@pytest.mark.parametrize("name", STACKS)
def test_experts_are_found_by_names_made_of_the_weights(tmp_path: Path, name: str) -> None:
    module, storage, whole, names, config = STACKS[name]
    shapes = dict(zip(names, ((2 * INNER, HIDDEN), (HIDDEN, INNER)), strict=True))
    stacks = {f"{AT}.{weight}": experts(module, storage, *shape) for weight, shape in shapes.items()}
    tensors = {key: tensor for weight, (own, _) in stacks.items() for key, tensor in stacked(weight, own, whole).items()}
    others = {f"{AT}.{names[0]}_bias": torch.zeros(E, 2 * INNER), f"{AT}.{names[0]}_input_scale": torch.ones(E)}
    detected = read(tmp_path, {**tensors, **others, "model.layers.0.mlp.gate.weight": torch.zeros(E, HIDDEN)}, config)
    assert detected.problems == [] and detected.plain == ["model.layers.0.mlp.gate.weight"]
    by_name = {layer.name: layer for layer in detected.layers}
    assert by_name.keys() == stacks.keys()
    for weight, layer in by_name.items():
        assert (layer.format, layer.storage, layer.problems) == (module.FORMAT.name, storage, ()), layer
        assert (layer.shape, layer.experts) == (shapes[weight.rpartition(".")[2]], E)
    assert by_name[f"{AT}.{names[0]}"].others == {key.removeprefix(f"{AT}.{names[0]}_"): key for key in others}
    assert all(same_bits(weight_values, stacks[weight][1]) for weight, weight_values in decoded(tmp_path).items())


@pytest.mark.parametrize(("module", "storage", "number"), [(nvfp4_modelopt, "modelopt", "weight_scale_2"),
                                                           (fp8_tensor, "safetensors", "weight_scale")])
@pytest.mark.parametrize("shape", [(), (1,), (E,), (E, 1, 1)])
def test_one_number_for_all_experts_or_for_each(tmp_path: Path, module: Any, storage: str, number: str, shape: tuple[int, ...],
                                                ) -> None:
    tensors, _ = experts(module, storage, 2 * INNER, HIDDEN)
    tensors[number] = torch.rand(shape) + 0.5
    detected = read(tmp_path, stacked(GATE_UP, tensors, whole=True))
    assert [(layer.format, layer.experts) for layer in detected.layers] == [(module.FORMAT.name, E)]
    numbers = tensors[number].view(-1).expand(E)
    wanted = [module.dequantize(module.wrap({**{name: tensor[i] for name, tensor in tensors.items()
                                                if name != number}, number: numbers[i]}), torch.float32) for i in range(E)]
    assert same_bits(decoded(tmp_path)[GATE_UP], torch.stack(wanted))


@pytest.mark.parametrize("shape", [(2,), (E, 2), (E, 2, 1)])
def test_numbers_of_gate_and_up_are_not_one(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A scale for each half of an expert's rows is no format's."""
    tensors, _ = experts(nvfp4_modelopt, "modelopt", 2 * INNER, HIDDEN)
    detected = read(tmp_path, stacked(GATE_UP, {**tensors, "weight_scale_2": torch.ones(shape)}, whole=True))
    assert [(layer.format, bool(layer.why)) for layer in detected.layers] == [("", True)]


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("inner", [128, 256, 512])
@pytest.mark.parametrize("name", ["transformers fp8", "modelopt nvfp4", "rows"])
def test_experts_with_rows_for_columns(tmp_path: Path, name: str, inner: int) -> None:
    """As Llama 4 and Qwen3-VL have them, though in blocks of 128 x 128 all their tensors fit; also where one is a square."""
    module, storage, whole, *_ = STACKS[name]
    first, second = experts(module, storage, 2 * inner, HIDDEN), experts(module, storage, HIDDEN, inner)
    for rows_first, layout in ((True, lambda tensors: tensors), (False, transposed)):
        detected = read(tmp_path, {**stacked(GATE_UP, layout(first[0]), whole), **stacked(DOWN, layout(second[0]), whole)})
        assert {layer.name: (layer.format, layer.shape, layer.experts, layer.transposed) for layer in detected.layers} == {
            GATE_UP: (module.FORMAT.name, (2 * inner, HIDDEN), E, not rows_first),
            DOWN: (module.FORMAT.name, (HIDDEN, inner), E, not rows_first)}
        assert same_bits(decoded(tmp_path)[GATE_UP], first[1]) and same_bits(decoded(tmp_path)[DOWN], second[1])


def test_turned_experts_of_no_format(tmp_path: Path) -> None:
    first, second = experts(nvfp4_modelopt, "modelopt", 2 * INNER, HIDDEN), experts(nvfp4_modelopt, "modelopt", HIDDEN, INNER)
    tensors = {**stacked(GATE_UP, transposed(first[0]), True), **stacked(DOWN, transposed(second[0]), True)}
    detected = read(tmp_path, {**tensors, f"{DOWN}_weight_scale_2": torch.ones(E, 2)})
    assert {layer.name: (layer.format, layer.transposed) for layer in detected.layers} == {GATE_UP: ("nvfp4_modelopt", True),
                                                                                       DOWN: ("", False)}
    assert any(layer.why.startswith("experts' weights are [E, K, N], as their extents tell: ") for layer in detected.layers)


def test_a_plain_weight_is_not_taken_for_experts(tmp_path: Path) -> None:
    """Names that begin alike, of which none is a weight's, and scales of what is not quantized."""
    tensors = {"attn.k": torch.zeros(2, 2), "attn.k_scale": torch.ones(1), "attn.q_scale": torch.ones(1),
               "up_proj_scale": torch.ones(2), "gate_up_proj": torch.zeros(2, 4, 4), "gate_up_proj_bias": torch.zeros(2, 4)}
    detected = read(tmp_path, tensors)
    assert detected.layers == [] and set(detected.plain) == tensors.keys()


# -- written anew --------------------------------------------------------------------------------------------------------

def converted(path: Path, out: Path, to: str, **options: Any) -> Layer:
    with Folder(path) as folder:
        convert(folder, layers(folder), parse_conversion(to, **options), out)
    with Folder(out) as folder:
        return layers(folder).layers[0]


def test_the_names_of_each_producer(tmp_path: Path) -> None:
    """And the numbers of all experts, from one to the next."""
    tensors, wanted = experts(ocp_mxfp4, "deepseek", 2 * INNER, HIDDEN)
    (tmp_path / "in").mkdir()
    read(tmp_path / "in", {**stacked(GATE_UP, tensors), f"{GATE_UP}_bias": torch.zeros(E, 2 * INNER)})
    path = tmp_path / "in"
    for to, ends in (("gpt_oss", ("_blocks", "_scales")), ("modelopt", ("", "_weight_scale")),
                     ("compressed_tensors", ("_packed", "_scale")), ("deepseek", ("", "_scale_inv"))):
        layer = converted(path, out := tmp_path / to, to)
        path = out
        assert (layer.storage, layer.experts, layer.name) == (to, E, GATE_UP)
        assert {*read_header(out / "model.safetensors").tensors} == {f"{GATE_UP}{end}" for end in (*ends, "_bias")}
        assert same_bits(decoded(out)[GATE_UP], wanted)


def test_turned_experts_stay_so(tmp_path: Path) -> None:
    """Their model has them so, in the new format too; what knows experts [E, N, K] alone is refused."""
    first, second = experts(fp8_block, "safetensors", 2 * INNER, HIDDEN), experts(fp8_block, "safetensors", HIDDEN, INNER)
    (tmp_path / "in").mkdir()
    read(tmp_path / "in", {**stacked(GATE_UP, transposed(first[0])), **stacked(DOWN, transposed(second[0]))})
    printed = CliRunner().invoke(app, ["inspect", str(tmp_path / "in")]).output
    assert f"{E} x {2 * INNER} x {HIDDEN}, transposed" in printed
    layer = converted(tmp_path / "in", tmp_path / "out", "nvfp4_modelopt", requantize=True)
    assert (layer.format, layer.transposed) == ("nvfp4_modelopt", True)
    assert {full: entry.shape for full, entry in read_header(tmp_path / "out" / "model.safetensors").tensors.items()} == {
        GATE_UP: (E, HIDDEN // 2, 2 * INNER), f"{GATE_UP}_weight_scale": (E, HIDDEN // 16, 2 * INNER),
        f"{GATE_UP}_weight_scale_2": (E,), DOWN: (E, INNER // 2, HIDDEN), f"{DOWN}_weight_scale": (E, INNER // 16, HIDDEN),
        f"{DOWN}_weight_scale_2": (E,)}
    wanted = [nvfp4_modelopt.dequantize(nvfp4_modelopt.quantize(expert), torch.float32) for expert in first[1]]
    assert same_bits(decoded(tmp_path / "out")[GATE_UP], torch.stack(wanted))
    for to in ("fp8_block.torchao", "nf4", "ocp_mxfp4.gpt_oss"):
        with pytest.raises(RewriteError, match=r"its experts are \[E, K, N\], and there they are \[E, N, K\]"):
            converted(tmp_path / "in", tmp_path / to, to, requantize=not to.endswith("torchao"))


def test_4_bits_of_bitsandbytes_run_through_all_experts(tmp_path: Path) -> None:
    """With JSON that says how many there are; blocks of two experts are refused, to read and to write."""
    tensors, _ = experts(fp8_block, "safetensors", 2 * INNER, HIDDEN)
    (tmp_path / "in").mkdir()
    read(tmp_path / "in", stacked(GATE_UP, tensors))
    before = decoded(tmp_path / "in")[GATE_UP]
    layer = converted(tmp_path / "in", out := tmp_path / "out", "nf4", requantize=True, params={"block": 64})
    assert (layer.format, layer.shape, layer.experts, layer.params["block"]) == ("nf4", (2 * INNER, HIDDEN), E, 64)
    packed = nf4.quantize(before.view(-1, HIDDEN), block=64)
    with Folder(out) as folder:
        assert {full: folder.entry(full).shape for full in folder.names()} == {
            GATE_UP: (E * INNER * HIDDEN, 1), f"{GATE_UP}.absmax": (E * 2 * INNER * HIDDEN // 64,),
            f"{GATE_UP}.quant_map": (16,), f"{GATE_UP}.quant_state.bitsandbytes__nf4": (83,)}
        state = bytes(folder.tensor(f"{GATE_UP}.quant_state.bitsandbytes__nf4").tolist())
        assert json.loads(state) == {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [E, 2 * INNER, HIDDEN]}
        assert folder.tensor(GATE_UP).view(-1).equal(packed.tensors["weight"].view(-1))
        every = {name: folder.tensor(name) for name in folder.names()}
    assert same_bits(decoded(out)[GATE_UP].view(-1, HIDDEN), nf4.dequantize(packed, torch.float32))
    for shape in ([E, 2 * INNER, HIDDEN + 1], [2, 3 * INNER, HIDDEN], [0, 2 * INNER, HIDDEN], [-E, 2 * INNER, HIDDEN],
                  [True, 2 * INNER, HIDDEN], [1, E, 2 * INNER, HIDDEN], [E * 2 * INNER, HIDDEN, 1], ["3", 2 * INNER, HIDDEN]):
        quant_state = torch.tensor(list(json.dumps({**json.loads(state), "shape": shape}).encode()), dtype=torch.uint8)
        (tmp_path / "other").mkdir(exist_ok=True)
        [other] = read(tmp_path / "other", {**every, f"{GATE_UP}.quant_state.bitsandbytes__nf4": quant_state}).layers
        fits = shape == [2, 3 * INNER, HIDDEN] or shape == [E * 2 * INNER, HIDDEN, 1]
        assert bool(other.format) == fits, (shape, other)


def test_blocks_with_weights_of_two_experts(tmp_path: Path) -> None:
    """[3, 5, 24] in blocks of 64 has 6 of them, as many as three experts with two each; but theirs lie elsewhere."""
    weight, state = torch.randn(15, 24), {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [E, 5, 24]}
    packed = nf4.quantize(weight, block=64)
    tensors = {DOWN: packed.tensors["weight"], f"{DOWN}.absmax": packed.tensors["weight_absmax"],
               f"{DOWN}.quant_map": torch.tensor(LEVELS),
               f"{DOWN}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}
    [layer] = read(tmp_path, tensors).layers
    assert layer.why == "nf4.bitsandbytes: experts of 5 rows share blocks, which begin every 8 rows"
    plain, _ = experts(fp8_channel, "safetensors", 5, 24)
    (tmp_path / "in").mkdir()
    read(tmp_path / "in", stacked(DOWN, plain))
    with pytest.raises(RewriteError, match="experts of 5 rows would share blocks, which begin every 8 rows"):
        converted(tmp_path / "in", tmp_path / "out", "nf4", requantize=True, params={"block": 64})


def test_a_storage_that_nobody_has_experts_in(tmp_path: Path) -> None:
    tensors, _ = experts(fp8_block, "safetensors", 2 * INNER, HIDDEN)
    (tmp_path / "in").mkdir()
    read(tmp_path / "in", stacked(GATE_UP, tensors))
    with pytest.raises(RewriteError, match="no rule gives the name of 'SCB' next to experts in one tensor"):
        converted(tmp_path / "in", tmp_path / "out", "bnb_int8", requantize=True)


def test_experts_one_by_one_are_modules_of_their_own(tmp_path: Path) -> None:
    names = [f"{AT}.{i}.{leaf}" for i in range(2) for leaf in ("w1", "w2", "gate_proj")]
    packed = fp8_block.quantize(torch.randn(64, 128), bn=128, bk=128)
    detected = read(tmp_path, {f"{name}.{key}": tensor for name in names for key, tensor in packed.tensors.items()})
    assert sorted(layer.name for layer in detected.layers) == sorted(names)
    assert all(layer.format == "fp8_block" and layer.experts is None for layer in detected.layers)
