"""A single file without a config keeps its embedding and its head plain, by the rule of folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.convert import run, target


@pytest.mark.parametrize(("embedding", "head"), [
    ("model.embed_tokens", "lm_head"), ("tok_embeddings", "output"), ("token_embd", "output"), ("embedding", "head"),
    ("tok_emb", "decoder"), ("transformer.wte", "unembed"), ("token_embedding_table", "proj_out")])
def test_a_file_by_itself_keeps_its_embedding_and_its_head(tmp_path: Path, embedding: str, head: str) -> None:
    """By the rule of folders: by name, and where no config states the vocabulary by the shape of the embedding."""
    names = {name: torch.ones(512, 128) for name in (f"{embedding}.weight", f"{head}.weight", "layers.0.up.weight")}
    write(tmp_path / "model.safetensors", names)
    report = run.quantize(tmp_path / "model.safetensors", target.parse_conversion("fp8_block", True, ignore=()), tmp_path / "out")
    assert [row["name"] for row in report["quantized"]] == ["layers.0.up"] and {*report["left"]} == {embedding, head}
