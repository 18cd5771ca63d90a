"""DF11 folders as they are published: their shapes come from the class of the model, and messages name commands that work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from qdsl.checkpoint.files.folder import ORIGINAL, Folder
from qdsl.checkpoint.report.verify_decoded import decoded_differences
from qdsl.cli import app
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.engine import RewriteError
from qdsl.models.shapes import model_shapes

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
models = pytest.importorskip("tests.support.diffusion_models")
pytestmark = pytest.mark.filterwarnings("default")
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1}


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def published(source: Path, out: Path) -> Path:
    """DF11 as authors publish it whose config describes the model: no settings of qdsl, no file of what was kept."""
    compress(source, Compression("df11", plain_config=True), out)
    for path in out.rglob(ORIGINAL):
        config, place = path.with_name("config.json"), path.parent.relative_to(out)
        stored = json.loads((source / place / "config.json").read_text())
        config.write_text(json.dumps({**stored, **json.loads(config.read_text())}))
        path.unlink()
    return out


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_pipeline(tmp_path_factory.mktemp("plain") / "Z-Image")


@pytest.fixture(scope="module")
def df11(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(pipeline, tmp_path_factory.mktemp("df11") / "Z-Image")


def language_model(path: Path, **options: Any) -> Path:
    """A tiny language model in bfloat16, of experts if there are some."""
    name = "Qwen3Moe" if options else "Qwen3"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**TINY, **options))
    model.bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("format", ["hlane", "fix4", "fix3"])
def test_a_published_pipeline_changes_its_format(format: str, pipeline: Path, df11: Path, tmp_path: Path) -> None:
    """By one command; diffusers loads the result by itself, and the picture is the same."""
    pytest.importorskip("qdsl.models.diffusers")
    out = tmp_path / format
    result = command("compress", df11, "--format", format, "--out", out, "--jobs", 1, "--check")
    assert result.exit_code == 0 and f"52 matrices as 52 of {format}" in result.stdout
    assert command("verify", "--decoded", pipeline, out, "--jobs", 1).stdout == "equal\n"
    assert (out / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    load = diffusers.DiffusionPipeline.from_pretrained
    packed = load(out, dtype=torch.bfloat16)
    assert set(packed.transformer.hf_quantizer.report.packed.values()) == {f"{format}.{format}"}
    assert packed.text_encoder.hf_quantizer.report.packed
    assert models.image(packed).equal(models.image(load(pipeline, dtype=torch.bfloat16)))


def test_a_published_language_model_is_decompressed(tmp_path: Path) -> None:
    """Experts that lie one by one in files have their shapes from the parameter of all."""
    for name, options in (("dense", {}), ("experts", {"num_experts": 4, "moe_intermediate_size": 64})):
        source = language_model(tmp_path / name, **options)
        coded = published(source, tmp_path / f"{name}-df11")
        assert command("decompress", coded, "--out", tmp_path / f"{name}-back", "--jobs", 1).exit_code == 0
        assert command("verify", source, tmp_path / f"{name}-back").stdout == "equal\n"


def test_shapes_by_the_names_of_the_base_model(pipeline: Path, tmp_path: Path) -> None:
    """A text encoder is saved without the head of the class that its config may name."""
    source = shutil.copytree(pipeline / "text_encoder", tmp_path / "encoder")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    coded = published(source, tmp_path / "df11")
    assert command("compress", coded, "--format", "fix4", "--out", tmp_path / "fix4", "--jobs", 1).exit_code == 0
    assert not decoded_differences(source, tmp_path / "fix4")


@pytest.mark.parametrize(("config", "message"), [
    ({}, "names no class"), ({"architectures": ["Nope"]}, "'Nope', which transformers does not have"),
    ({"_class_name": "Nope"}, "'Nope', which diffusers does not have"),
    ({"architectures": ["Qwen3Model"], "hidden_size": "x"}, "Qwen3Model of transformers cannot be built by config.json")])
def test_configs_without_a_class(config: dict[str, Any], message: str, df11: Path, tmp_path: Path) -> None:
    """The message names the option that states shapes, and the command with it works."""
    source = shutil.copytree(df11 / "transformer", tmp_path / "in")
    own = {key: value for key, value in json.loads((source / "config.json").read_text()).items() if key != "_class_name"}
    (source / "config.json").write_text(json.dumps({**own, **config}))
    for arguments in (("compress", source, "--format", "hlane"), ("decompress", source)):
        result = command(*arguments, "--out", tmp_path / "out", "--jobs", 1)
        assert result.exit_code == 1 and message in result.stderr and "--like REF can" in result.stderr


def test_a_library_that_is_not_installed(df11: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    with Folder(df11 / "transformer") as folder:
        assert model_shapes(folder)["layers.0.attention.to_q.weight"] == (256, 256)
        monkeypatch.setattr("qdsl.models.shapes.import_module", missing)
        with pytest.raises(RewriteError, match="names 'ZImageTransformer2DModel', and diffusers is not installed"):
            model_shapes(folder)


def test_the_original_states_shapes(pipeline: Path, df11: Path, tmp_path: Path) -> None:
    """Of a whole pipeline, without its libraries."""
    compress(df11, Compression("fix4"), tmp_path / "out", like=pipeline)
    compress(pipeline, Compression("fix4"), tmp_path / "expected")
    for name in ("transformer", "text_encoder"):
        [file] = (tmp_path / "expected" / name).glob("*.safetensors")
        assert file.read_bytes() == (tmp_path / "out" / name / file.name).read_bytes()


@pytest.mark.parametrize("arguments", [["quantize", "--format", "q4_0"], ["quantize", "--type", "Q8_0"],
                                       ["convert", "--to", "gptq_v2"]])
def test_commands_that_need_plain_weights(arguments: list[str], tmp_path: Path) -> None:
    """They name the command that writes them, which works."""
    coded = published(language_model(tmp_path / "plain"), tmp_path / "df11")
    name, *options = arguments
    result = command(name, coded, *options, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "run `qdsl decompress FOLDER --out PLAIN` and use PLAIN" in result.stderr
