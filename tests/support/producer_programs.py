"""What producers' own programs compute with a layer, for every setting of their config classes at another value than its default.

`python -m tests.support.producer_programs` records answers in tests/data/programs, with the packages that `make live` installs;
tests/live/test_producer_programs_live.py compares them again, and tests/checkpoint/test_producer_programs.py what qdsl computes.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.files.safetensors import write
from tests.support.modelopt_layers import modelopt_packed
from tests.support.producer_answers import CALIBRATED, LAYER, OTHER, SIZE, Answer, record, set_key, x
from tests.support.producer_folders import KINDS, Kind, Stored, named

# -- a model ---------------------------------------------------------------------------------------------------------------


@cache
def plain(folder: Path) -> Path:
    """A folder with a Llama of one layer, in float32."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=SIZE, intermediate_size=2 * SIZE, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).float()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1").save_pretrained(folder)
    return folder


def loaded(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **more).eval()


@torch.no_grad()
def result(model: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """What the layer of a loaded model computes with x times a factor."""
    y: Tensor = model.get_submodule(LAYER)((x() * scale).to(dtype))
    return y.float()


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the layer's tensors in a saved folder."""
    from safetensors.torch import load_file

    every = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    config = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config", {}), {name: own for name, own in every.items() if name.startswith(LAYER)}


def quantized(config: Any, work: Path) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """A model that transformers quantizes, saves and loads again by a config: settings, tensors and result of the layer."""
    shutil.rmtree(work / "out", ignore_errors=True)
    loaded(plain(work / "plain"), quantization_config=config).save_pretrained(work / "out")
    return *stored(work / "out"), result(loaded(work / "out"))


def others(key: str, default: Any, values: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Values of a setting that are not its default."""
    if key in values:
        return values[key]
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int):
        return (default * 2,)
    if isinstance(default, float):
        return (default / 2,)
    return ()


def defaults(cls: Any) -> dict[str, Any]:
    """The arguments of a config class with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {one.name: one.default for one in parameters if one.name not in ("self", "kwargs")}


Program = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Tensor], Tensor]]


def answers(producer: str, package: str, base: dict[str, Any], keys: Mapping[str, tuple[Any, ...]], run: Program,
            ) -> Iterator[Answer]:
    """The answer without a changed setting, then that of every setting and value."""
    version = f"{package} {importlib.metadata.version(package)}"
    for key, value in [("", None), *((key, value) for key, values in keys.items() for value in values)]:
        changed = set_key(base, key, value) if key else base
        try:
            settings, tensors, y = run(changed)
        except Exception as error:                               # whatever a program raises is its refusal
            text = re.sub(r"'/[^']*/", "'", f"{type(error).__name__}: {error}")      # files without their folders
            yield Answer(producer, key, shown(value), {}, {}, None, text[:200], package=version)
            if not key:
                return
            continue
        yield Answer(producer, key, shown(value), json.loads(json.dumps(settings, default=str)), tensors, y, package=version)


def shown(value: Any) -> Any:
    """A value as JSON has it."""
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)


# -- transformers quantizes --------------------------------------------------------------------------------------------------


def bitsandbytes(work: Path) -> Iterator[Answer]:
    from transformers import BitsAndBytesConfig

    values: dict[str, tuple[Any, ...]] = {
        "llm_int8_skip_modules": (["o_proj"], ["lm_head", "up_proj"], [LAYER]), "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_compute_dtype": ("bfloat16", "float16"), "bnb_4bit_quant_storage": ("bfloat16", "float32", "float16"),
        "llm_int8_threshold": (0.0, 1.0), "load_in_8bit": (), "load_in_4bit": ()}
    for bits in (4, 8):
        keys = {key: others(key, default, values) for key, default in defaults(BitsAndBytesConfig).items()}
        yield from answers(f"bitsandbytes {bits}", "bitsandbytes", {f"load_in_{bits}bit": True}, keys,
                           lambda settings: quantized(BitsAndBytesConfig(**settings), work))


