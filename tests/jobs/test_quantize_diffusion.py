"""Diffusion models quantized into a GGUF file: architectures told by names, mixes, rows that are reshaped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.files import safetensors
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.generated import q4_0, q8_0
from qdsl.jobs.gguf import QuantizeError, diffusion
from qdsl.jobs.gguf.mixes import MIXES, Options, Tensor
from tests.support.quantize_command import drawn, refused, report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    safetensors.write(path, tensors)
    return path


def test_a_flux_model(folder: Path) -> None:
    """Names and shapes stay; vectors and what is small become float32, both ends of the model stay as they are."""
    tensors = {"double_blocks.0.img_attn.proj.weight": drawn(64, 64), "double_blocks.0.img_attn.proj.bias": drawn(64),
               "double_blocks.0.img_mlp.0.weight": drawn(64, 64, dtype=torch.float8_e4m3fn), "img_in.weight": drawn(64, 64),
               "double_blocks.0.img_attn.norm.key_norm.scale": drawn(64), "single_blocks.0.linear1.weight": drawn(64, 40),
               "double_blocks.0.small.weight": drawn(8, 64), "x" * 90 + ".weight": drawn(64, 32)}
    summary = report(checkpoint(folder / "flux.safetensors", tensors), "-t", "q4_0", "-o", "flux.gguf")
    types = {row["name"]: row["type"] for row in summary["tensors"]}
    assert types == {"double_blocks.0.img_attn.proj.weight": "Q4_0", "double_blocks.0.img_attn.proj.bias": "F32",
                     "double_blocks.0.img_mlp.0.weight": "Q4_0", "img_in.weight": "BF16",
                     "double_blocks.0.img_attn.norm.key_norm.scale": "F32", "single_blocks.0.linear1.weight": "F16",
                     "double_blocks.0.small.weight": "F32", "x" * 90 + ".weight": "Q4_0"}
    with GgufFile("flux.gguf") as file:
        assert file.metadata["general.architecture"] == "flux" and file.metadata["general.file_type"] == 2
        for name, tensor in tensors.items():
            assert file.entry(name).shape == tuple(tensor.shape)
            if types[name] == "Q4_0":
                assert file.rows(name).equal(q4_0.quantize(tensor.float()).tensors["blocks"])
            else:
                assert file.tensor(name).float().equal(tensor.to(getattr(torch, {"BF16": "bfloat16", "F16": "float16"}
                                                                         .get(types[name], "float32"))).float())


def test_a_folder_of_diffusers_whose_names_are_not_known(folder: Path) -> None:
    path = folder / "transformer"
    path.mkdir()
    checkpoint(path / "diffusion_pytorch_model.safetensors", {"blocks.0.attn.to_q.weight": drawn(32, 32)})
    (path / "config.json").write_text('{"_class_name": "MochiTransformer3DModel"}')
    assert "a folder of diffusers (MochiTransformer3DModel), whose names" in refused(path, "-t", "q8_0")


def test_a_wrong_architecture_is_refused(folder: Path) -> None:
    """Names of diffusers, or of another architecture, are not written as those of the one that --arch states."""
    path = folder / "transformer"
    path.mkdir()
    file = checkpoint(path / "diffusion_pytorch_model.safetensors", {
        "cap_embedder.1.weight": drawn(32, 32), "context_refiner.0.attention.to_q.weight": drawn(32, 32)})
    for architecture in ("flux", "lumina2"):
        assert "'" in refused(file, "-t", "q8_0", "--arch", architecture)
    assert "has a tensor 'context_refiner.0.attention.to_q.weight', which readable files of lumina2" in \
        refused(file, "-t", "q8_0", "--arch", "lumina2")
    (path / "config.json").write_text('{"_class_name": "ZImageTransformer2DModel"}')
    assert "its names are those of lumina2, not of flux" in refused(path, "-t", "q8_0", "--arch", "flux")


def test_rows_that_are_reshaped(folder: Path) -> None:
    """Of the two UNets alone: convolutions become rows of 256, and metadata say what they were."""
    tensors = {"model.diffusion_model.input_blocks.1.0.weight": drawn(32, 32, 3, 3, dtype=torch.float16),
               "model.diffusion_model.input_blocks.0.0.weight": drawn(32, 4, 3, 3, dtype=torch.float16),
               "model.diffusion_model.input_blocks.3.0.op.weight": drawn(8, 256, dtype=torch.float16),
               "first_stage_model.b.weight": drawn(32, 32)}
    path = checkpoint(folder / "unet.safetensors", tensors)
    assert "its names do not tell the architecture; say with --arch" in refused(path, "-t", "q8_0")
    summary = report(path, "-t", "q8_0", "-o", "unet.gguf", "--arch", "sd1")
    assert {row["name"]: (row["type"], row["shape"]) for row in summary["tensors"]} == {
        "model.diffusion_model.input_blocks.1.0.weight": ("Q8_0", [36, 256]),
        "model.diffusion_model.input_blocks.0.0.weight": ("F16", [32, 4, 3, 3]),
        "model.diffusion_model.input_blocks.3.0.op.weight": ("Q8_0", [8, 256])}
    with GgufFile("unet.gguf") as file:
        name = "model.diffusion_model.input_blocks.1.0.weight"
        assert file.entry(name).logical_shape == (32, 32, 3, 3)
        assert file.rows(name).equal(q8_0.quantize(tensors[name].float().view(36, 256)).tensors["blocks"])
    again = report("unet.gguf", "-t", "f16", "--allow-requantize", "-o", "f16.gguf")
    assert {row["type"] for row in again["tensors"]} == {"F16"}
    with GgufFile("f16.gguf") as file:
        assert file.tensor(name).shape == (32, 32, 3, 3)


def test_five_dimensions_and_leading_ones(folder: Path) -> None:
    tensors = {"patch_embedding.weight": drawn(32, 16, 1, 2, 2), "blocks.0.modulation": drawn(1, 6, 512),
               "blocks.0.self_attn.norm_q.weight": drawn(64), "text_embedding.2.weight": drawn(64, 64),
               "head.modulation": drawn(1, 2, 64), "blocks.0.ffn.2.weight": drawn(1, 64, 64), "pad": drawn(1, 2048)}
    summary = report(checkpoint(folder / "wan.safetensors", tensors), "-t", "q4_0", "--tensor-type", "blocks|patch|pad=q8_0",
                     "-o", "wan.gguf")
    types = {row["name"]: row["type"] for row in summary["tensors"]}
    assert types == {"patch_embedding.weight": "F32", "blocks.0.modulation": "F32", "blocks.0.self_attn.norm_q.weight": "F32",
                     "text_embedding.2.weight": "BF16", "head.modulation": "F32", "blocks.0.ffn.2.weight": "Q8_0", "pad": "F32"}
    with GgufFile("wan.gguf") as file:
        assert all(file.entry(name).shape == tuple(tensor.shape) for name, tensor in tensors.items())
        assert file.tensor("patch_embedding.weight").equal(tensors["patch_embedding.weight"].float())


@pytest.mark.parametrize("architecture", diffusion.ARCHITECTURES)
def test_names_tell_an_architecture(architecture: str) -> None:
    for keys in diffusion.ARCHITECTURES[architecture].keys:
        assert diffusion.detect(keys) == architecture
        assert diffusion.detect([diffusion.PREFIX + key for key in keys]) == architecture
        assert len(keys) == 1 or diffusion.detect(keys[1:]) in (None, "sd1")
    assert diffusion.detect(["a.weight"]) is None


def test_mixes_of_diffusion_models() -> None:
    tensors = [Tensor(f"blocks.{i}.{name}.weight", (64, 256), "BF16") for i in range(5) for name in
               ("attn.to_v", "attn.to_q", "attn.qkv", "ff.net.2")]
    types = {mix: {name: choice.type for name, choice in diffusion.choose("ltxv", tensors, Options(MIXES[mix]), False).items()}
             for mix in ("Q4_K_M", "Q3_K_M", "Q4_K_S", "Q5_0")}
    for mix, value, query, fused, down in (("Q4_K_M", "Q6_K", "Q4_K", "Q5_K", "Q6_K"), ("Q3_K_M", "Q4_K", "Q3_K", "Q4_K", "Q4_K"),
                                           ("Q4_K_S", "Q4_K", "Q4_K", "Q4_K", "Q5_K"), ("Q5_0", "Q5_0", "Q5_0", "Q5_0", "Q5_1")):
        assert [types[mix][tensor.name] for tensor in tensors[-4:]] == [value, query, fused, down]
    assert [types["Q3_K_M"][f"blocks.{i}.attn.to_v.weight"] for i in range(3)] == ["Q5_K", "Q5_K", "Q4_K"]
    with pytest.raises(QuantizeError, match="diffusion models have no mix IQ4_XS: with --pure"):
        diffusion.choose("ltxv", tensors, Options(MIXES["IQ4_XS"]), False)


def test_language_models_need_all_their_files(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    path = checkpoint(model / "model.safetensors", {"model.embed_tokens.weight": drawn(64, 64), "lm_head.weight": drawn(64, 64)})
    for source in (path, model):
        assert "a language model; give the folder of all its files" in refused(source, "-t", "q8_0")
    key = "double_blocks.0.img_attn.proj.weight"
    other = checkpoint(folder / "other.safetensors", {key: torch.zeros(8, 8, dtype=torch.uint8)})
    assert f"tensor '{key}': U8 cannot be stored in a GGUF file" in refused(other, "-t", "q8_0", "--arch", "flux")
    checkpoint(other, {"transformer_blocks.0.attn.norm_added_k.weight": drawn(64)})
    message = "has a tensor 'transformer_blocks.0.attn.norm_added_k.weight', which readable files of flux"
    assert message in refused(other, "-t", "q8_0", "--arch", "flux")
    assert "no architecture 'fluxx' of diffusion models" in refused(other, "-t", "q8_0", "--arch", "fluxx")
