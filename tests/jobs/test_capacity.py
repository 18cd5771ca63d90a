"""What models need in memory, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from qdsl.checkpoint.files.safetensors import CheckpointError, plan_header, write
from qdsl.cli import app
from qdsl.cli.app import Failure
from qdsl.cli.options import read_size
from qdsl.generated import fp8_channel, nvfp4_ct, q8_0
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.convert.capacity import AS_STORED, CHOICES, LOSSLESS, Capacity, Need, formats_that_fit
from qdsl.jobs.engine import RewriteError

GB = 10**9


def write_headers(path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, object]) -> None:
    """A folder with a file of bfloat16 tensors that is all hole."""
    path.mkdir(parents=True)
    start, header = plan_header(path / "model.safetensors", {name: ("BF16", shape) for name, shape in tensors.items()}, None)
    with open(path / "model.safetensors", "xb") as file:
        file.write(start)
        file.truncate(header.size)
    (path / "config.json").write_text(json.dumps(config))


def write_model(path: Path, model: nn.Module, config: dict[str, object]) -> None:
    write_headers(path, {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}, config)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Models of 8.4 M and 2.1 M numbers, and an autoencoder."""
    path = tmp_path / "pipe"
    write_headers(path / "transformer", {**{f"blocks.{block}.{name}.weight": (1024, 1024) for block in range(4)
                                            for name in ("up", "down")}, "norm.weight": (1024,)}, {})
    write_headers(path / "text_encoder", {"layers.0.up.weight": (1024, 1024), "embed_tokens.weight": (1000, 1024)},
                  {"vocab_size": 1000})
    write_headers(path / "vae", {"conv.weight": (64, 64, 3, 3), "mid.query.weight": (64, 64)}, {"_class_name": "AutoencoderKL"})
    (path / "model_index.json").write_text("{}")
    return path


def test_needs_are_bytes_of_files(pipeline: Path) -> None:
    """Those of lossy formats are exact; of lossless ones matrices count, embeddings too; an autoencoder stays as it is."""
    models = {model.name: model for model in formats_that_fit(pipeline, GB).models}
    assert {name: model.weights for name, model in models.items()} == {
        "transformer": 8 * 1024**2 + 1024, "text_encoder": 2024 * 1024, "vae": 64 * 64 * 10}
    assert models["vae"].needs == {AS_STORED: Need(2 * 64 * 64 * 10, 0)}
    largest = 2 * 1024**2
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    for form, name in ((fp8_channel, "fp8_channel"), (q8_0, "q8_0"), (nvfp4_ct, "nvfp4_ct")):
        packed = sum(tensor.nbytes for tensor in form.quantize(weight).tensors.values())
        assert models["transformer"].needs[name] == Need(8 * packed + 2048, largest)
        assert models["text_encoder"].needs[name] == Need(packed + 2 * 1000 * 1024, largest)
    for name, bits in LOSSLESS.items():
        assert models["text_encoder"].needs[name].resident == pytest.approx(2024 * 1024 * bits / 8, abs=2)
        assert models["transformer"].needs[name].resident == pytest.approx(8 * 1024**2 * bits / 8 + 2048, abs=8)


