"""Quantized folders of tiny language models, with the names, storages and configs of each producer."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.guard import with_guard
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.rules import numbers
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.compress import run as compression
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.convert import run as conversion
from qdsl.jobs.convert.config import own_settings
from qdsl.jobs.convert.plan_conversion import full_name, small_tensors
from qdsl.jobs.convert.target import parse_conversion
from qdsl.runtime import PackedWeight
from tests.support import formats, language_models

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """A format in one of its storages, with parameters of the format."""

    format: str
    storage: str
    params: Mapping[str, int | str | bool] = field(default_factory=dict)

    def pack(self, weight: Tensor) -> PackedWeight:
        """A weight [N, K] in this storage; a random one of such a size for formats that qdsl does not quantize to."""
        module = import_module(f"qdsl.generated.{self.format}")
        if self.format.startswith("aqlm"):
            return _random(self, weight)
        packed: PackedWeight = module.quantize(weight, self.storage, **self.params)
        return packed


@dataclass(frozen=True)
class Kind:
    """How a producer writes a quantized folder.

    stored: the storage of projections.  attention: that of attention where it is another.  embedded: that of embedding and head.
    ends: which of those two are packed.
    settings: the producer's, None for qdsl's own.  file, entry: the file that has them, and where in a config.json.
    ignore: the key of the list of modules that are not quantized.  extra: tensors of one number next to each weight.
    prepare: packs a weight in place of `Stored.pack`.  converted: the storage that `qdsl convert` gives the folder.
    opens: how transformers opens it with qdsl: "plain" by `from_pretrained`, "config" by that with a `QdslConfig()`, "function"
    by `qdsl.models.transformers.from_pretrained` alone.
    """

    stored: Stored
    settings: Settings | None = None
    ignore: str = ""
    opens: Literal["plain", "config", "function"] = "config"
    file: str = "config.json"
    extra: Mapping[str, float] = field(default_factory=dict)
    prepare: Callable[[Stored, Tensor], PackedWeight] | None = None
    converted: str = ""
    entry: str = "quantization_config"
    embedded: Stored | None = None
    attention: Stored | None = None
    ends: frozenset[str] = frozenset({"model.embed_tokens.weight", "lm_head.weight"})

    def stored_as(self, name: str) -> Stored | None:
        """The storage of the tensor of this name; None for one that stays plain."""
        if language_models.is_embedding(name):
            return self.embedded if name in self.ends else None
        if not language_models.is_projection(name):
            return None
        return self.attention if self.attention is not None and ".self_attn." in name else self.stored


def _random(stored: Stored, weight: Tensor) -> PackedWeight:
    """Random codes, with scales that make them about as large as a weight."""
    path = formats.ROOT / "specs" / f"{stored.format}.yaml"
    case = formats.Case(path, stored.storage, tuple(stored.params.items()))
    seed = int(weight.float().abs().sum()) % 1000
    fields = formats.random_fields(case, (weight.shape[0], weight.shape[1]), seed, dict(stored.params))
    fields["s"] = weight.float().abs().mean(1).to(fields["s"].dtype)
    packed: PackedWeight = case.module.pack(fields, storage=stored.storage, **dict(stored.params))
    return packed


def act_order(stored: Stored, weight: Tensor) -> PackedWeight:
    """A weight whose columns were quantized in the order of their size, as GPTQ does with `desc_act`."""
    module = import_module(f"qdsl.generated.{stored.format}")
    order = weight.float().abs().sum(0).argsort(descending=True)
    ordered = module.quantize(weight[:, order], stored.storage, **stored.params)
    fields, place = module.unpack(ordered), order.argsort()
    fields |= {"q": fields["q"][:, place], "g": fields["g"][place]}
    packed: PackedWeight = module.pack(fields, storage=stored.storage, **ordered.params)
    return packed


# -- the settings of producers ----------------------------------------------------------------------------------------


def _group(scheme: Settings, inputs: Settings | None = None, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": inputs,
                                          "output_activations": None, **more}}}


def _compressed(format: str, inputs: Settings | None = None, **scheme: Any) -> dict[str, Any]:
    """Settings as compressed-tensors writes them."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
               "observer_kwargs": {}, "symmetric": True, **scheme}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "version": "0.13.0",
            "global_compression_ratio": None, "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
            **_group(weights, inputs, format=format)}


