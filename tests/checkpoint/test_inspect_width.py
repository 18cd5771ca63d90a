"""`qdsl inspect` in 80 columns: no line is longer, whatever kind of checkpoint; a pipe gets whole cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.cli import app
from qdsl.core.table import table_lines, wrapped
from tests.support import folders
from tests.support.converted_folders import two_files, weight
from tests.support.language_models import write_plain
from tests.support.producer_folders import KINDS, write_folder

LONG = "model.language_model.layers.11.block_sparse_moe.experts.127.down_projection"
PRODUCERS = sorted(KINDS)[::6]


def gguf(path: Path) -> Path:
    """A GGUF file with long names, values and lists."""
    tensors = [NewTensor(f"{LONG[-50:]}.weight", BY_NAME["F32"], (64,), [np.ones(64, np.float32).tobytes()]),
               NewTensor("norm.weight", BY_NAME["F32"], (64,), [np.ones(64, np.float32).tobytes()])]
    write(path, {"general.architecture": Value.of("string", "llama"),
                 "tokenizer.chat_template": Value.of("string", "{% x %}" * 99),
                 "tokenizer.ggml.tokens": Value.of("string[]", [f"token {i}" for i in range(30)])}, tensors)
    return path


def pipeline(path: Path) -> Path:
    for name in ("text_encoder", "transformer"):
        folders.folder(path / name, folders.named({LONG: weight(), "out": weight(seed=1)}))
    (path / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    return path


def unknown(path: Path) -> Path:
    """A folder whose settings are of no known producer, with notes."""
    packed = {f"{LONG}.qweight": torch.ones(16, 32, dtype=torch.uint8), f"{LONG}.absmax": torch.ones(16)}
    return folders.folder(path, packed, config={"model_type": "toy", "quantization_config": {
        "quant_method": "a method of which nobody has heard", "ignored_layers": [LONG, "head"], "bits": 4}})


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "GGUF": lambda path: gguf(path / "a.gguf"), "pipeline": lambda path: pipeline(path / "pipeline"),
    "plain": lambda path: write_plain(path / "plain", "qwen3"), "two files": lambda path: two_files(path, {LONG: weight()}),
    "unknown": lambda path: unknown(path / "unknown")}


def producer(path: Path, kind: str) -> Path:
    write_folder(path / kind, kind, "qwen3")
    return path / kind


@pytest.mark.parametrize("kind", [*CHECKPOINTS, *PRODUCERS, "df11"])
def test_no_line_is_longer_than_the_terminal(kind: str, tmp_path: Path) -> None:
    """A pipe gets whole cells; JSON is one line, whatever the terminal."""
    path = CHECKPOINTS[kind](tmp_path) if kind in CHECKPOINTS else producer(tmp_path, kind)
    narrow, wide, piped = (CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": columns}, catch_exceptions=False)
                           for columns in ("80", "1000", ""))
    assert max(map(len, narrow.stdout.splitlines())) <= 80 < max(map(len, piped.stdout.splitlines()))
    assert wide.stdout == piped.stdout and narrow.exit_code == piped.exit_code
    assert narrow.stdout.replace(" ", "").count("\n") >= piped.stdout.count("\n")
    as_json = CliRunner().invoke(app, ["inspect", str(path), "--json"], env={"COLUMNS": "80"})
    assert json.loads(as_json.stdout)["file"] == str(path)


CELLS = st.lists(st.lists(st.text("ab. -{}", max_size=60), min_size=3, max_size=3), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CELLS, st.integers(30, 100))
def test_cells_fold_and_names_lose_their_middles(rows: list[list[str]], width: int) -> None:
    """But for names, every letter of a cell is printed."""
    whole, narrow = table_lines(["name", "type", "what"], rows), table_lines(["name", "type", "what"], rows, " >", width)
    assert max(map(len, narrow)) <= width and len(whole) == len(rows) + 1
    letters = sorted("".join(part for row in rows for part in row[1:]).replace(" ", ""))
    printed = sorted("".join(narrow).replace(" ", ""))
    assert all(printed.count(letter) >= letters.count(letter) for letter in set(letters))


@pytest.mark.parametrize(("width", "expected"), [(40, "model.layers.0.mlp.down_proj"), (22, "model....mlp.down_proj")])
def test_a_shortened_name_keeps_both_ends(width: int, expected: str) -> None:
    assert table_lines(["name"], [["model.layers.0.mlp.down_proj"]], "", width)[1] == expected


def test_empty_columns_go_where_there_is_no_room() -> None:
    heads, rows = ["layer", "", "by"], [["model.up", "2", ""]]
    assert table_lines(heads, rows)[0] == "layer        by" and table_lines(heads, rows, "", 12) == ["layer", "model.up  2"]


def test_a_command_in_a_line_is_not_broken_at_its_hyphens() -> None:
    assert wrapped("`qdsl infer FILE --packed NAME` finds it", 24) == ["`qdsl infer FILE", "  --packed NAME` finds", "  it"]
    assert wrapped("as it is", None) == ["as it is"]
