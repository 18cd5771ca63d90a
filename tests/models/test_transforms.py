"""Layers with transforms of x compute what their producers' own packages do: the answers in tests/data/transforms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.checkpoint.report.shards import ShardError
from qdsl.core.transforms import INPUT, Transform, base_matrices, base_of
from qdsl.jobs.convert.run import convert
from qdsl.jobs.convert.target import parse_conversion
from qdsl.jobs.engine import RewriteError
from qdsl.models.dense import make_dense
from qdsl.models.plan import LoadError
from qdsl.models.served import Served
from qdsl.runtime import PackedWeight
from qdsl.runtime.torch.transforms import Rotation, layer_transforms, transformed
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.transforms import LEAST, WHOLE, fold_transforms, rotation, sylvester_hadamard
from tests.support.producer_transforms import Case, K, positive, random, recorded
from tests.support.small_models import files, folder

OPTIONS: dict[str, dict[str, Any]] = {"int_group.awq": {"bits": 4, "group": 32},
                                      "int_group.gptq_v1": {"bits": 4, "group": 32, "symmetric": True}}
NORMS = [name for name in recorded() if name.startswith("bitnet")]
LINEAR = [name for name in recorded() if name not in NORMS]
FEW = ["awq mlp.c_proj", "modelopt float32", "bitnet 1e-06", "quark 32 prescale", "auto_round random_hadamard 24",
       "spinquant plain", "compressed-tensors two groups", "compressed-tensors permuted"]


def model_with(layer: str, bias: bool = False, **shape: int) -> nn.Module:
    """A model whose only layer has this name."""
    model = root = nn.Module()
    *parents, last = layer.split(".")
    for name in parents:
        setattr(model, name, nn.Module())
        model = getattr(model, name)
    setattr(model, last, nn.Linear(shape.get("k", K), shape.get("n", K), bias=bias, device="meta"))
    return root


def packed_layer(case: Case) -> PackedWeight:
    """The identity in the storage of the case, but for formats that have no identity."""
    format, storage = case.packed.split(".")
    weight = random(K, K, seed=7) if format in ("bitnet", "int_group") else torch.eye(K)
    packed: PackedWeight = import_module(f"qdsl.generated.{format}").quantize(weight, storage, **OPTIONS.get(case.packed, {}))
    return packed


def written(case: Case, path: Path, settings: Mapping[str, Any] | None = None, **tensors: Tensor) -> Path:
    """The folder of a producer: the packed layer, and the tensors of its transforms."""
    packed = packed_layer(case)
    own = {f"{case.layer}.{packed.names.get(name, name)}": tensor for name, tensor in packed.tensors.items()}
    config = {"model_type": "toy", "quantization_config": dict(case.settings if settings is None else settings)}
    return folder(path, own | case.tensors | tensors, config)


def loaded(path: Path, layer: str, **options: Any) -> tuple[nn.Module, Any]:
    """The model of a folder, and its layer."""
    model = model_with(layer)
    qdsl.load_weights_(model, path, dtype=torch.float32, **options)
    return model, model.get_submodule(layer)


def wanted(case: Case, layer: Any) -> Tensor:
    """The producer's answer: with weights other than the identity, the product of the transformed x."""
    dense = layer.format.dequantize(layer.packed, torch.float64)
    return (case.y.double() @ dense.t()).float()


def error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", recorded())
def test_layers_compute_what_their_producers_do(tmp_path: Path, name: str) -> None:
    """In float32 up to its rounding, and in bfloat16 up to one rounding of the transformed x; saved as the same files."""
    case = recorded()[name]
    source = written(case, tmp_path / "in")
    with Folder(source) as files_read:
        [layer] = layers(files_read).layers
    assert layer.transforms and layer.transform_tensors <= case.tensors.keys()
    model, module = loaded(source, case.layer)
    with torch.no_grad():
        assert error(module(case.x), wanted(case, module)) < 1e-6
        y16 = case.x.bfloat16()
        for side in ("input", "output"):
            y16 = transformed(module.own_transforms, y16, side)
        assert (y16.float() - case.y16.float()).abs().max() <= 2 ** -7 * case.y16.float().abs().max()
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


