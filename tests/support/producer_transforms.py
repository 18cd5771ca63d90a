"""Transforms of layers as producers' own packages compute them: settings and tensors of a layer, x, and the transformed x.

`python -m tests.support.producer_transforms` records them in tests/data/transforms, with the packages that `make live` installs;
tests/live/test_transforms_live.py compares them again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.files.safetensors import write
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "transforms"
K = 96                                                           # features; blocks are 32, 24 and 12, and all of them
CT = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "config_groups": {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}}}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True}
MXFP4 = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32, "sym": True,
         "data_type": "mx_fp"}


@dataclass(frozen=True)
class Case:
    """A layer [K, K] with transforms.

    settings: the producer's.  layer: its name.  packed: format and storage of its weight.  tensors: of its transforms, by name.
    x: input [4, K] in float32.  y: x with all transforms, input and output, as the producer computes it in float32, and y16 in
    bfloat16.
    """

    settings: dict[str, Any]
    layer: str
    packed: str
    tensors: dict[str, Tensor]
    x: Tensor
    y: Tensor
    y16: Tensor
    package: str = field(default="", compare=False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(size: int) -> Tensor:
    return torch.linspace(0.25, 3, size)[torch.randperm(size, generator=torch.Generator().manual_seed(1))]


def case(settings: dict[str, Any], layer: str, packed: str, tensors: dict[str, Tensor], apply: Callable[[Tensor], Tensor],
         package: str) -> Case:
    x = random(4, K)
    with torch.no_grad():
        return Case(settings, layer, packed, tensors, x, apply(x), apply(x.bfloat16()), package)


def without_init(package: str, name: str) -> ModuleType:
    """A module of a package whose own imports fail beside the libraries of the tests."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    parts = name.split(".")
    for count in range(1, len(parts)):
        path = Path(spec.submodule_search_locations[0]).joinpath(*parts[1:count])
        stand_in = ModuleType(".".join(parts[:count]))
        stand_in.__path__ = [str(path)]
        sys.modules.setdefault(stand_in.__name__, stand_in)
    return import_module(name)


# -- producers ---------------------------------------------------------------------------------------------------------


def autoawq() -> Iterator[tuple[str, Case]]:
    scaled = without_init("awq", "awq.modules.act").ScaledActivation
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    for layer, act in (("mlp.c_proj", "mlp.act"), ("mlp.dense_4h_to_h", "mlp.gelu_impl"), ("ffn.down_proj", "ffn.act"),
                       ("mlp.fc_out", "mlp.act")):
        scales = positive(K).half()
        module = scaled(nn.Identity(), scales)
        yield f"awq {layer}", case(settings, layer, "int_group.awq", {f"{act}.scales": scales},
                                   lambda x, module=module: module(x[None])[0].to(x.dtype), "awq")


def modelopt() -> Iterator[tuple[str, Case]]:
    quantizer = import_module("modelopt.torch.quantization.nn.modules.tensor_quantizer").TensorQuantizer
    for dtype in (torch.float32, torch.bfloat16):
        module = quantizer()
        module.disable()
        module.pre_quant_scale = positive(K).to(dtype)
        settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
        yield f"modelopt {str(dtype)[6:]}", case(settings, "up", "fp8_tensor.safetensors",
                                                 {"up.pre_quant_scale": positive(K).to(dtype)},
                                                 lambda x, module=module: module(x).to(x.dtype), "modelopt")


def bitnet() -> Iterator[tuple[str, Case]]:
    norm_class = import_module("transformers.models.llama.modeling_llama").LlamaRMSNorm
    for eps in (1e-6, 1e-2):
        norm = norm_class(K, eps=eps)
        norm.weight.data = positive(K)
        settings = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline", "use_rms_norm": True,
                    "rms_norm_eps": eps}
        yield f"bitnet {eps:g}", case(settings, "up", "bitnet.transformers", {"up.rms_norm.weight": positive(K)},
                                      lambda x, norm=norm: norm(x).to(x.dtype), "transformers")


