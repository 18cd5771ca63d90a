"""Tiny pipelines of Flux2 and Qwen-Image, whose transformers come from GGUF files and whose text encoders are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap
from qdsl.runtime.torch.module import PackedModule

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.diffusers")
images = pytest.importorskip("qdsl.models.diffusers.images")
models = pytest.importorskip("tests.support.diffusion_models")
gguf_models = pytest.importorskip("tests.support.gguf_models")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of traces."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))


def write_flux2(folder: Path) -> tuple[Any, dict[str, Path]]:
    """A Flux2KleinPipeline and the files of its transformer and its text encoder, Q8_0."""
    pipeline = models.klein_pipeline(folder / "characters")
    encoder, transformer = pipeline.text_encoder, pipeline.transformer
    pipeline.save_pretrained(folder / "pipeline")
    recorded = GgufMap.read(MAPS / "qwen3.json")
    models.write_gguf_model(folder / "transformer.gguf", transformer)
    gguf_models.write_file(folder / "encoder.gguf", "qwen3", gguf_models.file_tensors(encoder, recorded),
                           gguf_models.types_of(encoder, recorded, "Q8_0"))
    return pipeline, {"transformer": folder / "transformer.gguf", "text_encoder": folder / "encoder.gguf"}


def write_qwen_image(folder: Path) -> tuple[Any, dict[str, Path]]:
    """A QwenImagePipeline and the file of its transformer, Q8_0."""
    torch.manual_seed(0)
    text = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
              "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    encoder, transformer = transformers.Qwen2_5_VLForConditionalGeneration(config).eval(), models.random_model(
        "QwenImageTransformer2DModel")
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, num_res_blocks=1)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipeline = diffusers.QwenImagePipeline(scheduler, vae.eval(), encoder, models.tokenizer(folder / "characters"), transformer)
    pipeline.save_pretrained(folder / "pipeline")
    models.write_gguf_model(folder / "transformer.gguf", transformer)
    return pipeline, {"transformer": folder / "transformer.gguf"}


@pytest.mark.parametrize("write", [write_flux2, write_qwen_image])
def test_an_image_is_that_of_decoded_weights(write: Any, tmp_path: Path) -> None:
    """In float32, with all layers packed; the file's own weights give nearly the image of the plain pipeline."""
    plain, files = write(tmp_path)
    options = {"text_encoder_out_layers": (1, 2)} if write is write_flux2 else {}
    format = None if "text_encoder" in files else "q8_0"
    pipeline = plugin.from_pretrained(tmp_path / "pipeline", dtype=torch.float32, format=format, **files)
    for model in (pipeline.transformer, pipeline.text_encoder):
        assert sum(isinstance(module, PackedModule) for module in model.modules()) > 10
        qdsl.match_dense_(model)                                 # one x is transposed: torch's sums depend on strides
    picture = drawn(pipeline, **options)
    for model in (pipeline.transformer, pipeline.text_encoder):
        model.dequantize()
    assert not any(isinstance(module, PackedModule) for module in pipeline.transformer.modules())
    assert drawn(pipeline, **options).equal(picture) and picture.std() > 0
    assert (drawn(plain, **options) - picture).abs().mean() < 0.02


def drawn(pipeline: Any, **options: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    pixels = pipeline(prompt="a fox", height=32, width=32, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
                      output_type="pt", **options).images
    return torch.as_tensor(pixels).float()