@pytest.mark.parametrize("name", LINEAR)
def test_dense_weights_contain_transforms(name: str, tmp_path: Path) -> None:
    """As dequantize makes them, and patterns that leave a layer dense."""
    case = recorded()[name]
    source = written(case, tmp_path / "in")
    model, module = loaded(source, case.layer)
    reference = wanted(case, module)
    make_dense(model)
    _, plain = loaded(source, case.layer, skip=[case.layer.rpartition(".")[2]])
    for dense in (model.get_submodule(case.layer), plain):
        assert type(dense) is nn.Linear and not dense._modules
        with torch.no_grad():
            assert error(dense(case.x), reference) < 2e-6


@pytest.mark.parametrize("name", NORMS)
def test_no_dense_weight_contains_a_norm(name: str, tmp_path: Path) -> None:
    case = recorded()[name]
    model, _ = loaded(written(case, tmp_path / "in"), case.layer)
    with pytest.raises(FormatError, match="by a factor that depends on it"):
        make_dense(model)
    with pytest.raises(LoadError, match="by a factor that depends on it"):
        loaded(tmp_path / "in", case.layer, skip=["up"])
    with pytest.raises(RewriteError, match="by a factor that depends on it"):
        converted(tmp_path / "in", "f32", tmp_path / "out")


def converted(path: Path, to: str, out: Path) -> dict[str, Any]:
    with Folder(path) as source:
        return convert(source, layers(source), parse_conversion(to, requantize=True), out)


@pytest.mark.parametrize("name", recorded())
def test_converted_folders_state_transforms(name: str, tmp_path: Path) -> None:
    """In settings of qdsl where those of the target's producer have no words for them."""
    case = recorded()[name]
    source = written(case, tmp_path / "in")
    report = converted(source, "q8_0", tmp_path / "out")
    assert report["readers"][""] == "qdsl alone"
    _, before = loaded(source, case.layer)
    _, after = loaded(tmp_path / "out", case.layer)
    assert [own.transform for own in after.own_transforms] == [own.transform for own in before.own_transforms]
    with torch.no_grad():
        assert error(after(case.x), wanted(case, before)) < 0.02
    model = model_with(case.layer)
    qdsl.load_weights_(model, tmp_path / "out", dtype=torch.float32)
    assert qdsl.save_model(model, tmp_path / "again").exact


@pytest.mark.parametrize("name", LINEAR)
def test_plain_numbers_contain_transforms(name: str, tmp_path: Path) -> None:
    """And neither settings nor tensors state them any more."""
    case = recorded()[name]
    source = written(case, tmp_path / "in")
    converted(source, "f32", tmp_path / "out")
    _, before = loaded(source, case.layer)
    _, after = loaded(tmp_path / "out", case.layer)
    assert type(after) is nn.Linear and not after._modules
    with Folder(tmp_path / "out") as files_read:
        assert [*files_read.names()] == [f"{case.layer}.weight"]
    with torch.no_grad():
        assert error(after(case.x), wanted(case, before)) < 2e-6


@pytest.mark.parametrize("name", FEW)
def test_compiled_layers(name: str, tmp_path: Path) -> None:
    case = recorded()[name]
    _, module = loaded(written(case, tmp_path / "in"), case.layer)
    with torch.no_grad():
        assert error(torch.compile(module)(case.x), module(case.x)) < 1e-6


