"""Images from the command line: a tiny pipeline draws twice with one seed, and is compared with another."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import qdsl
from qdsl.cli import app

diffusers = pytest.importorskip("diffusers")
pipelines = pytest.importorskip("qdsl.models.diffusers.pipeline")
images = pytest.importorskip("qdsl.models.diffusers.images")
models = pytest.importorskip("tests.support.diffusion_models")
image_module = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("default")
OPTIONS = ("a fox", "--size", "32x48", "--steps", "2", "--guidance", "0", "--seed", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pipeline, 'Z-Image', and its transformer as a GGUF file, 'q8_0.gguf'."""
    root = tmp_path_factory.mktemp("images")
    models.write_pipeline(root / "Z-Image")
    transformer = diffusers.ZImageTransformer2DModel.from_pretrained(root / "Z-Image" / "transformer")
    models.write_gguf_model(root / "q8_0.gguf", transformer)
    return root


@pytest.fixture(autouse=True)
def cache(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of traces for this module."""
    monkeypatch.setenv("QDSL_CACHE", str(files / "cache"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], catch_exceptions=False)


def drawn(pipeline: Any) -> tuple[Any, torch.Tensor]:
    """The image of the same options, and its latents, by the library's own call."""
    latents = {}
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a fox", width=32, height=48, num_inference_steps=2, guidance_scale=0.0,
                     generator=torch.Generator().manual_seed(3),
                     callback_on_step_end=lambda own, step, timestep, tensors: latents.update(tensors) or {}).images[0]
    return image, latents["latents"].float()


def test_an_image_is_compared_with_that_of_a_pipeline(files: Path, tmp_path: Path) -> None:
    """The file has the pixels of the library's call, and the figures are those of its images and latents."""
    out = tmp_path / "fox.png"
    result = run(files / "Z-Image", *OPTIONS, "--transformer", files / "q8_0.gguf", "--out", out, "--against", files / "Z-Image",
                 "--json")
    data = json.loads(result.stdout)
    packed, latents = drawn(pipelines.from_pretrained(files / "Z-Image", transformer=files / "q8_0.gguf", dtype=torch.bfloat16))
    plain, base = drawn(diffusers.DiffusionPipeline.from_pretrained(files / "Z-Image", dtype=torch.bfloat16))
    assert np.array_equal(image_module.open(out), packed) and data["size"] == [32, 48] and data["steps"] == 2
    assert data["again"] == {"identical": True, "psnr": None, "latents": 0.0, "relative": 0.0}
    error = np.square(np.asarray(packed, dtype=np.float64) - np.asarray(plain)).mean()
    against = data["against"]
    assert against["psnr"] == pytest.approx(10 * math.log10(255 ** 2 / error)) and not against["identical"]
    assert against["latents"] == pytest.approx(float((latents - base).abs().max()))
    assert against["relative"] == pytest.approx(float((latents - base).norm() / base.norm()))
    assert data["resident"] > 0 < data["load_seconds"] and len(data["seconds"]) == 2


def test_what_is_printed(files: Path, tmp_path: Path) -> None:
    result = run(files / "Z-Image", *OPTIONS, "--out", tmp_path / "fox.png", "--format", "q4_0", "--against", files / "Z-Image")
    written, against = result.stdout.splitlines()
    assert re.search(r"fox.png: 32 x 48 pixels, 2 steps in .* s: identical$", written)
    assert re.search(r"Z-Image: signal to noise \d+\.\d\d dB, latents differ by .* at most, 0\.\d+ relative$", against)
    assert re.search(r"loaded in .* s, \d+ MB resident", result.stderr)


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("{pipeline} x --out a.png --temperature 1", 2, "--temperature is for language models, and .* is a pipeline of diffusers"),
    ("{pipeline}/text_encoder x --steps 3", 2, "--steps is for pipelines of diffusers, and .* has no model_index.json"),
    ("{pipeline} x", 2, "give --out with the .png file"), ("{pipeline} x --out a.jpg", 2, "give --out with the .png file"),
    ("{pipeline} x --out cut.gguf/a.png", 2, "cut.gguf is no folder"),
    ("{pipeline} x --out folder.png", 2, "folder.png cannot be written: it is no regular file"),
    ("{pipeline} x --out link.png", 2, "cut.gguf is no folder"),
    ("{pipeline} x --out a.png --against nowhere", 1, "nowhere: no such folder or file"),
    ("{pipeline} x --out a.png --seed 99999999999999999999", 2, "--seed"),
    ("{pipeline} x --out a.png --transformer cut.gguf", 1, "cut.gguf: tensor .*: its bytes end at"),
    ("{pipeline} x --out {pipeline}/own.png", 2, "own.png: the output lies in .*Z-Image, which is an input"),
    ("{pipeline} x --out a.png --size 32", 2, "--size is WIDTHxHEIGHT"),
    ("{pipeline} x --out a.png --size 33x32", 1, "divisible"),
    ("{pipeline} x --out a.png --format q9", 2, "no format 'q9'"),
    ("{pipeline} x --out a.png --device cuda:77", 1, "device 'cuda:77' cannot be used here"),
    ("{pipeline} x --out a.png --text-encoder nowhere", 1, "text_encoder: no file or folder nowhere")])