def torchao(work: Path) -> Iterator[Answer]:
    """Each class of torchao, with each of its fields, and the arguments of transformers."""
    import torchao.quantization as package
    from transformers import TorchAoConfig

    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        own = getattr(package, settings["class"])(**settings.get("fields", {}))
        return quantized(TorchAoConfig(own, **settings.get("arguments", {})), work)

    values: dict[str, tuple[Any, ...]] = {
        "group_size": (32, 64), "int4_packing_format": ("plain_int32", "tile_packed_to_4d", "opaque", "preshuffled"),
        "int4_choose_qparams_algorithm": ("hqq",), "version": (1, 2), "granularity": (package.PerRow(), package.PerTensor(),
                                                                                     package.PerGroup(32)),
        "weight_dtype": (torch.float8_e5m2, torch.int4), "activation_dtype": (torch.float8_e5m2,), "act_mapping_type": ()}
    for name in ("Int8WeightOnlyConfig", "Int4WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig",
                 "Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig",
                 "Int8DynamicActivationIntxWeightConfig", "Float8DynamicActivationInt4WeightConfig"):
        cls = getattr(package, name)
        keys = {f"fields.{one.name}": others(one.name, one.default, values) for one in fields(cls)}
        keys |= {"arguments.modules_to_not_convert": (["o_proj"], [LAYER]), "arguments.include_input_output_embeddings": (True,),
                 "arguments.untie_embedding_weights": (True,)} if name == "Int8WeightOnlyConfig" else {}
        yield from answers(f"torchao {name}", "torchao", {"class": name}, keys, run)


# -- packages of their own ---------------------------------------------------------------------------------------------------