@pytest.mark.parametrize("name", FEW)
def test_storages_change_and_transforms_stay(name: str, tmp_path: Path) -> None:
    """Planar storage, a requantized model that is saved, gradients of x, and casts."""
    case = recorded()[name]
    model, module = loaded(written(case, tmp_path / "in"), case.layer)
    x = case.x.clone().requires_grad_()
    reference = wanted(case, module)
    module(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    qdsl.planar_(model, larger=True)
    changed = model.get_submodule(case.layer)
    dtypes = [buffer.dtype for buffer in changed.transforms.buffers()]
    model.half()
    assert [buffer.dtype for buffer in changed.transforms.buffers()] == dtypes
    with torch.no_grad():
        assert error(changed(case.x), reference) < 2e-6
    qdsl.save_model(model, tmp_path / "out")
    _, again = loaded(tmp_path / "out", case.layer)
    with torch.no_grad():
        assert error(again(case.x), reference) < 2e-6


# -- refusals ----------------------------------------------------------------------------------------------------------


def scheme(**changes: Any) -> dict[str, Any]:
    """Settings of one transform, which are changed."""
    one = {"targets": ["up"], "location": "input", "inverse": False, "ignore": []}
    group = {"type": "hadamard", "apply": [one | {key: changes.pop(key) for key in [*changes] if key in one}], "randomize": False,
             "head_dim": 32, "precision": "torch.float32"}
    return {**recorded()["compressed-tensors permuted"].settings, "transform_config": {"config_groups": {"g": group | changes}}}


@pytest.mark.parametrize(("settings", "message"), [
    (scheme(head_dim=36), "blocks of 36 do not divide 96 elements"),
    (scheme(head_dim=24), "a Hadamard matrix of 24 columns is not stored, and none of its size is built"),
    (scheme(type="givens"), "has the type 'givens'; known are hadamard, random-hadamard, random-matrix"),
    (scheme(type="random-hadamard"), "there is no tensor 'up.g_weight'"),
    (scheme(randomize=True), "there is no tensor 'up.g_weight'"),
    (scheme(location="middle"), "transforms 'middle'; known are"),
    (scheme(location="k_cache"), "scores of attention change"),
    (scheme(precision="torch.int8"), "precision 'int8' is none of"),
    (scheme(head_dim="all"), "head_dim is 'all', no integer"),
    (scheme(apply=3), "has no list 'apply'"),
    (scheme(type=[]), r"has the type '\[\]'"),
    (scheme(location={}), "transforms '{}'; known are"),
    (scheme(targets=[3]), "3"),
    ({**recorded()["auto_round hadamard 32"].settings, "rotation_config": {"block_size": None, "hadamard_type": "hadamard"}},
     "rotation_config.block_size is 'None', which says no size"),
])
def test_settings_that_no_one_can_obey(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """Every reader refuses them, with the reason."""
    case = recorded()["auto_round hadamard 32" if settings["quant_method"] == "auto-round" else "compressed-tensors permuted"]
    source = written(Case(case.settings, case.layer, case.packed, {}, case.x, case.y, case.y16), tmp_path / "in", settings)
    with pytest.raises(CheckpointError, match=message):
        loaded(source, "up")
    with Folder(source) as files_read, pytest.raises(CheckpointError, match=message):
        layers(files_read)


@pytest.mark.parametrize("shape", [(64,), (2, K), (K, 2)])
def test_tensors_of_another_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    case = recorded()["modelopt float32"]
    source = written(Case(case.settings, case.layer, case.packed, {"up.pre_quant_scale": torch.ones(shape)}, case.x, case.y,
                          case.y16), tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"'up.pre_quant_scale' is \[.*\], and \[96\] is needed"):
        loaded(source, "up")


@pytest.mark.parametrize(("transforms", "message"), [
    ({"up": [{"kind": "shift"}]}, "kind 'shift' is none of"), ({"up": [{"kind": "rotate", "sizes": 3}]}, "unknown key 'sizes'"),
    ({"up": [{"kind": "rotate", "size": "3"}]}, "size = '3' is no int"), ({"up": 3}, "3 is no object"),
    ({"up": [{"kind": "rotate", "size": 32, "dtype": "Tensor"}]}, "dtype 'Tensor' is none of"),
    ({"up": [{"kind": "multiply"}]}, "'multiply' has no tensor"), (["up"], "is no object|no object")])
def test_own_settings_that_are_wrong(tmp_path: Path, transforms: Any, message: str) -> None:
    case = recorded()["compressed-tensors permuted"]
    source = written(Case(case.settings, case.layer, case.packed, {}, case.x, case.y, case.y16), tmp_path / "in", {
        "quant_method": "qdsl", "format": "int8_channel", "storage": "safetensors", "transforms": transforms})
    with pytest.raises(CheckpointError, match=message):
        loaded(source, "up")


VALUES: tuple[Any, ...] = (None, True, 0, -1, 3, 1.5, "x", [], {}, ["up"], [None], {"a": 1}, "re:(", 1 << 40)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value of a JSON object."""
    items = [*value.items()] if isinstance(value, dict) else [*enumerate(value)] if isinstance(value, list) else []
    return [path, *(inner for key, own in items for inner in places(own, (*path, key)))]


@pytest.mark.parametrize("name", FEW)
def test_any_settings_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """With one value replaced by any other, by a sentence and never by a traceback."""
    case, draw = recorded()[name], Random(name)
    own = {"quant_method": "qdsl", "transforms": {"up": [{"kind": "rotate", "size": 32, "side": "input", "tensor": "up.x"}]}}
    source = written(case, tmp_path / "in")
    for settings in (case.settings, own):
        for path in places(settings)[1:]:
            changed = part = json.loads(json.dumps(settings))
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = draw.choice(VALUES)
            (source / "config.json").write_text(json.dumps({"model_type": "toy", "quantization_config": changed}))
            with suppress(CheckpointError, LoadError, FormatError):
                loaded(source, case.layer)


# -- other places ------------------------------------------------------------------------------------------------------


def test_plain_layers_transform_x(tmp_path: Path) -> None:
    """Where the producer left a layer of a rotated model as it was."""
    case = recorded()["compressed-tensors two groups"]
    settings = case.settings | {"ignore": ["plain"]}
    text = json.dumps(settings["transform_config"]).replace('"up"', '"re:up|plain"')
    source = written(case, tmp_path / "in", {**settings, "transform_config": json.loads(text)}, **{"plain.weight": torch.eye(K)})
    model = model_with("up")
    model.plain = nn.Linear(K, K, bias=False, device="meta")
    qdsl.load_weights_(model, source, dtype=torch.float32)
    with torch.no_grad():
        assert error(model.plain(case.x), case.y) < 1e-6 and error(torch.compile(model.plain)(case.x), case.y) < 1e-6
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)
    make_dense(model)
    with torch.no_grad():
        assert error(model.plain(case.x), case.y) < 2e-6 and not model.plain._modules
    converted(source, "q8_0", tmp_path / "q8")
    with Folder(tmp_path / "q8") as files_read:
        assert set(layers(files_read).transforms) == {"plain"}


def test_a_bias_is_transformed_with_the_output(tmp_path: Path) -> None:
    case = recorded()["compressed-tensors hadamard 32 output"]
    source = written(case, tmp_path / "in", **{"up.bias": positive(K)})
    model = model_with("up", bias=True)
    qdsl.load_weights_(model, source, dtype=torch.float32)
    matrix = torch.kron(torch.eye(3), sylvester_hadamard(32)) / 32 ** 0.5
    with torch.no_grad():
        dense = model.up.format.dequantize(model.up.packed, torch.float32)
        reference = (case.x @ dense.t() + positive(K)) @ matrix
        assert error(model.up(case.x), reference) < 1e-6
        make_dense(model)
        assert error(model.up(case.x), reference) < 2e-6
    with pytest.raises(LoadError, match=r"its output is transformed .* and its bias with it"):
        qdsl.load_weights_(model_with("up", bias=True), source, skip=["up"])


@pytest.mark.parametrize("name", FEW)
def test_engines_refuse_transforms(name: str, tmp_path: Path) -> None:
    """The plug-ins for vLLM, vllm-omni and SGLang read folders by this function: it names place, transform and reason."""
    case = recorded()[name]
    source = written(case, tmp_path / "in")
    with Folder(source) as folder_read:
        [layer] = layers(folder_read).layers
    with pytest.raises(ShardError) as refusal:
        Served.of_folder(source)
    label = layer.transforms[0].label
    reason = f"the layer transforms x ({label}), which no engine does; quantize the model without that"
    assert str(refusal.value) == f"{source}: '{case.layer}': {reason}"


@pytest.mark.parametrize("size", [64, 256, 512, 768, 1024, 1792])
@pytest.mark.parametrize("signs", [False, True])
def test_large_matrices_are_multiplied_as_factors(size: int, signs: bool) -> None:
    """A Hadamard matrix of a file, with signs or without, or one that is built."""
    power = size & -size
    left = torch.linalg.qr(random(size // power, size // power)).Q.sign().contiguous()
    matrix = torch.kron(left, sylvester_hadamard(power))
    matrix = matrix * random(size, 1, seed=3).sign() if signs else matrix
    module = Rotation(Transform("rotate", tensor="r", size=size, normalized=True), matrix.to(torch.int8))
    x = random(3, 2 * size, seed=4)
    reference = (x.view(3, 2, size).double() @ matrix.double() / size ** 0.5).reshape(3, -1).float()
    assert error(module(x), reference) < 1e-6
    assert (module.whole is None) == (size > WHOLE) and (module.right is None or len(module.right) >= LEAST)
    if size == power:
        built = Rotation(Transform("rotate", size=size))
        reference = (x.view(3, 2, size) @ sylvester_hadamard(size) / size ** 0.5).view(3, -1)
        assert error(built(x), reference) < 1e-6


@pytest.mark.parametrize("base", base_matrices())
def test_bases_are_hadamard_matrices(base: int) -> None:
    """And so are their products with Sylvester's, of which large ones are multiplied as factors."""
    for transposed, size in ((False, base), (True, 8 * base)):
        own = Transform("rotate", size=size, base=base, transposed=transposed)
        matrix = rotation(own, None, None)
        assert base_of(size) in base_matrices()
        torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
        x = random(2, 2 * size)
        assert error(Rotation(own)(x), (x.view(2, 2, size).double() @ matrix).reshape(2, -1).float()) < 1e-6


def test_any_other_large_matrix_is_multiplied_whole() -> None:
    matrix = torch.linalg.qr(random(512, 512)).Q
    module = Rotation(Transform("rotate", tensor="r", size=512), matrix)
    x = random(3, 512, seed=4)
    assert error(module(x), x @ matrix) < 1e-6 and module.whole is not None


def test_folding_is_the_inverse_of_what_producers_fuse() -> None:
    """Weights that producers rotate come back, in the order of their transforms."""
    transforms = [Transform("divide", tensor="s"), Transform("rotate", size=32), Transform("rotate", "output", size=16)]
    tensors, weight = {"s": positive(K)}, random(64, K)
    matrices = [torch.kron(torch.eye(n // own.size), rotation(own, None, None).float()) for n, own in
                ((K, transforms[1]), (64, transforms[2]))]
    fused = matrices[1].t() @ weight * positive(K) @ matrices[0]
    assert error(fold_transforms(fused, transforms[:2], tensors.__getitem__).float(), matrices[1].t() @ weight) < 1e-6
    whole = fold_transforms(fused, transforms, tensors.__getitem__).float()
    modules = layer_transforms(transforms, tensors.__getitem__)
    x = random(4, K, seed=9)
    reference = transformed(modules, transformed(modules, x, INPUT) @ fused.t(), "output")
    assert error(x @ whole.t(), reference) < 1e-6