def _bitsandbytes(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "_load_in_4bit": False, "_load_in_8bit": False, "load_in_4bit": False,
            "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False, "llm_int8_threshold": 6.0, **changes}


def _gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
            "checkpoint_format": "gptq", "pack_dtype": "int32", "true_sequential": True, "damp_percent": 0.05,
            "meta": {"quantizer": ["gptqmodel:4.0.0"]}, **changes}


def _hqq(bits: int, group: int, axis: int) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": True, "round_zero": bits == 4,
               "view_as_float": False}
    return {"quant_method": "hqq", "quant_config": {"offload_meta": False, "scale_quant_params": None, "zero_quant_params": None,
                                                    "weight_quant_params": weights}}


def _aqlm(books: int, bits: int) -> dict[str, Any]:
    return {"quant_method": "aqlm", "num_codebooks": books, "nbits_per_codebook": bits, "in_group_size": 8, "out_group_size": 1}


_DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
_NF4 = {"load_in_4bit": True, "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_FP4_BLOCKS: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                               "scale_dtype": "torch.float8_e4m3fn"}
_MX_BLOCKS: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_MODELOPT = {"producer": {"name": "modelopt", "version": "0.37.0"}}

_OWN = {
    "own q4_0": Kind(Stored("q4_0", "gguf"), opens="plain"),
    "own q4_k": Kind(Stored("q4_k", "gguf"), opens="plain"),
    "own q8_0, embedding too": Kind(Stored("q8_0", "gguf"), embedded=Stored("q8_0", "gguf"), opens="plain"),
    "own int_group": Kind(Stored("int_group", "gptq_v2", {"bits": 4, "group": 64}), opens="plain"),
    "own nf4": Kind(Stored("nf4", "bitsandbytes"), opens="plain"),
    "own mixed": Kind(Stored("ocp_mxfp4", "compressed_tensors"), attention=Stored("fp8_channel", "safetensors"), opens="plain"),
    "hlane": Kind(Stored("hlane", "hlane"), opens="plain"),
    "fix4": Kind(Stored("fix4", "fix4"), opens="plain"),
    "df11": Kind(Stored("df11", "df11"), opens="function"),
}

_FLOAT8 = {
    "fp8 block": Kind(Stored("fp8_block", "safetensors", {"bn": 128, "bk": 128, "scale_type": "bf16"}), {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "modules_to_not_convert"),
    "fp8 tensor, static": Kind(Stored("fp8_tensor", "safetensors"), {"quant_method": "fp8", "activation_scheme": "static"},
                               "ignored_layers", extra={"input_scale": 0.02}),
    "compressed-tensors fp8 block": Kind(
        Stored("fp8_block", "safetensors", {"bn": 128, "bk": 128, "scale_type": "bf16"}),
        _compressed("float-quantized", **_FP8, strategy="block", block_structure=[128, 128]), "ignore"),
    "compressed-tensors fp8 channel": Kind(Stored("fp8_channel", "safetensors"),
                                           _compressed("float-quantized", {**_DYNAMIC, **_FP8}, **_FP8, strategy="channel"),
                                           "ignore"),
    "compressed-tensors fp8 tensor": Kind(Stored("fp8_tensor", "safetensors"),
                                          _compressed("float-quantized", {**_FP8, "strategy": "tensor", "dynamic": False},
                                                      **_FP8, strategy="tensor"), "ignore", extra={"input_scale": 0.02}),
    "modelopt fp8": Kind(Stored("fp8_tensor", "safetensors"), {**_MODELOPT, "quantization": {
        "quant_algo": "FP8", "kv_cache_quant_algo": None}}, "exclude_modules", "function", "hf_quant_config.json",
        extra={"input_scale": 0.02}),
    "torchao float8": Kind(Stored("fp8_channel", "safetensors", {"scale_type": "f32"}), converted="torchao"),
}

_INTEGERS = {
    "gptq v1": Kind(Stored("int_group", "gptq_v1", {"bits": 4, "group": 128, "symmetric": True}), _gptq()),
    "gptq v2": Kind(Stored("int_group", "gptq_v2", {"bits": 4, "group": 64}),
                    _gptq(group_size=64, sym=False, checkpoint_format="gptq_v2")),
    "gptq act-order": Kind(Stored("int_group", "gptq_v1", {"bits": 4, "group": 64, "symmetric": True}),
                           _gptq(desc_act=True, group_size=64), prepare=act_order),
    "gptq int8": Kind(Stored("int_group", "gptq_v1", {"bits": 8, "group": 128, "symmetric": True}), _gptq(bits=8)),
    "awq": Kind(Stored("int_group", "awq", {"bits": 4, "group": 128}), {
        "quant_method": "awq", "backend": "autoawq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "do_fuse": False, "exllama_config": None}, "modules_to_not_convert"),
    "compressed-tensors int4": Kind(Stored("int_group", "pack_quantized", {"bits": 4, "group": 128, "scale_type": "bf16",
                                                                           "symmetric": True}),
                                    _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
                                    "ignore"),
    "compressed-tensors int4, zero points": Kind(
        Stored("int_group", "pack_quantized", {"bits": 4, "group": 64, "scale_type": "bf16"}),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False), "ignore"),
    "compressed-tensors int8": Kind(Stored("int8_channel", "safetensors"),
                                    _compressed("int-quantized", {**_DYNAMIC, "type": "int"}, num_bits=8, type="int",
                                                strategy="channel"), "ignore"),
    "bitsandbytes int8": Kind(Stored("bnb_int8", "bitsandbytes"), _bitsandbytes(load_in_8bit=True, _load_in_8bit=True),
                              "llm_int8_skip_modules"),
    "hqq": Kind(Stored("hqq", "hqq", {"bits": 4, "group": 64}), _hqq(4, 64, 1), "skip_modules"),
    "hqq 3 bits": Kind(Stored("hqq", "hqq_3bit", {"bits": 3, "group": 64}), _hqq(3, 64, 1), "skip_modules"),
    "hqq axis 0": Kind(Stored("hqq_axis0", "hqq", {"bits": 4, "group": 64}), _hqq(4, 64, 0), "skip_modules"),
    "torchao int8": Kind(Stored("int8_channel", "safetensors"), converted="torchao"),
    "torchao int4": Kind(Stored("int_group", "pack_quantized", {"bits": 4, "group": 128, "scale_type": "bf16"}),
                         converted="torchao_plain_int32"),
}

_CODEBOOKS = {
    "bitsandbytes nf4": Kind(Stored("nf4", "bitsandbytes"), _bitsandbytes(**_NF4), "llm_int8_skip_modules"),
    "bitsandbytes nested nf4": Kind(Stored("nf4_nested", "bitsandbytes"), _bitsandbytes(**_NF4, bnb_4bit_use_double_quant=True),
                                    "llm_int8_skip_modules"),
    "bitsandbytes fp4": Kind(Stored("bnb_fp4", "bitsandbytes"), _bitsandbytes(load_in_4bit=True, _load_in_4bit=True),
                             "llm_int8_skip_modules"),
    "compressed-tensors nvfp4": Kind(Stored("nvfp4_ct", "compressed_tensors"),
                                     _compressed("nvfp4-pack-quantized", {**_FP4_BLOCKS, "dynamic": "local"}, **_FP4_BLOCKS),
                                     "ignore", extra={"input_global_scale": 300.0}),
    "compressed-tensors mxfp4": Kind(Stored("ocp_mxfp4", "compressed_tensors"),
                                     _compressed("mxfp4-pack-quantized", **_MX_BLOCKS), "ignore"),
    "modelopt nvfp4": Kind(Stored("nvfp4_modelopt", "modelopt"), {
        **_MODELOPT, "quant_method": "modelopt", "quant_algo": "NVFP4",
        **_group({"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16})},
        "ignore", "function", extra={"input_scale": 0.003}),
    "torchao mxfp4": Kind(Stored("ocp_mxfp4", "compressed_tensors"), converted="torchao"),
    "bitnet": Kind(Stored("bitnet", "transformers"), {"quant_method": "bitnet", "linear_class": "bitlinear",
                                                      "quantization_mode": "offline"}, "modules_to_not_convert"),
    "aqlm 2x8": Kind(Stored("aqlm_2x8", "aqlm", {"real": "f16"}), _aqlm(2, 8), "linear_weights_not_to_quantize"),
    "aqlm 1x16": Kind(Stored("aqlm_1x16", "aqlm", {"real": "f16"}), _aqlm(1, 16), "linear_weights_not_to_quantize"),
}

KINDS: dict[str, Kind] = _OWN | _FLOAT8 | _INTEGERS | _CODEBOOKS
# Which vLLM has no settings for, so that it is none of KINDS.
MLX = Kind(Stored("mlx", "mlx", {"bits": 4, "group": 64}), {"group_size": 64, "bits": 4}, opens="function", entry="quantization")
MXFP4 = "mxfp4"                                                  # gpt-oss alone, whose experts are stacked


# -- writing ----------------------------------------------------------------------------------------------------------


def write_folder(path: Path, kind: str | Kind, model: str, head: Tensor | None = None) -> dict[str, Tensor]:
    """Write a quantized folder of a tiny model, and return the decoded float32 weights, named as in checkpoints.

    kind: one, or the name of one of KINDS, or 'mxfp4' of the model 'gpt_oss'.  model: 'qwen3', 'tied', 'moe' or 'gpt_oss'.
    head: the weight of the head, by default that of the model.
    """
    plain = {**language_models.weights(model), **({} if head is None else {"lm_head.weight": head})}
    config = language_models.config_json(model)
    if (kind == MXFP4) != (model == "gpt_oss"):
        raise ValueError(f"no {kind} folder of {model}")
    if kind == MXFP4:
        return _write_stacks(path, plain, config)
    if isinstance(kind, str) and kind in ("hlane", "fix4", "df11"):
        source = path.with_name(f"{path.name} plain")
        write_files(source, plain, {"config.json": config}, model)
        compression.compress(source, Compression(kind), path)
        return {name: tensor.float() for name, tensor in plain.items()}
    kind = KINDS[kind] if isinstance(kind, str) else kind
    tensors, decoded, own = _quantized(kind, plain)
    files = _texts(kind, config, own, plain)
    if not kind.converted:
        write_files(path, tensors, files, model)
    else:
        source = path.with_name(f"{path.name} own")
        write_files(source, tensors, files, model)
        with Folder(source) as folder:
            conversion.convert(folder, layers(folder), parse_conversion(kind.converted), path)
    return decoded


def _quantized(kind: Kind, plain: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors of a folder, the decoded weights, and the format, storage and parameters of each packed layer."""
    tensors: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name, tensor in plain.items():
        stored = kind.stored_as(name)
        if stored is None:
            tensors[name], decoded[name] = tensor, tensor.float()
            continue
        packed = kind.prepare(stored, tensor) if kind.prepare else stored.pack(tensor)
        layer = name.removesuffix(".weight")
        tensors |= named(layer, packed)
        tensors |= {f"{layer}.{leaf}": torch.tensor(number) for leaf, number in kind.extra.items()}
        decoded[name] = packed.format.dequantize(packed, torch.float32)
        settings[layer] = {"format": stored.format, "storage": stored.storage, **packed.params}
    return tensors, decoded, settings


def named(layer: str, packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a layer as files have them, with the small ones that producers add."""
    description = next(page for page in descriptions() if page.name == packed.format.name)
    single = numbers(description)                                # which JSON states
    described = Layer(layer, packed.format.name, packed.storage, packed.params, packed.shape)
    tensors = {full_name(described, name, packed.layout.tensors[name].aliases): _as_seen(packed, name, tensor)
               for name, tensor in packed.tensors.items() if name not in single}
    small = small_tensors(described, packed.format, packed.params, {}, {name: float(packed.tensors[name]) for name in single})
    return tensors | {full_name(described, name): torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
                      for name, (dtype, shape, data) in small.items()}


def _as_seen(packed: PackedWeight, name: str, tensor: Tensor) -> Tensor:
    """A matrix in the shape that files give it."""
    is_turned = [axis.text for axis in packed.layout.tensors[name].seen] == ["K", "N"]
    return tensor.contiguous().reshape(packed.shape[::-1] if is_turned else tensor.shape)


def _texts(kind: Kind, config: dict[str, Any], own: Mapping[str, Settings], plain: Mapping[str, Tensor]) -> dict[str, Settings]:
    """The JSON files of a folder: config.json, and the producer's own where it has one."""
    dense = [name.removesuffix(".weight") for name, tensor in plain.items()
             if tensor.dim() == 2 and name.removesuffix(".weight") not in own and "embed" not in name]
    if kind.settings is None:
        return {"config.json": with_guard({**config, "quantization_config": own_settings(own, dense)})}
    settings: dict[str, Any] = dict(kind.settings)
    ignored = {kind.ignore: dense} if kind.ignore else {}
    if kind.file == "config.json":
        return {"config.json": {**config, kind.entry: {**settings, **ignored}}}
    return {"config.json": config, kind.file: {**settings, "quantization": {**settings["quantization"], **ignored}}}


def write_own(path: Path, weights: Mapping[str, PackedWeight], plain: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write packed weights of any formats, by the names of their layers, with plain tensors and qdsl's own settings."""
    settings = {name: {"format": packed.format.name, "storage": packed.storage, **packed.params}
                for name, packed in weights.items()}
    tensors = {full: tensor for name, packed in weights.items() for full, tensor in named(name, packed).items()}
    write_files(path, {**plain, **tensors}, {"config.json": {**config, "quantization_config": own_settings(settings, ())}}, "")
    return path


def write_files(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, Settings], model: str) -> None:
    """Write tensors and JSON files; those of a model with experts in two files with an index."""
    path.mkdir(parents=True)
    if model not in ("moe", "gpt_oss"):
        write(path / "model.safetensors", tensors, {"format": "pt"})
    else:
        files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
        places = {name: files[place % 2] for place, name in enumerate(tensors)}      # a weight apart from its scale
        for file in files:
            write(path / file, {name: tensors[name] for name in tensors if places[name] == file}, {"format": "pt"})
        size = sum(tensor.nbytes for tensor in tensors.values())
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    for name, content in texts.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_stacks(path: Path, plain: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """gpt-oss as its makers publish it: experts in blocks [E, N, K / 32, 16], and the rest plain; its decoded weights."""
    stored = Stored("ocp_mxfp4", "gpt_oss")
    tensors: dict[str, Tensor] = {}
    decoded = {name: tensor.float() for name, tensor in plain.items()}
    for name, tensor in plain.items():
        if tensor.dim() != 3:
            tensors[name] = tensor
            continue
        packed = [stored.pack(expert.t().contiguous()) for expert in tensor]         # files have [E, N, K], the model [E, K, N]
        tensors |= {f"{name}_{leaf}": torch.stack([expert.tensors[leaf] for expert in packed]) for leaf in ("blocks", "scales")}
        decoded[name] = torch.stack([expert.format.dequantize(expert, torch.float32).t() for expert in packed]).contiguous()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    write_files(path, tensors, {"config.json": {**config, "quantization_config": settings}}, "gpt_oss")
    return decoded


def same_weights(one: Path, other: Path) -> bool:
    """Whether a folder has safetensors files, and another one the same bytes in files of these names."""
    names = [path.name for path in one.glob("*.safetensors")]
    return bool(names) and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)
