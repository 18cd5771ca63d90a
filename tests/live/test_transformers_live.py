"""Folders that the producers' own packages write, loaded by the plug-in in a process that cannot import those packages.

Needs the packages: `make live` installs them into an environment of its own; a producer that is not there is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qdsl.checkpoint.files.safetensors import write
from tests.support import language_models, producer_folders
from tests.support.formats import ROOT, same_bits

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("producers")]

# Loads each folder by the plug-in, saves it again, and writes logits; prints an error, or '', for each.
LOADER = """
import json, sys
from pathlib import Path

folders, packages = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(packages))                      # whose imports are errors

from safetensors.torch import save_file
from qdsl.models.transformers import QdslConfig, from_pretrained
from tests.support import language_models
from transformers import AutoModelForCausalLM
import torch

torch.set_num_threads(1)
errors = []
for folder, dtype, dispatched in folders:
    try:
        options = {"dtype": getattr(torch, dtype)}
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QdslConfig(), **options) if dispatched else \
            from_pretrained(folder, **options)
        save_file({"logits": language_models.logits(model), "tokens": language_models.greedy(model).contiguous()},
                  Path(folder) / "results")
        model.save_pretrained(Path(folder) / "again")
        errors.append("")
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps(errors))
"""
PACKAGES = ("bitsandbytes", "torchao", "compressed_tensors", "hqq", "gptqmodel", "modelopt", "optimum", "kernels")

# Writes a folder from a folder of plain weights; gives the float32 weights of modules as the producer decodes them.
Producer = Callable[[Path, Path], Mapping[str, Tensor]]


def plain_folder(path: Path, model: str) -> Path:
    """A folder of a tiny model that is not quantized."""
    producer_folders.write_files(path, language_models.weights(model), {"config.json": language_models.config_json(model)}, model)
    return path


def load_plain(path: Path, config: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A folder as transformers loads it, quantized on the way with a config of transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=dtype)


def linears(model: Any) -> dict[str, Any]:
    """The projections of a model by their names."""
    return {name: module for name, module in model.named_modules() if language_models.is_projection(f"{name}.weight")}


# -- producers --------------------------------------------------------------------------------------------------------


def bitsandbytes_4bit(kind: str, nested: bool, plain: Path, out: Path) -> dict[str, Tensor]:
    from bitsandbytes.functional import dequantize_4bit

    model = load_plain(plain, transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind,
                                                              bnb_4bit_use_double_quant=nested))
    model.save_pretrained(out)
    decoded = {}
    for name, module in linears(model).items():
        module.weight.quant_state.dtype = torch.float32          # in which it decodes then
        decoded[name] = dequantize_4bit(module.weight.data, module.weight.quant_state)
    return decoded


def bitsandbytes_8bit(plain: Path, out: Path) -> dict[str, Tensor]:
    model = load_plain(plain, transformers.BitsAndBytesConfig(load_in_8bit=True))
    model.save_pretrained(out)
    return {name: module.weight.data.float() * module.weight.SCB[:, None] / 127 for name, module in linears(model).items()}


def torchao(kind: str, plain: Path, out: Path) -> dict[str, Tensor]:
    import torchao.quantization as quantization
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    configs = {"int8": partial(quantization.Int8WeightOnlyConfig, version=2), "nvfp4": NVFP4WeightOnlyConfig,
               "float8": quantization.Float8WeightOnlyConfig,
               "int8 groups": partial(quantization.Int8WeightOnlyConfig, granularity=quantization.PerGroup(64), version=2)}
    model = load_plain(plain, transformers.TorchAoConfig(configs[kind]()))
    model.save_pretrained(out)
    return {name: module.weight.dequantize(torch.float32) for name, module in linears(model).items()}


def fine_grained_fp8(plain: Path, out: Path) -> dict[str, Tensor]:
    """transformers' own FP8, which it quantizes to on a GPU alone, but for its check of the environment."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        model = load_plain(plain, transformers.FineGrainedFP8Config())
    model.save_pretrained(out)
    return {name: module.weight.float() * module.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
            for name, module in linears(model).items()}


