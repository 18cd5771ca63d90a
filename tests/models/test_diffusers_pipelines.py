"""A whole tiny pipeline of diffusers whose models are packed: from its folder, from GGUF files, mixed and lossless."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.compress import run as compression
from qdsl.jobs.compress.units import Compression
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.layers import QuantizedLinear

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.diffusers")
pipeline = pytest.importorskip("qdsl.models.diffusers.pipeline")
models = pytest.importorskip("tests.support.diffusion_models")
gguf_models = pytest.importorskip("tests.support.gguf_models")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty cache of traces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDSL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_pipeline(tmp_path_factory.mktemp("pipeline") / "Z-Image")


def load(folder: Path, **options: Any) -> Any:
    return plugin.from_pretrained(folder, dtype=torch.bfloat16, **options)


def test_lossless_models_of_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """DF11 and hlane in one pipeline give the picture of the plain one; a DF11 folder as it is published, too."""
    expected = models.image(load(folder))
    shutil.copytree(folder, tmp_path / "mixed")
    for name, format in (("transformer", "df11"), ("text_encoder", "hlane")):
        shutil.rmtree(tmp_path / "mixed" / name)
        compression.compress(folder / name, Compression(format, plain_config=format == "df11"), tmp_path / "mixed" / name)
    config = json.loads((tmp_path / "mixed/transformer/config.json").read_text())
    assert "quantization_config" not in config
    pipeline = load(tmp_path / "mixed")
    assert set(pipeline.transformer.hf_quantizer.report.packed.values()) == {"df11.df11"}
    assert pipeline.text_encoder.hf_quantizer.report.packed
    assert models.image(pipeline).equal(expected)
    with pytest.raises(LoadError, match="no plain model to quantize in q8_0"):
        load(tmp_path / "mixed", format="q8_0")


def test_models_from_gguf_files(folder: Path, tmp_path: Path) -> None:
    """A transformer and a text encoder without a head, packed; the picture is that of their decoded weights."""
    plain = load(folder)
    tensors = {name: tensor.float() for name, tensor in plain.transformer.state_dict().items()}
    tensors = models.original("ZImageTransformer2DModel", tensors)
    blocks = {name: ("Q8_0", gguf_models._encoded(tensor, "Q8_0").tobytes()) for name, tensor in tensors.items()
              if models.packs(name, tensor, "Q8_0")}
    transformer = models.write_file(tmp_path / "transformer.gguf", tensors, blocks)
    recorded = GgufMap.read(MAPS / "qwen3.json")
    encoder = transformers.Qwen3ForCausalLM(plain.text_encoder.config)
    encoder.model.load_state_dict(plain.text_encoder.state_dict())
    types = gguf_models.types_of(encoder, recorded, "Q8_0")
    text_encoder = gguf_models.write_file(tmp_path / "encoder.gguf", "qwen3", gguf_models.file_tensors(encoder, recorded), types)
    pipeline = load(folder, transformer=transformer, text_encoder=str(text_encoder))
    assert type(pipeline.text_encoder) is transformers.Qwen3Model
    assert isinstance(pipeline.text_encoder.layers[0].mlp.up_proj, QuantizedLinear)
    assert isinstance(pipeline.transformer.layers[0].attention.to_q, QuantizedLinear)
    picture = models.image(pipeline)
    pipeline.save_pretrained(tmp_path / "saved")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert isinstance(again.transformer.layers[0].attention.to_q, QuantizedLinear)
    assert models.image(again).equal(picture)
    pipeline.transformer.dequantize()
    pipeline.text_encoder.dequantize()
    assert models.image(pipeline).equal(picture)


def test_a_format_for_the_models_of_a_pipeline(folder: Path) -> None:
    """Transformer and text encoder are quantized, the VAE is not; the library's own config does the same."""
    pipeline = load(folder, format="q4_0")
    assert pipeline.transformer.hf_quantizer.report.packed and pipeline.text_encoder.hf_quantizer.report.packed
    assert not hasattr(pipeline.vae, "hf_quantizer")
    config = diffusers.PipelineQuantizationConfig(quant_backend="qdsl", quant_kwargs={"format": "q4_0"},
                                                  components_to_quantize=["transformer", "text_encoder"])
    by_config = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, quantization_config=config)
    assert models.image(by_config).equal(models.image(pipeline))


def test_a_format_for_models_from_elsewhere(folder: Path) -> None:
    """Plain models by reference stay plain without a format, and are quantized with one as those of the folder are."""
    refs = {name: folder / name for name in ("transformer", "text_encoder", "vae")}
    assert models.image(load(folder, **refs)).equal(models.image(load(folder)))
    pipeline = plugin.from_pretrained(folder, format="q4_0", torch_dtype=torch.bfloat16, **refs)
    assert pipeline.transformer.hf_quantizer.report.packed and pipeline.text_encoder.hf_quantizer.report.packed
    assert not pipeline.vae.hf_quantizer.report.packed
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    assert load(folder, transformer=file, format="q4_0").transformer.hf_quantizer.report.packed


def test_adapters_and_offloading_of_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """A LoRA file changes the picture until it is unloaded; fusing is refused and changes nothing; offloading neither."""
    pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(0)
    shapes = {"A": (4, 256), "B": (256, 4)}
    write(tmp_path / "lora.safetensors", {
        f"transformer.layers.{layer}.attention.to_q.lora_{part}.weight": torch.randn(shape, generator=generator) * 0.1
        for layer in range(2) for part, shape in shapes.items()})
    pipeline = load(folder, format="q8_0")
    before = models.image(pipeline)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"), adapter_name="style")
    adapted = models.image(pipeline)
    assert not adapted.equal(before)
    with pytest.raises(ValueError, match="do not take in an adapter in place"):
        pipeline.fuse_lora()
    assert models.image(pipeline).equal(adapted)
    pipeline.enable_model_cpu_offload(device="cpu")
    assert models.image(pipeline).equal(adapted)
    pipeline.unload_lora_weights()
    assert models.image(pipeline).equal(before)


def test_a_model_that_the_caller_has_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its config is; diffusers leaves out components that are passed, their configs too."""
    index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"],
             "tokenizer": ["transformers", "Qwen2Tokenizer"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    downloads: list[Any] = []
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", lambda name, **kwargs: downloads.append(kwargs) or str(tmp_path))
    monkeypatch.setattr(pipeline, "available", lambda ref: ref)
    monkeypatch.setattr(pipeline, "hf_hub_download", lambda name, file, revision: downloads.append((name, file, revision)))
    assert pipeline.pipeline_folder("owner/name", ["transformer", "tokenizer"]) == tmp_path
    assert downloads == [{"revision": None, "transformer": True, "tokenizer": True},
                         ("owner/name", "transformer/config.json", None)]


def test_diffusers_downloads_no_component_that_is_passed() -> None:
    source = inspect.getsource(diffusers.DiffusionPipeline.download)
    assert "passed_components = [k for k in expected_components if k in kwargs]" in source