def of_layer(work: Path, replaced: Callable[[torch.nn.Linear], torch.nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer that a package puts in place of a plain one, and what it computes."""
    module = replaced(loaded(plain(work / "plain")).get_submodule(LAYER))
    with torch.no_grad():
        y: Tensor = module(x())
    state = {f"{LAYER}.{name}": tensor.detach() for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    return state, y.float()


def hqq(work: Path) -> Iterator[Answer]:
    from hqq.core.quantize import HQQLinear, hqq_base_quant_config

    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        more = {key: settings[key] for key in ("optimize", "round_zero", "channel_wise") if key in settings}
        config = hqq_base_quant_config(**{key: value for key, value in settings.items() if key not in more})
        config["weight_quant_params"] |= more
        tensors, y = of_layer(work, lambda linear: HQQLinear(
            linear, config, compute_dtype=torch.float32, device="cpu"))
        return {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, tensors, y

    values: dict[str, tuple[Any, ...]] = {"nbits": (8, 6, 5, 3, 2, 1), "group_size": (32, 128, None), "axis": (0,)}
    keys = {key: others(key, one.default, values) for key, one in inspect.signature(hqq_base_quant_config).parameters.items()}
    keys |= {"optimize": (True,), "round_zero": (True, False), "channel_wise": (False,)}
    yield from answers("hqq", "hqq", {"nbits": 4, "group_size": 64, "axis": 1, "optimize": False}, keys, run)


def quanto(work: Path) -> Iterator[Answer]:
    from optimum import quanto as package

    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        model = loaded(plain(work / "plain"))
        kinds = {key: getattr(package, f"q{settings[key]}") for key in ("weights", "activations") if settings.get(key)}
        package.quantize(model, **kinds, exclude=settings.get("modules_to_not_convert"))
        if "activations" in kinds:
            with package.Calibration():
                model.get_submodule(LAYER)(x())
        package.freeze(model)
        y = result(model)
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name.startswith(LAYER)}
        return {"quant_method": "quanto", "activations": None, "modules_to_not_convert": None, **settings}, tensors, y

    keys: dict[str, tuple[Any, ...]] = {"weights": ("int4", "int2", "float8"), "activations": ("int8", "float8"),
                                        "modules_to_not_convert": (["*o_proj"], [LAYER])}
    yield from answers("quanto", "optimum-quanto", {"weights": "int8"}, keys, run)


# -- programs that load what is packed -------------------------------------------------------------------------------------


def packed(folder: Path, source: Path, kind: Kind, settings: dict[str, Any]) -> Path:
    """A folder with the projections of a plain one in a producer's storage."""
    from safetensors.torch import load_file

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        own = kind.attention if kind.attention is not None and ".self_attn." in name else kind.stored
        tensors |= named(layer, kind.prepare(own, tensor) if kind.prepare else own.pack(tensor))
        tensors |= {f"{layer}.{leaf}": torch.tensor(number) for leaf, number in kind.extra.items()}
    if settings.get("quant_method") == "compressed-tensors":
        tensors = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()}
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def loading(producer: str, package: str, work: Path, kind: Kind, keys: Mapping[str, tuple[Any, ...]],
            load: Callable[[Path], Any] = loaded, dtype: torch.dtype = torch.float32, replaces: bool = False) -> Iterator[Answer]:
    """The answers of a program to a packed folder, each setting at other values.  replaces: its layers are of its own classes."""
    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        folder = packed(work / "in", plain(work / "plain"), kind, settings)
        model = load(folder)
        if replaces and type(model.get_submodule(LAYER)) is torch.nn.Linear:
            raise ValueError("the layer is a plain one, whose weight is missing and drawn at random")
        return *stored(folder), result(model, dtype)

    yield from answers(producer, package, dict(kind.settings or {}), keys, run)


def compressed_tensors(work: Path) -> Iterator[Answer]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from transformers import CompressedTensorsConfig

    for name in ("compressed-tensors int4", "compressed-tensors int4, zero points", "compressed-tensors int8",
                 "compressed-tensors fp8 channel", "compressed-tensors fp8 block", "compressed-tensors nvfp4",
                 "compressed-tensors mxfp4"):
        kind = KINDS[name]
        group = "config_groups.group_0"
        values: dict[str, tuple[Any, ...]] = {
            "format": ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense", "marlin-24"),
            "quantization_status": ("frozen", "initialized", "calibration"), "global_compression_ratio": (1.5,),
            "ignore": (["lm_head"], [LAYER], ["re:.*o_proj"], ["Linear"]), "kv_cache_scheme": ({"num_bits": 8, "type": "float"},),
            "sparsity_config": ({"format": "dense"}, {"format": "sparse-24-bitmask"}), "targets": (["re:.*o_proj"], [OTHER]),
            "num_bits": (4, 8), "type": ("int", "float"), "group_size": (32, 64, -1), "actorder": ("group", "weight", "static"),
            "strategy": ("tensor", "channel", "group", "block", "token", "tensor_group"), "observer": ("mse",),
            "observer_kwargs": ({"maxshrink": 0.5},), "block_structure": ([64, 64],), "scale_dtype": ("torch.float32",),
            "zp_dtype": ("torch.int8",), "input_activations": ({"num_bits": 8, "type": "int", "strategy": "token"},),
            "output_activations": ({"num_bits": 8, "type": "float"},), "version": ("0.1",)}
        keys = {key: others(key, one.default, values) for key, one in QuantizationConfig.model_fields.items()
                if key not in ("config_groups", "quant_method")}
        keys |= {f"{group}.{key}": others(key, one.default, values) for key, one in QuantizationScheme.model_fields.items()
                 if key != "weights"}
        keys |= {f"{group}.weights.{key}": others(key, one.default, values) for key, one in QuantizationArgs.model_fields.items()}
        yield from loading(name, "compressed-tensors", work, kind, keys, lambda folder: loaded(
            folder, quantization_config=CompressedTensorsConfig(dequantize=True)))


def gptqmodel(work: Path) -> Iterator[Answer]:
    """gptqmodel's own loader, with its kernels in torch: GPTQ's and AWQ's files."""
    from gptqmodel.quantization.config import AWQConfig, GPTQConfig

    values: dict[str, tuple[Any, ...]] = {
        "bits": (8, 3, 2), "group_size": (32, 64, -1), "format": ("gptq", "gptq_v2", "gemm", "gemv", "marlin"),
        "checkpoint_format": ("gptq", "gptq_v2", "gemm"), "quant_method": (), "method": ("gptq", "awq"),
        "dynamic": ({"-:.*o_proj": {}}, {"+:.*o_proj": {"bits": 8}}, {"+:.*up_proj": {"bits": 8, "group_size": 64}}),
        "pack_dtype": ("int64", "int16"), "adapter": (), "rotation": ("hadamard",), "version": ("gemm", "gemv"),
        "modules_in_block_to_quantize": ([["mlp.up_proj"]],), "desc_act": (True,), "mixed_bits": ({LAYER: 8},),
        "modules_to_not_convert": (["o_proj"],), "damp_percent": (0.2,), "meta": ({"mse": 2.0}, {"quantizer": ["a:1.0.0"]}),
        "lm_head": (True,), "true_sequential": (False,), "static_groups": (True,), "zero_point": (False,)}
    for name in ("gptq v1", "gptq v2", "gptq act-order", "awq"):
        cls = AWQConfig if name == "awq" else GPTQConfig
        keys = {one.name: others(one.name, one.default, values) for one in fields(cls)}
        more = ("mixed_bits", "checkpoint_format", "modules_in_block_to_quantize", "modules_to_not_convert", "version", "meta",
                "damp_percent", "true_sequential", "static_groups")
        keys |= {key: values[key] for key in more if key not in keys}
        if name in ("gptq v2", "gptq act-order"):
            keys = {key: keys[key] for key in ("format", "checkpoint_format", "desc_act", "sym", "meta")}
        yield from loading(name, "gptqmodel", work, kind_of(name), keys, loaded_by_gptqmodel(name), torch.float16,
                           replaces=True)


def gptqmodel_bits(work: Path) -> Iterator[Answer]:
    """gptqmodel's answers to layers of other bits and groups, and to those whose settings are of some layers."""
    for name, bits, group in (("gptq v1", 2, 32), ("gptq v1", 3, 32), ("gptq v1", 8, 32), ("gptq v1", 4, 64),
                              ("gptq v1", 4, -1), ("gptq v2", 2, 32), ("gptq v2", 3, 32), ("gptq v2", 8, 64),
                              ("gptq act-order", 8, 32), ("awq", 4, 64)):
        yield from loading(f"{name}, {bits} bits in groups of {group}", "gptqmodel", work, kind_of(name, bits, group), {},
                           loaded_by_gptqmodel(name), torch.float16, replaces=True)
    kind = kind_of("gptq v1")
    mixed = replace(kind, attention=kind_of("gptq v1", 8).stored, settings={
        **dict(kind.settings or {}), "dynamic": {"+:.*self_attn.*": {"bits": 8}}})
    yield from loading("gptq v1, attention of 8 bits", "gptqmodel", work, mixed, {}, loaded_by_gptqmodel("gptq v1"),
                       torch.float16, replaces=True)


def loaded_by_gptqmodel(name: str) -> Callable[[Path], Any]:
    """A function that loads a folder of a kind with gptqmodel's own kernels for CPUs."""
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.TORCH_AWQ if name == "awq" else BACKEND.TORCH
    return lambda folder: GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=backend).model