def compressed_tensors(scheme: Mapping[str, Any], plain: Path, out: Path) -> dict[str, Tensor]:
    """As llm-compressor writes folders: scales by the range of weights, and this package's compressor."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = load_plain(plain)
    args = QuantizationArgs(**scheme)
    apply_quantization_config(model, QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)}, ignore=["lm_head"]))
    for module in linears(model).values():
        _set_ranges(module, args)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    compressor.decompress_model(model.float())
    return {name: module.weight.data for name, module in linears(model).items()}


def _set_ranges(module: Any, args: Any) -> None:
    """Give a Linear the scales and zero points of compressed-tensors for the range of its weights."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    n, k = module.weight.shape
    columns = args.group_size or k
    blocks = module.weight.data.view(n, k // columns, columns)
    low, high = blocks.amin(2), blocks.amax(2)
    whole = {"global_scale": generate_gparam(low.min(), high.max())} if args.strategy == "tensor_group" else {}
    scale, zero = calculate_qparams(low, high, args, **whole)
    module.weight_scale.data = scale
    module.weight_zero_point.data = zero
    if whole:
        module.weight_global_scale.data = whole["global_scale"]


def hqq(plain: Path, out: Path) -> dict[str, Tensor]:
    """Layers of hqq by themselves: transformers 5 does not quantize to HQQ, and hqq's own folders are pickles."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    options = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)

    def quantize(linear: Any) -> tuple[dict[str, Tensor], Tensor]:
        layer = HQQLinear(linear, options, compute_dtype=torch.float16, device="cpu", del_orig=False)
        exact = {name: value.float() if name in ("scale", "zero") else value for name, value in layer.meta.items()}
        return dict(layer.state_dict()), Quantizer.dequantize(layer.W_q, {**exact, "compute_dtype": torch.float32})

    return layer_by_layer(plain, out, quantize, {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": options})


def gptq(bits: int, desc_act: bool, plain: Path, out: Path) -> dict[str, Tensor]:
    """Layers that gptqmodel packs, of codes that are rounded."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    group = 64

    def quantize(linear: Any) -> tuple[dict[str, Tensor], Tensor]:
        n, k = linear.weight.shape
        order = torch.randperm(k, generator=torch.Generator().manual_seed(0)) if desc_act else torch.arange(k)
        index = (order.argsort() // group).int()
        size = torch.zeros(n, k // group).index_reduce_(1, index, linear.weight.data.float().abs(), "amax")
        scales, zeros = size / (2 ** (bits - 1) - 1), torch.full_like(size, 2 ** (bits - 1))
        layer = TorchLinear(bits=bits, group_size=group, sym=True, desc_act=desc_act, in_features=k, out_features=n)
        layer.pack_original(linear.float(), scales, zeros, index)    # `pack_block` compiles an extension first
        layer.post_init()
        stored = layer.scales
        layer.scales = stored.float()                            # in whose dtype it decodes
        decoded, layer.scales = layer.dequantize_weight().t(), stored
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=group))
        return dict(layer.state_dict()), decoded

    return layer_by_layer(plain, out, quantize, {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True,
                                                 "desc_act": desc_act, "checkpoint_format": "gptq", "lm_head": False})


def layer_by_layer(plain: Path, out: Path, quantize: Callable[[Any], tuple[dict[str, Tensor], Tensor]],
                   settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """A folder of layers that a package quantizes one by one, with its settings; the decoded weights."""
    model = load_plain(plain)
    tensors, decoded = dict(model.state_dict()), {}
    for name, module in linears(model).items():
        state, decoded[name] = quantize(module)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in state.items()}
    out.mkdir()
    write(out / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}, indent=2))
    return decoded


def modelopt(kind: str, plain: Path, out: Path) -> dict[str, Tensor]:
    """Exported by ModelOpt, with static scales of activations by the two prompts."""
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model = quantization.quantize(load_plain(plain), getattr(quantization, f"{kind}_DEFAULT_CFG"), language_models.logits)
    names = list(linears(model))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)
    files = load_file(out / "model.safetensors")
    decoded = {}
    for name in names:
        weight, scale = files[f"{name}.weight"], files[f"{name}.weight_scale"]
        if kind == "FP8":
            decoded[name] = weight.float() * scale
        else:
            shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
            decoded[name] = NVFP4QTensor(shape, torch.float32, weight).dequantize(
                scale=scale, double_scale=files[f"{name}.weight_scale_2"], block_sizes={-1: 16})
    return decoded


@dataclass(frozen=True)
class Case:
    """A producer's package, the model, and what writes the folder.

    dtype: in which the producer decodes.  dispatched: transformers knows the quantization method.
    """

    package: str
    model: str
    write: Producer
    dtype: str = "float32"
    dispatched: bool = True


def _compressed(model: str, dtype: str = "float32", **scheme: Any) -> Case:
    return Case("compressed_tensors", model, partial(compressed_tensors, {"symmetric": True, **scheme}), dtype)