def test_models_that_are_not_there(pipeline: Path) -> None:
    """A component without a folder would need nothing; one that the pipeline has not is null in its index."""
    index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"],
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder_2": [None, None]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    assert [model.name for model in formats_that_fit(pipeline, GB).models] == ["text_encoder", "transformer", "vae"]
    (pipeline / "model_index.json").write_text(json.dumps({**index, "text_encoder_2": ["transformers", "T5EncoderModel"]}))
    with pytest.raises(RewriteError, match=r"no weights in text_encoder_2, which model_index.json names"):
        formats_that_fit(pipeline, GB)
    (pipeline / "model_index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        formats_that_fit(pipeline, GB)


def test_needs_of_packed_models(tmp_path: Path) -> None:
    """The weights that packed tensors stand for, and what is decoded at one time: a matrix, or a block of DF11."""
    weight = torch.randn(64, 256, dtype=torch.bfloat16)
    (tmp_path / "plain").mkdir()
    tensors = {f"blocks.{block}.{name}.weight": weight for block in range(2) for name in ("up", "down")}
    write(tmp_path / "plain" / "model.safetensors", {**tensors, "norm.weight": torch.ones(256, dtype=torch.bfloat16)})
    for format, decoded in (("fix4", 1), ("df11", 2)):
        compress(tmp_path / "plain", Compression(format), tmp_path / format)
        model, = formats_that_fit(tmp_path / format, GB).models
        assert model.weights == 4 * weight.numel() + 256
        assert model.needs[AS_STORED].scratch == decoded * weight.nbytes


def test_the_combination_that_loses_least(pipeline: Path) -> None:
    """As stored where it fits, then lossless, then 8 bits, then 4; all in memory, or one model at a time."""
    report = formats_that_fit(pipeline, GB)
    assert set(report.together.formats.values()) == {AS_STORED} and report.commands == ()
    total = sum(model.needs[AS_STORED].resident for model in report.models)
    assert report.together.peak == total
    seen = []
    for vram in range(total, 0, -total // 100):
        report = formats_that_fit(pipeline, vram)
        assert all(chosen.peak <= vram for chosen in (report.together, report.in_turn) if chosen is not None)
        seen.append(max(map(CHOICES.index, report.together.formats.values())) if report.together else len(CHOICES))
    assert seen == sorted(seen) and {CHOICES[rank] for rank in {*seen} - {len(CHOICES)}} >= {AS_STORED, *LOSSLESS, "q8_0", "q4_k"}
    assert seen[-1] == len(CHOICES)


def test_commands_lead_to_one_folder(pipeline: Path) -> None:
    """Where two models change, the second command takes what the first one wrote."""
    first, second = formats_that_fit(pipeline, 15_000_000, ref="pipe").commands
    assert first.split()[2] == "pipe" and second.split()[2] == first.split()[-1]


def test_models_that_stay(pipeline: Path) -> None:
    """While one runs, those that are resident are there too."""
    def peak(*resident: str) -> int:
        report: Capacity = formats_that_fit(pipeline, GB, resident)
        assert report.in_turn is not None
        return report.in_turn.peak

    by_name = {model.name: model.needs[AS_STORED].resident for model in formats_that_fit(pipeline, GB).models}
    assert peak() == by_name["transformer"] and peak("transformer") == by_name["transformer"] + by_name["text_encoder"]
    assert peak(*by_name) == sum(by_name.values())
    with pytest.raises(RewriteError, match="no model 'unet': there are text_encoder, transformer, vae"):
        formats_that_fit(pipeline, GB, ("unet",))


def test_the_command(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline.parent)
    result = CliRunner().invoke(app, ["plan", "pipe", "--vram", "19MB"])
    assert result.exit_code == 0 and "qdsl compress pipe --format fix4 --component transformer --out pipe-transformer-fix4" in \
        result.stdout
    data = json.loads(CliRunner().invoke(app, ["plan", "pipe", "--vram", "19MB", "--json"]).stdout)
    assert data["together"]["formats"]["transformer"] == "fix4" and data["vram"] == 19_000_000
    small = CliRunner().invoke(app, ["plan", "pipe", "--vram", "1 MiB"])
    assert small.exit_code == 1 and "all in memory: nothing fits" in small.stdout
    assert "one at a time: nothing fits" in small.stdout
    assert "MB of weights" in small.stdout and "0.00 + 0.00" not in small.stdout
    single = CliRunner().invoke(app, ["plan", "pipe/transformer", "--vram", "1 MiB"])
    assert "all in memory: nothing fits" in single.stdout and "one at a time" not in single.stdout
    wrong = CliRunner().invoke(app, ["plan", "pipe", "--vram", "much"])
    assert wrong.exit_code == 2 and "error: 'much' is no size" in wrong.stderr


def test_sizes() -> None:
    assert [read_size(text) for text in ("20GB", "20 GiB", "1.5kb", "7B", "49152")] == [20 * GB, 20 << 30, 1500, 7, 49152]
    for text in ("", "GB", "-1GB", "1e3", "20 GBs", "1.2.3GB", "20", "1000"):
        with pytest.raises(Failure):
            read_size(text)
    small = CliRunner().invoke(app, ["plan", "pipe", "--vram", "20"])
    assert small.exit_code == 2 and "'20' without a unit is a number of bytes; write 20GB or 20GiB, or 20B" in small.stderr


def test_a_published_pipeline(tmp_path: Path) -> None:
    """Z-Image Turbo: 6.155 and 4.022 billion numbers, 19.11 GiB with its autoencoder; without loss it fits 20 GB."""
    diffusers = pytest.importorskip("diffusers")
    import transformers

    with torch.device("meta"):
        transformer = diffusers.ZImageTransformer2DModel()
        config = transformers.Qwen3Config(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                          num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
        encoder = transformers.Qwen3Model(config)
        vae = diffusers.AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16,
                                      down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                                      use_quant_conv=False, use_post_quant_conv=False)
    path = tmp_path / "Z-Image-Turbo"
    write_model(path / "transformer", transformer, {"_class_name": "ZImageTransformer2DModel"})
    write_model(path / "text_encoder", encoder, {"vocab_size": 151936})
    write_model(path / "vae", vae, {"_class_name": "AutoencoderKL"})
    (path / "model_index.json").write_text("{}")
    report = formats_that_fit(path, 20 * GB)
    weights = {model.name: model.weights for model in report.models}
    assert round(weights["transformer"] / 1e9, 3) == 6.155 and round(weights["text_encoder"] / 1e9, 3) == 4.022
    total = sum(model.needs[AS_STORED].resident for model in report.models)
    assert round(total / (1 << 30), 2) == 19.11
    assert report.together is not None and set(report.together.formats.values()) <= {AS_STORED, *LOSSLESS}