def kind_of(name: str, bits: int = 4, group: int = 32) -> Kind:
    """A kind of folder of other bits, and of groups that fit a layer of this size several times."""
    kind = KINDS[name]
    return replace(kind, stored=replace(kind.stored, params={**kind.stored.params, "bits": bits, "group": group}),
                   settings={**dict(kind.settings or {}), "bits": bits, "group_size": group})


def auto_round(work: Path) -> Iterator[Answer]:
    """auto-round's loader through transformers; those of its old releases wrote another quant_method."""
    from auto_round.compressors.base import SerializedCompressorConfig

    values: dict[str, tuple[Any, ...]] = {
        "bits": (8, 2), "group_size": (64, -1), "sym": (False,), "data_type": ("mx_fp", "float"), "act_bits": (8, 16),
        "packing_format": ("auto_round:auto_awq", "auto_round", "auto_round:gptq", "auto_round:gptqmodel", "auto", None),
        "extra_config": ({LAYER: {"bits": 8}}, {LAYER: {"bits": 16}}, {".*o_proj.*": {"bits": 16}}, {OTHER: {"bits": 8}}),
        "block_name_to_quantize": ("model.layers", "model.others"), "to_quant_block_names": ("model.layers", "model.others"),
        "quant_block_list": ([["model.layers.0"]],), "backend": ("auto", "torch"), "scale_dtype": ("torch.float32",),
        "modules_to_not_convert": (["o_proj"], [LAYER])}
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
                "packing_format": "auto_round:auto_gptq", "autoround_version": "0.16.1"}
    keys = {one.name: others(one.name, one.default, values) for one in fields(SerializedCompressorConfig)
            } if is_dataclass(SerializedCompressorConfig) else {}
    keys |= values
    for storage in ("gptq_v1", "gptq_v2"):
        kind = Kind(Stored("int_group", storage, {"bits": 4, "group": 32, "symmetric": True}), settings | (
            {"packing_format": "auto_round"} if storage == "gptq_v2" else {}))
        yield from loading(f"auto-round {storage}", "auto-round", work, kind, keys, replaces=True)