def quark() -> Iterator[tuple[str, Case]]:
    utils = import_module("quark.torch.algorithm.rotation.rotation_utils")
    hadamard = import_module("quark.torch.algorithm.rotation.hadamard")
    for size in (32, 12, K):
        whole = size == K
        matrix, k = hadamard._get_hadamard_K(size)
        stored = utils.build_input_rotation_int8(matrix, size, k)
        for prescale in (False, True):
            tensors = {"up.input_rotation": stored} | ({"up.input_prescale": positive(K)} if prescale else {})
            transform = utils.HadamardTransform(rotation_size=size, use_matmul_hadU=whole, hadamard_K=matrix if whole else
                                                stored.float(), K=k if whole else None)

            def apply(x: Tensor, transform: nn.Module = transform, prescale: bool = prescale) -> Tensor:
                return transform(x * positive(K).to(x.dtype) if prescale else x)

            yield f"quark {size}{' prescale' if prescale else ''}", case(QUARK, "up", "fp8_channel.safetensors", tensors, apply,
                                                                        "quark")
    settings = QUARK | {"algo_config": [{"name": "rotation", "rotation_size": 32, "online_config": {
        "online_rotation_layers": ["up"]}}]}
    matrix, _ = hadamard._get_hadamard_K(32)
    yield "quark shared", case(settings, "up", "fp8_channel.safetensors",
                               {"shared_input_rotation_32": utils.build_input_rotation_int8(matrix, 32, 1)},
                               utils.HadamardTransform(32, False, matrix.float()), "quark")
    trained = torch.linalg.qr(random(32, 32, seed=5).double()).Q
    yield "quark trained", case(QUARK, "up", "fp8_channel.safetensors", {"up.input_rotation": trained},
                                utils.OrthogonalTransform(trained), "quark")


def auto_round() -> Iterator[tuple[str, Case]]:
    apply_module = import_module("auto_round.algorithms.transforms.hadamard.apply")
    config = import_module("auto_round.algorithms.transforms.hadamard.config").RotationConfig
    build = import_module("auto_round.algorithms.transforms.hadamard.transforms").build_hadamard_transform
    for kind, size in (("hadamard", 32), ("hadamard", 16), ("random_hadamard", 32), ("random_hadamard", 24)):
        layer = nn.Linear(K, K, bias=False)
        layer.weight.data = torch.eye(K)
        tensors = {}
        if kind == "random_hadamard":
            matrix = build(kind, block_size=size, generator=torch.Generator().manual_seed(2), location="weight").weight.data
            layer.register_buffer("hadamard_matrix", matrix)
            tensors = {"up.hadamard_matrix": matrix}
        settings = config(block_size=size, hadamard_type=kind)
        apply_module._apply_input_transform(layer, settings, "mx_fp")

        def apply(x: Tensor, layer: nn.Linear = layer) -> Tensor:
            return layer.to(x.dtype)(x) if not hasattr(layer, "hadamard_matrix") else _hooked(layer, x)

        yield f"auto_round {kind} {size}", case(MXFP4 | {"rotation_config": settings.model_dump()}, "up",
                                                "ocp_mxfp4.compressed_tensors", tensors, apply, "auto_round")
    yield from _spinquant()


def _hooked(layer: nn.Module, x: Tensor) -> Tensor:
    """x after the hooks of a layer, without its product."""
    for hook in layer._forward_pre_hooks.values():
        x = hook(layer, (x,))
    return x


def _spinquant() -> Iterator[tuple[str, Case]]:
    serialize = import_module("auto_round.algorithms.transforms.spinquant.serialize")
    hadamard = import_module("auto_round.algorithms.transforms.hadamard.utils.math").random_hadamard_matrix
    drawn = hadamard(32, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(3)).sign()
    trained = torch.linalg.qr(random(32, 32, seed=6)).Q
    for name, prefix, size, matrix, is_random, is_trained in (
            ("plain", "spinquant_r1", 32, None, False, False), ("random", "spinquant_r1", 32, drawn, True, False),
            ("trained", "spinquant_r4", 32, trained, False, True), ("24", "spinquant_r4", 24, None, False, False),
            ("whole", "spinquant_r4", K, None, False, False)):
        module = nn.Module()
        serialize._inject_rotation_buffers(module, prefix, size, is_random, is_trained, matrix)
        yield f"spinquant {name}", case(
            AUTO_ROUND | {"spinquant_config": {"algorithm": "spinquant", "r1": True, "r4": True}}, "up", "int_group.gptq_v1",
            {f"up.{own}": tensor for own, tensor in module.named_buffers()},
            lambda x, module=module, prefix=prefix: serialize._apply_rotation_from_buffer(module, x, prefix), "auto_round")