def test_errors_are_sentences(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int,
                              message: str) -> None:
    monkeypatch.chdir(tmp_path)
    own = files / "Z-Image" / "own.png"
    own.write_bytes(b"an input")
    Path("folder.png").mkdir()
    Path("link.png").symlink_to("cut.gguf/a.png")
    Path("cut.gguf").write_bytes((files / "q8_0.gguf").read_bytes()[:-1000])
    result = run(*arguments.format(pipeline=files / "Z-Image").split())
    assert result.exit_code == code and re.search(message, result.stderr) and "Traceback" not in result.stderr
    assert not (tmp_path / "a.png").exists() and own.read_bytes() == b"an input"


def test_a_name_that_is_no_component_is_refused(files: Path) -> None:
    """The library would ignore it with a warning; its own arguments are accepted."""
    with pytest.raises(ValueError, match="has no component 'transfomer'; it has scheduler, text_encoder, tokenizer"):
        pipelines.from_pretrained(files / "Z-Image", transfomer=files / "q8_0.gguf")
    names = re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(diffusers.DiffusionPipeline.from_pretrained))
    assert {*names} == {*pipelines.LIBRARY, "dtype", "torch_dtype"}


@pytest.mark.parametrize("format", [None, "q4_0"])
def test_a_text_encoder_that_lacks_a_weight_is_refused(files: Path, tmp_path: Path, format: str | None) -> None:
    """The library would run with random numbers in its place."""
    shutil.copytree(files / "Z-Image", tmp_path / "Z-Image")
    path = tmp_path / "Z-Image" / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    result = run(tmp_path / "Z-Image", *OPTIONS, "--out", tmp_path / "a.png", *([] if format is None else ["--format", format]))
    assert result.exit_code == 1 and "layers.0.mlp.up_proj.weight" in result.stderr and not (tmp_path / "a.png").exists()


def test_a_transformer_that_lacks_weights_is_refused(files: Path, tmp_path: Path) -> None:
    """Its config states one layer more than the files have; or there is no folder, unless the model comes from elsewhere."""
    shutil.copytree(files / "Z-Image", tmp_path / "Z-Image")
    path = tmp_path / "Z-Image" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "n_layers": config["n_layers"] + 1}))
    with pytest.raises(ValueError, match=r"transformer: no tensor for layers\.2\..* and \d+ more"):
        pipelines.from_pretrained(tmp_path / "Z-Image", dtype=torch.bfloat16)
    shutil.rmtree(path.parent)
    with pytest.raises(ValueError, match=r"no folder transformer, which model_index\.json names"):
        pipelines.from_pretrained(tmp_path / "Z-Image", dtype=torch.bfloat16)
    pipelines.from_pretrained(tmp_path / "Z-Image", dtype=torch.bfloat16, transformer=files / "Z-Image" / "transformer")


def test_a_pipeline_that_fails_is_an_error(files: Path) -> None:
    """As a GPU whose memory runs out: a sentence, not a traceback."""
    class Full:
        def __call__(self, prompt: str, generator: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(ValueError, match="p: Full cannot generate this image: out of memory"):
        images.generate_image(images.ImagePipeline("p", Full(), 0.0), "a fox")


def test_what_a_pipeline_cannot_do_is_an_error(files: Path) -> None:
    """Videos, arguments that it does not take, and images of other sizes."""
    class Video:
        def __call__(self, prompt: str, num_frames: int) -> None: ...

    class Unguided:
        def __call__(self, prompt: str) -> None: ...

    class PromptSecond:
        def __call__(self, image: Any = None, prompt: str = "", generator: Any = None) -> Any:
            return SimpleNamespace(images=[(image, prompt)])

    assert images.generate_image(images.ImagePipeline("x", PromptSecond(), 0.0), "a fox").image == (None, "a fox")
    for pipeline, message in ((Video(), "Video generates videos, not images"), (Unguided(), "Unguided takes no guidance_scale")):
        with pytest.raises(ValueError, match=message):
            images.generate_image(images.ImagePipeline("x", pipeline, 0.0), "a fox", guidance=1.0)
    one, other = (images.GeneratedImage(image_module.new("RGB", size), None, 1, 0.0) for size in ((8, 8), (8, 16)))
    with pytest.raises(ValueError, match="have 8x8 and 8x16 pixels"):
        images.image_difference(one, other)


def test_one_word_leaves_layers_out() -> None:
    """In signatures of public functions, and of the configs of other libraries."""
    functions = [value for name in qdsl.__all__ if inspect.isroutine(value := getattr(qdsl, name))]
    functions += [pipelines.QdslConfig, pipelines.from_pretrained]
    words = {word for function in functions for word in inspect.signature(function).parameters}
    assert "skip" in words and not words & {"filter", "ignore", "ignored", "exclude", "only"}