def old_auto_round(work: Path) -> Iterator[Answer]:
    """Layers as auto-round 0.3 and 0.4 pack them, whose own kernels need CUDA: y is that of the codes that they pack.

    QDSL_AUTO_ROUND is a folder with the unpacked package, as `pip install --no-deps --target` makes it.
    """
    sys.path.insert(0, os.environ["QDSL_AUTO_ROUND"])
    packer = import_module("auto_round_extension.cuda.qlinear_triton").QuantLinear
    linear = loaded(plain(work / "plain")).get_submodule(LAYER)
    for is_symmetric in (True, False):
        groups = linear.weight.detach().view(SIZE, -1, 32)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((2 * groups.abs().amax(2) if is_symmetric else high - low) / 15).half().float()
        zero = torch.full_like(scale, 8) if is_symmetric else (-low / scale).round().clamp(0, 15)
        codes = (groups / scale[..., None]).round().add(zero[..., None]).clamp(0, 15)
        weight = ((codes - zero[..., None]) * scale[..., None]).view(SIZE, SIZE)
        dense = torch.nn.Linear(SIZE, SIZE)
        dense.weight.data, dense.bias.data = weight, linear.bias.detach().half().float()
        module = packer(4, 32, SIZE, SIZE, True)
        module.device = "cpu"
        module.pack_cpu(dense, scale, zero)
        tensors = {f"{LAYER}.{name}": tensor for name, tensor in module.state_dict().items()}
        settings = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": is_symmetric, "data_type": "int",
                    "autoround_version": "0.4.7", "iters": 200, "backend": "auto_round:exllamav2"}
        for backend in ("auto_round:exllamav2", "auto_round:triton"):
            kind = "symmetric" if is_symmetric else "asymmetric"
            yield Answer(f"auto-round 0.4 {kind}", "backend", backend, settings | {"backend": backend}, tensors,
                         dense(x()).detach(), package="auto-round 0.4.7")


def transformers(work: Path) -> Iterator[Answer]:
    """What transformers decodes by itself: blocks of FP8, and BitNet."""
    from transformers import BitNetQuantConfig, FineGrainedFP8Config

    values: dict[str, tuple[Any, ...]] = {
        "activation_scheme": ("static",), "weight_block_size": ((64, 64), None), "modules_to_not_convert": (["o_proj"], [LAYER]),
        "modules_to_convert": (["up_proj"], ["o_proj"]), "scale_fmt": ("ue8m0",), "expert_dtype": ("fp4",), "fmt": ("e5m2",),
        "linear_class": ("autobitlinear",), "quantization_mode": ("online",), "use_rms_norm": (True,), "rms_norm_eps": (0.1,)}
    fp8 = replace(KINDS["fp8 block"], stored=Stored("fp8_block", "safetensors", {"bn": 64, "bk": 64, "scale_type": "f32"}),
                  settings={**dict(KINDS["fp8 block"].settings or {}), "weight_block_size": [64, 64]})
    values["weight_block_size"] = ([128, 128], [32, 64], None)
    keys = {key: others(key, default, values) for key, default in defaults(FineGrainedFP8Config).items()} | {"fmt": ("e5m2",)}
    yield from loading("fp8", "transformers", work, fp8, keys, lambda folder: loaded(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True)))
    keys = {key: others(key, default, values) for key, default in defaults(BitNetQuantConfig).items()}
    yield from loading("bitnet", "transformers", work, KINDS["bitnet"], keys)
    yield from loading("bitnet rms_norm", "transformers", work, replace(KINDS["bitnet"], settings={
        **dict(KINDS["bitnet"].settings or {}), "use_rms_norm": True}), {"rms_norm_eps": (0.1,)})


