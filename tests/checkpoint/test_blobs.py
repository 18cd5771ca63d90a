"""GGUF files without an ending, as Ollama stores them, in folders with spaces: answered as the same file with its ending is."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import qdsl
from qdsl.checkpoint.files.gguf import is_gguf
from qdsl.models.served import gguf_path
from tests.support.jobs import DENSE, command, succeed
from tests.support.models import written

BLOB = "my models/blobs/sha256-0123456789abcdef"
LINES = ("inspect {}", "inspect {} --json", "verify {} model.gguf", "verify model.gguf {}", "verify {}", "verify {} {} --decoded",
         "dequantize {} --out out.safetensors --force", "dequantize {} --out out", "quantize {} --type Q8_0 --dry-run",
         "quantize {} --type Q8_0 --out out.gguf --force", "quantize {} --format q4_0 --out new", "convert {} --to awq --out new",
         "compress {} --format hlane --out new", "generate nothing {}")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    written(Path("model.gguf"), DENSE)
    Path(BLOB).parent.mkdir(parents=True)
    shutil.copy("model.gguf", BLOB)


@pytest.mark.parametrize("line", LINES)
def test_a_command_answers_as_for_a_file_with_its_ending(line: str) -> None:
    """What a message says to type is right, too: paths with spaces are quoted."""
    answers = []
    for path in ("model.gguf", BLOB):
        result = command(*shlex.split(line.format(*[shlex.quote(path)] * line.count("{}"))))
        text = result.output.replace(shlex.quote(path), "FILE").replace(path, "FILE").replace(Path(path).name, "NAME")
        answers.append((result.exit_code, " ".join(text.split())))
    assert answers[0] == answers[1]


def test_commands_in_messages_can_be_typed() -> None:
    for out, path in {"one.gguf": "model.gguf", "other.gguf": BLOB}.items():
        result = command("dequantize", path, "--out", "x.gguf")
        typed = " ".join(result.stderr.split()).split("`qdsl ")[1].split("`")[0].replace("X.gguf", out)
        succeed(*shlex.split(typed))


def test_python_reads_them() -> None:
    with qdsl.open("model.gguf") as one, qdsl.open(BLOB) as other:
        assert str(one.report()).replace("model.gguf", BLOB) == str(other.report())
    assert gguf_path(BLOB) == Path(BLOB) and is_gguf(Path(BLOB)) and not is_gguf(Path("my models"))
