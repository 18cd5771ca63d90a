"""The documents: their tables are what the code says, their examples run, their links lead somewhere.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `pytest tests/test_docs.py --bless` writes it anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qdsl.demo
from qdsl.checkpoint import safetensors
from qdsl.cli import app
from qdsl.generated import int_group
from qdsl.passes import compile_spec
from qdsl.quantize.mixes import Model
from qdsl.spec.schema import parse
from tests.support import folders
from tests.support.formats import ROOT
from tests.support.ggufs import framed, info
from tests.support.models import Made, written
from tests.support.tables import TABLES

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "specs/README.md")]
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_what_the_code_says(path: Path, bless: bool) -> None:
    text = path.read_text()
    wanted = TABLE.sub(lambda found: f"{found[1]}" + "\n".join(TABLES[found[2]]()) + f"\n{found[3]}", text)
    if bless:
        path.write_text(wanted)
        text = wanted
    assert text == wanted, "run `pytest tests/test_docs.py --bless`"


def test_every_table_is_shown() -> None:
    shown = [found[1] for path in DOCUMENTS for found in TABLE.findall(path.read_text())]
    assert sorted(shown) == sorted(TABLES)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in the folder that the demo leaves behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    qdsl.demo.run(None, tmp_path / "build" / "demo", say=lambda line: None)
    yaml = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "w4.yaml").write_text(yaml[0])
    names: dict[str, object] = {}
    found = blocks(ROOT / "README.md", "python")
    assert found
    for block in found:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102


def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w4.yaml").write_text(blocks(ROOT / "README.md", "yaml")[0])
    (tmp_path / "model.gguf").write_bytes(framed([info(dims=[32], type=2)], data=bytes(32)))
    written(tmp_path / "model-bf16.gguf", Made(Model("llama", 1, 1, 1), 256, 256))
    ones = {"in_sum2": np.ones((1, 256), np.float32), "counts": np.ones((1, 1), np.float32)}
    importance = {f"blk.0.attn_v.weight.{name}": values for name, values in ones.items()}
    written(tmp_path / "imatrix.gguf", Made(Model("imatrix", 0, 0, 0), 0, 0), importance)
    safetensors.write(tmp_path / "flux1-dev.safetensors", {"double_blocks.0.img_attn.proj.weight": torch.ones(8, 256)})
    layer = int_group.quantize(torch.ones(16, 64), "gptq_v2", bits=4, group=32)
    folders.folder(tmp_path / "Qwen3-8B-GPTQ", folders.named({"up": layer}))
    matrices = {f"transformer_blocks.{block}.ff.weight": torch.randn(64, 128).bfloat16() for block in range(2)}
    folders.folder(tmp_path / "FLUX.1-dev" / "transformer", matrices, config={}, index=False)
    (tmp_path / "FLUX.1-dev" / "transformer" / "pytorch_model.bin").unlink()
    lines = [line.split("#")[0] for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("qdsl ")]
    commands = [command for command in commands if command[0] not in ("demo", "analyze")]
    assert len(commands) >= 15
    for command in commands:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)


def test_kernels_of_the_readme_are_analyzed() -> None:
    """In processes that compile kernels; what the README shows of the first is laid out as that prints it."""
    lines = [line.split("#")[0] for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    commands = [line for line in lines if line.startswith("qdsl analyze ")]
    done = [subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True,
                           env={**environment, "PYTHONPATH": str(ROOT)}) for command in commands]
    assert done and not [each.stderr for each in done if each.returncode or each.stderr]
    [shown] = blocks(ROOT / "README.md", "text")
    labels = [line[:14].rstrip() for line in shown.splitlines()]
    assert len(labels) > 8 and set(labels) <= {line[:14].rstrip() for line in done[0].stdout.splitlines()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_specs_in_documents_compile(path: Path) -> None:
    for number, text in enumerate(blocks(path, "yaml")):
        if text.startswith("format:"):
            compile_spec(parse(text, f"{path.name}, example {number + 1}"))