def aqlm(work: Path) -> Iterator[Answer]:
    from transformers import AqlmConfig

    values: dict[str, tuple[Any, ...]] = {"linear_weights_not_to_quantize": ([f"{LAYER}.weight"],)}
    keys = {key: others(key, default, values) for key, default in defaults(AqlmConfig).items()}
    yield from loading("aqlm 2x8", "aqlm", work, KINDS["aqlm 2x8"], keys)


def modelopt(work: Path) -> Iterator[Answer]:
    """modelopt's quantizers on a model, and the folder that it exports."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        model = loaded(plain(work / "plain"))
        mtq.quantize(model, getattr(mtq, settings["class"]), lambda model: (model(torch.arange(64)[None]),
                                                                           model.get_submodule(LAYER)(x())))
        y = result(model)
        shutil.rmtree(work / "out", ignore_errors=True)
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=work / "out")
        return *stored(work / "out"), y

    classes = ("FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "NVFP4_DEFAULT_CFG",
               "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG",
               "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "NVFP4_AWQ_LITE_CFG", "W4A8_NVFP4_FP8_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG")
    yield from answers("modelopt", "nvidia-modelopt", {"class": classes[0]}, {"class": classes[1:]}, run)


def quark(work: Path) -> Iterator[Answer]:
    """Quark's quantizers on a model, its export, and what transformers and Quark load of that."""
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    def run(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
        model = loaded(plain(work / "plain"))
        config = LLMTemplate.get("llama").get_config(**settings)
        quantizer = ModelQuantizer(config)
        model = quantizer.quantize_model(model, [torch.arange(64)[None]])
        model = quantizer.freeze(model)
        y = result(model, scale=CALIBRATED)
        shutil.rmtree(work / "out", ignore_errors=True)
        with torch.no_grad():
            export_safetensors(model=model, output_dir=str(work / "out"))
        return *stored(work / "out"), y

    schemes = ("int4_wo_128", "int8", "ptpc_fp8", "mxfp4", "mxfp4_weight_only", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_fp8", "amdfp4",
               "amdfp4_g32", "amdfp4_global32", "nvfp4", "int4_fp8")
    for answer in answers("quark", "amd-quark", {"scheme": "fp8"}, {"scheme": schemes, "kv_cache_scheme": ("fp8",), "algorithm": (
        "awq", "gptq", "smoothquant", "rotation", "autosmoothquant"), "exclude_layers": (["*o_proj"],)}, run):
        yield replace(answer, scale=CALIBRATED)


PRODUCERS: dict[str, Callable[[Path], Iterator[Answer]]] = {
    "bitsandbytes": bitsandbytes, "hqq": hqq, "quanto": quanto, "torchao": torchao, "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel, "gptqmodel-bits": gptqmodel_bits, "auto-round": auto_round, "auto-round-old": old_auto_round,
    "transformers": transformers, "aqlm": aqlm, "modelopt": modelopt,
    "modelopt-packed": lambda work: modelopt_packed(loaded(plain(work / "plain")).get_submodule(LAYER)), "quark": quark}


if __name__ == "__main__":
    for own in sys.argv[1:] or PRODUCERS:
        if own != "auto-round-old" or "QDSL_AUTO_ROUND" in os.environ:
            with tempfile.TemporaryDirectory() as folder:
                record(own, PRODUCERS[own](Path(folder)))