_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
CASES: dict[str, Case] = {
    "bitsandbytes nf4": Case("bitsandbytes", "qwen3", partial(bitsandbytes_4bit, "nf4", False)),
    "bitsandbytes nested nf4": Case("bitsandbytes", "tied", partial(bitsandbytes_4bit, "nf4", True)),
    "bitsandbytes fp4": Case("bitsandbytes", "moe", partial(bitsandbytes_4bit, "fp4", False)),
    "bitsandbytes int8": Case("bitsandbytes", "qwen3", bitsandbytes_8bit),
    "torchao int8": Case("torchao", "qwen3", partial(torchao, "int8")),
    "torchao int8 groups": Case("torchao", "tied", partial(torchao, "int8 groups")),
    "torchao float8": Case("torchao", "moe", partial(torchao, "float8")),
    "torchao nvfp4": Case("torchao", "qwen3", partial(torchao, "nvfp4")),
    "transformers fp8": Case("transformers", "qwen3", fine_grained_fp8),
    "compressed-tensors int4": _compressed("qwen3", **_GROUPS),
    "compressed-tensors int4, zero points": _compressed("qwen3", **_GROUPS, symmetric=False),
    "compressed-tensors int8": _compressed("tied", num_bits=8, type="int", strategy="channel"),
    "compressed-tensors fp8": _compressed("qwen3", num_bits=8, type="float", strategy="channel"),
    "compressed-tensors nvfp4": _compressed("qwen3", "bfloat16", num_bits=4, type="float", strategy="tensor_group", group_size=16,
                                            scale_dtype=torch.float8_e4m3fn),
    "hqq": Case("hqq", "qwen3", hqq),
    "gptq": Case("gptqmodel", "qwen3", partial(gptq, 4, False)),
    "gptq act-order": Case("gptqmodel", "tied", partial(gptq, 4, True)),
    "modelopt fp8": Case("modelopt", "qwen3", partial(modelopt, "FP8"), dispatched=False),
    "modelopt nvfp4": Case("modelopt", "tied", partial(modelopt, "NVFP4"), dispatched=False),
}


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor], str]]:
    """The folder of every producer that is installed, its decoded weights, and the error of loading it, ''."""
    root = tmp_path_factory.mktemp("producers")
    plain = {model: plain_folder(root / model, model) for model in ("qwen3", "tied", "moe")}
    decoded: dict[str, dict[str, Tensor]] = {}
    for name, case in CASES.items():
        if find_spec(case.package):
            own = {f"{module}.weight": weight for module, weight in case.write(plain[case.model], root / name).items()}
            decoded[name] = {**language_models.weights(case.model), **own}
    arguments = json.dumps([[(str(root / name), CASES[name].dtype, CASES[name].dispatched) for name in decoded], PACKAGES])
    process = subprocess.run([sys.executable, "-c", LOADER, arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                             check=True, stdout=subprocess.PIPE)
    errors = json.loads(process.stdout.splitlines()[-1])
    return {name: (root / name, decoded[name], error) for name, error in zip(decoded, errors, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_producers_folder_loads_without_its_package(name: str, folders: dict[str, tuple[Path, dict[str, Tensor], str]]) -> None:
    """Logits and tokens are those of the weights as the producer decodes them; the folder is saved as the same bytes."""
    case = CASES[name]
    if name not in folders:
        pytest.skip(f"{case.package} is not installed")
    path, decoded, error = folders[name]
    assert error == ""
    results = load_file(path / "results")
    reference = language_models.filled(case.model, decoded, getattr(torch, case.dtype))
    assert same_bits(results["logits"], language_models.logits(reference))
    assert results["tokens"].equal(language_models.greedy(reference))
    for file in path.glob("*.safetensors*"):
        assert (path / "again" / file.name).read_bytes() == file.read_bytes()


def test_gpt_oss_is_decoded_as_transformers_does(tmp_path: Path) -> None:
    """Without the package `kernels` transformers decodes MXFP4 to bfloat16 when it loads a folder."""
    decoded = producer_folders.write_folder(tmp_path / "in", producer_folders.MXFP4, "gpt_oss")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    for name, parameter in theirs.named_parameters():
        assert same_bits(parameter.data, decoded[name].bfloat16()), name
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16,
                                                             quantization_config=plugin.QdslConfig())
    torch.testing.assert_close(language_models.logits(ours), language_models.logits(theirs))