def compressed_tensors() -> Iterator[tuple[str, Case]]:
    for kind, size in (("hadamard", 32), ("random-hadamard", None), ("random-hadamard", 24), ("random-matrix", 16)):
        for places in (["input"], ["input inverse"], ["output"], ["input", "output inverse"]):
            yield f"compressed-tensors {kind} {size} {' '.join(places)}", _of_schemes([(kind, size, places, False)])
    yield "compressed-tensors permuted", _of_schemes([("hadamard", 32, ["input inverse"], True)])
    yield "compressed-tensors two groups", _of_schemes([("hadamard", 32, ["input", "output"], False),
                                                        ("random-hadamard", 24, ["input", "output inverse"], False)])
    yield "compressed-tensors weights too", _of_schemes([("hadamard", 16, ["input", "weight_input inverse"], False)])


def _of_schemes(groups: list[tuple[str, int | None, list[str], bool]]) -> Case:
    """A layer of compressed-tensors with groups of transforms: type, block, places, and whether columns are permuted."""
    transform = import_module("compressed_tensors.transform")
    model = nn.Module()
    model.up = nn.Linear(K, K, bias=False)
    model.up.weight.data = torch.eye(K)
    torch.manual_seed(0)
    schemes = {f"g{number}": transform.TransformScheme(type=kind, head_dim=size, randomize=permuted, apply=[
        transform.TransformArgs(targets=["up"], location=place.split()[0], inverse="inverse" in place) for place in places])
        for number, (kind, size, places, permuted) in enumerate(groups)}
    config = transform.TransformConfig(config_groups=schemes)
    transform.apply_transform_config(model, config)
    model.up.weight.data = torch.eye(K)                          # of what is fused into the weight nothing is to be seen
    tensors = {full: tensor.detach() for full, tensor in model.state_dict().items() if full != "up.weight"}

    def apply(x: Tensor) -> Tensor:
        model.up.weight.data = torch.eye(K, dtype=x.dtype)
        return model.up(x)

    unique = {tensor.data_ptr(): full for full, tensor in reversed(tensors.items())}          # files have shared tensors once
    return case(CT | {"transform_config": json.loads(config.model_dump_json())}, "up", "int8_channel.safetensors",
                {full: tensors[full] for full in sorted(unique.values())}, apply, "compressed_tensors")


PRODUCERS = {"awq": autoawq, "modelopt": modelopt, "transformers": bitnet, "quark": quark, "auto_round": auto_round,
             "compressed_tensors": compressed_tensors}


# -- data --------------------------------------------------------------------------------------------------------------


def record(producers: list[str]) -> None:
    """Write the answers of all producers."""
    cases = dict(one for name in producers for one in PRODUCERS[name]())
    DATA.mkdir(exist_ok=True)
    tensors, data = {}, {}
    for name, own in cases.items():
        data[name] = {"settings": own.settings, "layer": own.layer, "packed": own.packed, "package": own.package,
                      "tensors": [*own.tensors]}
        tensors |= {f"{name}/{part}": getattr(own, part).contiguous() for part in ("x", "y", "y16")}
        tensors |= {f"{name}/{full}": tensor.contiguous() for full, tensor in own.tensors.items()}
    write(DATA / "answers.safetensors", tensors)
    (DATA / "cases.json").write_text(json.dumps(data, indent=1) + "\n")


@cache
def recorded() -> dict[str, Case]:
    """The recorded answers by name."""
    from safetensors.torch import load_file

    tensors = load_file(DATA / "answers.safetensors")
    data = json.loads((DATA / "cases.json").read_text())
    return {name: Case(own["settings"], own["layer"], own["packed"], {full: tensors[f"{name}/{full}"] for full in own["tensors"]},
                       *(tensors[f"{name}/{part}"] for part in ("x", "y", "y16")), own["package"]) for name, own in data.items()}


if __name__ == "__main__":
    record([*PRODUCERS])
