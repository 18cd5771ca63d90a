"""Folders that dfloat11's own `compress_model` wrote, as published: configs of settings alone, a file for each group.

Every component of a pipeline and language models, by every way to load them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qdsl
from qdsl.checkpoint.detect.guard import describes_model
from qdsl.jobs.compress.restore import decompress
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models.dense import make_dense
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.module import PackedModule
from tests.support.folders import files

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.diffusers")
language = pytest.importorskip("qdsl.models.transformers")
load_language_model = pytest.importorskip("qdsl.models.language").load_language_model
models = pytest.importorskip("tests.support.package_models")
pytestmark = pytest.mark.filterwarnings("default")
COMPONENTS = ["transformer", "text_encoder", "text_encoder_2", "vae"]
KINDS = ["single_file", "file_per_group"]
NO_TOKENIZERS = {"tokenizer": None, "tokenizer_2": None}
CLASSES = {"transformer": "FluxTransformer2DModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel",
           "text_encoder_2": "T5EncoderModel", "language_model": "Qwen3ForCausalLM"}
CODED = re.compile(r"\.(luts|gaps|encoded_exponent|sign_mantissa|output_positions|split_positions)$")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.write_base(tmp_path_factory.mktemp("base"))
    return path


def published(kind: str, name: str, out: Path) -> Path:
    return Path(shutil.copytree(models.DATA / kind / name, out))


def as_on_the_hub(folder: Path) -> Path:
    """Published configs of diffusion models name a model type, of whatever model, by which downloads are counted."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"dfloat11_config": config["dfloat11_config"], "model_type": "llama"}))
    return folder


def without(folder: Path, is_left_out: Callable[[str], Any]) -> list[str]:
    """Remove tensors from a folder's files, and return their names."""
    gone = []
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        gone += [name for name in tensors if is_left_out(name)]
        save_file({name: tensor for name, tensor in tensors.items() if not is_left_out(name)}, path, {"format": "pt"})
    return gone


def load_one(name: str, folder: Path, base: Path | None) -> Any:
    """A model by itself, from its folder."""
    place = None if base is None else models.base_of(base, name)
    if name in ("transformer", "vae"):
        return plugin.load_single_file(getattr(diffusers, CLASSES[name]), folder, dtype=torch.bfloat16, base=place)
    return language.from_pretrained(folder, model_class=getattr(transformers, CLASSES[name]), dtype=torch.bfloat16, base=place)


def fill(name: str, folder: Path, base: Path | None) -> Any:
    """A model of the base's config, filled by `load_weights_`."""
    model = models.model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    qdsl.load_weights_(model, folder, base=None if base is None else models.base_of(base, name))
    return model


def by_pipeline(name: str, folder: Path, base: Path | None) -> Any:
    """A component of a pipeline whose other components are the base's."""
    assert base is not None
    pipeline = plugin.from_pretrained(base / "pipeline", dtype=torch.bfloat16, **{name: folder}, **NO_TOKENIZERS)
    return getattr(pipeline, name)


