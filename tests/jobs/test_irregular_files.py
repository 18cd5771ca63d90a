"""Pipes, sockets and devices where a file is expected, and paths of very many folders: each ends at once with its reason."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.checkpoint.files.gguf_write import write as write_gguf
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.cli import app
from qdsl.core.places import UnknownSpec
from qdsl.core.producer import read_yaml
from qdsl.host.files import InputError, check_output, identity, make_folder, open_input, read_chunks

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)                                        # names of sockets are short
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "socket": listen, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A read that waits is an error, and not a test that never ends."""
    def late(number: int, frame: object) -> None:
        raise AssertionError("this waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "model.safetensors", {"a.weight": torch.zeros(64, 64)}, {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    block = NewTensor("blk.0.attn_q.weight", BY_NAME["Q8_0"], (64, 32), [bytes(64 * 34)])
    write_gguf(tmp_path / "real.gguf", {"general.architecture": Value.of("string", "llama")}, [block])
    return tmp_path


def refusal(*command: str) -> str:
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.output
    return result.output


INPUTS = ("inspect x.gguf", "inspect x.safetensors", "check x.yaml", "show x.yaml", "test x.yaml", "build x.yaml -o built",
          "test q4_0 --golden x.npz", "test q4_0 --golden x.safetensors", "infer x.npz --packed a",
          "infer x.safetensors --packed a", "infer model/model.safetensors --packed a.weight --values-in x.npz",
          "dequantize x.gguf -o y.safetensors",
          "verify x.gguf model", "verify x.safetensors", "verify model x.safetensors", "quantize x.gguf -t Q8_0 -o y.gguf",
          "quantize real.gguf -t Q8_0 --imatrix x.dat -o y.gguf", "convert x.safetensors --to awq -o y",
          "quantize x.safetensors -f fp8_block -o y", "compress x.safetensors -f hlane -o y", "evaluate model --text x.txt",
          "plan x.safetensors --vram 20GB")
INSIDE = ("model.safetensors.index.json", "config.json", "tokenizer_config.json", "chat_template.jinja", "README.md",
          "generation_config.json", "tokenizer/vocab.json")


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_no_regular_file(folder: Path, kind: str) -> None:
    for command in INPUTS if kind == "pipe" else INPUTS[::4]:
        words = command.split()
        name = next(word for word in words if word.startswith("x."))
        KINDS[kind](folder / name)
        message = refusal(*words)
        assert name in message and ("not a regular file" in message or "no file" in message), command
        (folder / name).unlink()


@pytest.mark.parametrize("name", INSIDE)
def test_a_file_of_a_folder_that_is_no_regular_file(folder: Path, name: str) -> None:
    """Also one that only transformers reads."""
    path = folder / "model" / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    for read in (lambda: qdsl.open(folder / "model"), lambda: qdsl.load_weights_(torch.nn.Module(), folder / "model")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read()


def test_specs_and_producers_of_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "x.yaml")
    for read in (lambda: read_yaml(folder / "x.yaml"), lambda: list(read_chunks(folder / "x.yaml", 0, 1)),
                 lambda: identity(folder / "x.yaml"), lambda: open_input(folder / "x.yaml"), lambda: open_input(folder)):
        with pytest.raises(OSError, match="not a regular file"):
            read()
    monkeypatch.setenv("QDSL_CACHE", str(folder / "cache"))
    monkeypatch.setenv("QDSL_SPECS", str(folder))
    with pytest.raises(OSError, match="not a regular file"):
        qdsl._further_modules()
    with pytest.raises(UnknownSpec):
        qdsl.load(folder / "x.yaml")


def test_a_pipe_that_takes_the_place_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the opening."""
    os.mkfifo(folder / "x")
    regular = os.stat(folder / "real.gguf")
    monkeypatch.setattr(os, "stat", lambda path: regular)
    with pytest.raises(InputError, match="not a regular file"):
        open_input(folder / "x")


OUTPUTS = ("dequantize real.gguf -o {}.safetensors", "quantize model -f fp8_block -o {}", "convert model --to awq -o {}",
           "quantize model -t Q8_0 --arch flux -o {}.gguf", "compress model -f hlane -o {}", "show q4_0 --svg {}.svg",
           "build q4_0 -o {}")


@pytest.mark.parametrize("depth", [600, 3000])
def test_paths_of_very_many_folders(folder: Path, depth: int) -> None:
    deep = f"{folder}/" + "a/" * depth + "x"
    for command in ("inspect {}.gguf", "check {}.yaml", "verify model {}"):
        refusal(*command.format(deep).split())
    for command in OUTPUTS:
        message = refusal(*command.format(deep).split())
        assert "folders in one path; at most 256" in message or "File name too long" in message, command
    assert sorted(path.name for path in folder.iterdir()) == ["model", "real.gguf"]
    with pytest.raises(OSError, match=r"at most 256 are written to|File name too long"):
        check_output(folder / deep)
    with pytest.raises(OSError, match="at most 256 are written to"):
        make_folder(folder / deep)


def test_floats_as_a_gguf_file_are_another_command(folder: Path) -> None:
    message = " ".join(refusal("dequantize", "real.gguf", "-o", "x.gguf").split())
    assert "--out is a .safetensors file, not 'x.gguf'" in message
    command = message.split("`qdsl ")[1].split("`")[0].replace("X.gguf", "x.gguf").split()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    with GgufFile("x.gguf") as file:
        assert {tensor.type.name for tensor in file.tensors.values()} == {"F32"}