def check_equal(model: Any, name: str) -> None:
    """A loaded model computes with the numbers of the one that was compressed."""
    assert any(isinstance(module, PackedModule) or "luts" in dict(module.named_parameters(recurse=False))
               for module in model.modules())
    make_dense(model)
    loaded = model.state_dict()
    assert [own for own, tensor in models.model(name).state_dict().items() if not loaded[own].equal(tensor)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_of_published_components(kind: str, base: Path, tmp_path: Path) -> None:
    """All of them at once give the picture of the base; the transformer has its guidance embedder, which no default has."""
    refs = {name: published(kind, name, tmp_path / name) for name in COMPONENTS}
    if kind == "single_file":
        refs = {name: as_on_the_hub(folder) for name, folder in refs.items()}
    pipeline = plugin.from_pretrained(base / "pipeline", dtype=torch.bfloat16, **refs, **NO_TOKENIZERS)
    plain = diffusers.DiffusionPipeline.from_pretrained(base / "pipeline", dtype=torch.bfloat16, **NO_TOKENIZERS)
    assert models.image(pipeline).equal(models.image(plain))
    assert pipeline.transformer.config.guidance_embeds
    for name in COMPONENTS:
        check_equal(getattr(pipeline, name), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_published_model_and_its_base(name: str, kind: str, base: Path, tmp_path: Path) -> None:
    """By itself; what is not compressed may be missing; what is saved loads without the base."""
    folder = published(kind, name, tmp_path / "in")
    assert without(folder, lambda own: not CODED.search(own))
    model = load_one(name, folder, base)
    model.save_pretrained(tmp_path / "saved")
    again = load_one(name, tmp_path / "saved", None)
    for loaded in (model, again, fill(name, folder, base)):
        check_equal(loaded, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_language_model(kind: str, base: Path, tmp_path: Path) -> None:
    """Its logits are the base's; one whose config describes it needs no base."""
    folder = published(kind, "language_model", tmp_path / "in")
    is_described = describes_model(json.loads((folder / "config.json").read_text()))
    assert is_described == (kind == "file_per_group")
    loaded = load_language_model(str(folder), device="cpu", base=None if is_described else str(base / "language_model"))
    model = loaded.model
    assert loaded.packed_layers == 16 and 10 < loaded.bits_per_weight < 24
    tokens, plain = torch.arange(8)[None], transformers.AutoModelForCausalLM.from_pretrained(base / "language_model")
    with torch.no_grad():
        assert model(tokens).logits.equal(plain(tokens).logits)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert language.from_pretrained(tmp_path / "saved")(tokens).logits.equal(model(tokens).logits)


@pytest.mark.parametrize(("way", "name"), [*((way, name) for way in (load_one, fill) for name in CLASSES),
                                           *((by_pipeline, name) for name in COMPONENTS)])
def test_what_has_no_tensor_and_what_has_no_place(way: Callable[..., Any], name: str, base: Path, tmp_path: Path) -> None:
    """Is an error that names it, also of one axis, which transformers would initialise."""
    own = shutil.copytree(base, tmp_path / "base")
    folder = published("single_file", name, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "some.where": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"1 tensors .*have no place in .*some\.where"):
        way(name, folder, own)
    save_file(tensors, folder / "model.safetensors")
    missing = next(key for key in tensors if not CODED.search(key) and key.endswith(".weight") and tensors[key].dim() == 1)
    for place in (folder, models.base_of(own, name)):
        assert without(place, missing.__eq__) == [missing]
    with pytest.raises(LoadError, match=re.escape(missing)):
        way(name, folder, own)


@pytest.mark.parametrize("name", CLASSES)
def test_no_base(name: str, base: Path, tmp_path: Path) -> None:
    """The class's default sizes are nobody's: the message names the option that helps."""
    folder = as_on_the_hub(published("single_file", name, tmp_path / "in"))
    with pytest.raises(LoadError, match="has dfloat11_config, model_type, and does not describe a model: pass base="):
        load_one(name, folder, None)
    if name == "language_model":                                 # by then the library has built a Llama of default sizes
        with pytest.raises(LoadError, match="does not describe a model: call `from_pretrained` of qdsl"):
            transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=language.QdslConfig())
    if name in COMPONENTS:
        whole = shutil.copytree(base / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns(name))
        folder.rename(whole / name)
        with pytest.raises(LoadError, match=f"{name}: config.json has dfloat11_config"):
            plugin.from_pretrained(whole, dtype=torch.bfloat16, **NO_TOKENIZERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_files_are_those_of_the_package(name: str, kind: str, base: Path, tmp_path: Path) -> None:
    """Byte for byte.  T5's second name of its embedding is not in transformers' files, and the package writes it again."""
    aim = Compression("df11", patterns=models.PATTERNS[name], plain_config=True, by_group=kind == "file_per_group")
    compress(models.base_of(base, name), aim, tmp_path / "out")
    written, expected = files(tmp_path / "out"), files(models.DATA / kind / name)
    if name == "text_encoder_2":
        del expected["model.safetensors"]
    assert {own: written[own] for own in expected} == expected
    if name not in ("language_model", "text_encoder_2") or kind == "single_file":
        check_equal(load_one(name, tmp_path / "out", None), name)      # by the config that is kept for `decompress`


def test_decompress_takes_the_config_of_the_base(base: Path, tmp_path: Path) -> None:
    for name in ("transformer", "language_model"):
        plain = models.base_of(base, name)
        decompress(published("single_file", name, tmp_path / name), tmp_path / f"{name}-plain", like=plain)
        configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / f"{name}-plain", plain)]
        assert configs[0] == configs[1]
        model = getattr(transformers if name == "language_model" else diffusers, CLASSES[name])
        decoded = model.from_pretrained(tmp_path / f"{name}-plain", dtype=torch.bfloat16).state_dict()
        assert all(decoded[own].equal(tensor) for own, tensor in models.model(name).state_dict().items())
