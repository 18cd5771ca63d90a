"""Jobs that write checkpoints: killed at any point and resumed, forced over an output, and with forged unfinished work."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from typer.testing import CliRunner, Result

import qdsl
from qdsl.checkpoint import dequantize as dequantizing
from qdsl.checkpoint import resume
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.safetensors import CheckpointError, TensorFile, write
from qdsl.cli import app
from qdsl.compress import run as compressing
from qdsl.quantize import run as quantizing
from qdsl.quantize.mixes import Model
from qdsl.rewrite import stage
from tests.support import folders
from tests.support.models import Made, written

ALL = bool(os.environ.get("QDSL_TEST_ALL"))
pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
DENSE = Made(Model("llama", 2, 4, 2), 256, 512)
CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def succeed(*arguments: str | Path) -> None:
    result = command(*arguments)
    assert result.exit_code == 0, result.output


def checkpoint(path: Path) -> Path:
    """A folder of two files with bfloat16 matrices, and a tokenizer."""
    def drawn(seed: int) -> torch.Tensor:
        return (torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) / 50).to(torch.bfloat16)

    folders.folder(path, {"model.layers.0.up.weight": drawn(0), "model.layers.0.down.weight": drawn(1)},
                   {"model.layers.0.out.weight": drawn(2), "norm.weight": torch.ones(3)}, config=CONFIG)
    (path / "pytorch_model.bin").unlink()
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs read: 'plain', and 'fp8' and 'hlane' made of it, and 'in.gguf'."""
    path = tmp_path_factory.mktemp("inputs")
    checkpoint(path / "plain")
    succeed("quantize", path / "plain", "-f", "fp8_block", "-o", path / "fp8", "-j", "1")
    succeed("compress", path / "plain", "-f", "hlane", "-o", path / "hlane", "-j", "1")
    written(path / "in.gguf", DENSE)
    return path


# Arguments of each job; {} is the folder of inputs.  merge-index follows a part that was written before.
JOBS = {
    "convert": ("convert {}/fp8 --requantize q8_0 -j 1", "out"),
    "requantize": ("convert {}/fp8 --requantize nf4 -j 1", "out"),
    "compress": ("compress {}/plain -f hlane -j 1", "out"),
    "decompress": ("decompress {}/hlane -j 1", "out"),
    "quantize": ("quantize {}/in.gguf -t q8_0 -j 1", "out.gguf"),
    "quantize folder": ("quantize {}/plain -f fp8_block -j 1", "out"),
    "dequantize": ("dequantize {}/in.gguf", "out.safetensors"),
    "merge-index": ("quantize {}/plain -f fp8_block -j 1 --shard 1/1", "out"),
}


def files(path: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones and names of empty folders among them."""
    return {str(each.relative_to(path)): each.read_bytes() if each.is_file() else b"" for each in sorted(path.rglob("*"))}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_random_points(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an operation on files or a tensor of one: the same command ends with the same bytes, and leaves nothing else."""
    copy_chunks = resume.copy_chunks

    def copied(file: BinaryIO, *given: Any) -> int:
        sys.audit("open", str(file.name), "tensor", 0)
        return copy_chunks(file, *given)

    monkeypatch.setattr(resume, "copy_chunks", copied)
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    monkeypatch.setattr(compressing.pieces, "WORTH", 1 << 15)
    arguments, name = JOBS[job]

    def run(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        if job == "merge-index":
            succeed("merge-index", folder / name)
        else:
            succeed(*arguments.format(inputs).split(), "-o", folder / name)

    def begin(folder: Path) -> None:
        if job == "merge-index":
            succeed(*arguments.format(inputs).split(), "-o", folder / name)

    begin(tmp_path / "whole")
    run(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    begin(tmp_path / "counted")
    points = folders.operations(lambda: run(tmp_path / "counted"), tmp_path / "counted")
    chosen = random.Random(job).sample(range(points), min(points, 20 if ALL else 3))
    for number, point in enumerate(chosen):
        folder = tmp_path / f"{number}"
        begin(folder)
        assert folders.killed(lambda path=folder: run(path), folder, point)
        left = files(folder) if folder.exists() else {}
        if left != whole:
            run(folder)
        assert files(folder) == whole, point


# An output that exists already


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize", "quantize folder", "dequantize"])
def test_an_output_that_exists_needs_force(job: str, inputs: Path, tmp_path: Path) -> None:
    arguments, name = JOBS[job]
    asked = (*arguments.format(inputs).split(), "-o", tmp_path / name)
    succeed(*asked)
    whole = files(tmp_path)
    result = command(*asked)
    assert result.exit_code == 2 and "exists already" in result.stderr and "--force" in result.stderr and files(tmp_path) == whole
    if (tmp_path / name).is_dir():
        (tmp_path / name / "old.safetensors").write_bytes(b"old")
        (tmp_path / name / ".hidden").write_bytes(b"mine")
    succeed(*asked, "--force")
    assert files(tmp_path) == whole | ({f"{name}/.hidden": b"mine"} if (tmp_path / name).is_dir() else {})


def test_what_is_no_checkpoint_is_not_replaced(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    result = command("convert", inputs / "fp8", "--to", "safetensors", "-o", tmp_path / "home", "--force")
    assert result.exit_code == 2 and "this folder holds none" in result.stderr
    assert files(tmp_path) == {"home": b"", "home/letter.txt": b"dear"}


def test_a_forced_job_is_resumed_without_force(inputs: Path, tmp_path: Path) -> None:
    """The old checkpoint stays until all of the new one is there."""
    asked = ("compress", inputs / "plain", "-o", tmp_path / "out", "-j", "1", "-f")
    succeed(*asked, "hlane")
    old = files(tmp_path / "out")
    succeed(*asked, "fix4", "--shard", "1/1", "--force")
    assert {name: data for name, data in files(tmp_path / "out").items() if not name.startswith(".qdsl")} == old
    succeed(*asked, "fix4")
    succeed("compress", inputs / "plain", "-o", tmp_path / "fix4", "-j", "1", "-f", "fix4")
    assert files(tmp_path / "out") == files(tmp_path / "fix4")


def test_standard_output_is_no_file(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for job in ("convert", "compress", "decompress", "quantize", "dequantize"):
        result = command(*JOBS[job][0].format(inputs).split(), "-o", "-")
        assert result.exit_code == 2 and "cannot go to standard output" in result.stderr
    shown = command("show", "q4_0", "--svg", "-")
    assert shown.exit_code == 0 and shown.stdout.startswith("<svg") and not files(tmp_path)


# Unfinished work


def test_what_was_begun_is_compared_with_the_request(inputs: Path, tmp_path: Path) -> None:
    """Also where all is in its place, and only the end of the stage is missing."""
    asked = ("compress", inputs / "plain", "-o", tmp_path / "out", "-j", "1", "-f")
    succeed(*asked, "hlane", "--shard", "1/1")
    request = (tmp_path / "out" / stage.STAGE / stage.REQUEST).read_bytes()
    result = command(*asked, "fix4")
    assert result.exit_code == 2 and "a compression to hlane was begun here" in result.stderr
    succeed(*asked, "hlane")
    (tmp_path / "out" / stage.DONE).write_bytes(request)
    result = command(*asked, "fix4")
    assert result.exit_code == 2 and "a compression to hlane is complete here" in result.stderr
    (tmp_path / "out" / stage.DONE).write_bytes(request)
    succeed(*asked, "hlane")
    assert not (tmp_path / "out" / stage.DONE).exists()


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder"])
def test_an_input_that_changes_meanwhile_is_refused(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    ) -> None:
    """The next run reads it anew."""
    shutil.copytree(inputs, tmp_path / "in")
    arguments = JOBS[job][0].format(tmp_path / "in").split()
    path = Path(arguments[1]) / "model-00001-of-00002.safetensors"
    write_note = stage.note

    def note(*given: Any) -> None:
        write_note(*given)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(stage, "note", note)
    result = command(*arguments, "-o", tmp_path / "out")
    assert result.exit_code == 1 and f"{path} changed while it was read; run the same command again" in result.stderr
    monkeypatch.setattr(stage, "note", write_note)
    succeed(*arguments, "-o", tmp_path / "out")


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder", "quantize", "dequantize"])
def test_an_input_that_is_cut_meanwhile_is_an_error(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    ) -> None:
    """Not a signal that ends the process."""
    shutil.copytree(inputs, tmp_path / "in")
    arguments = JOBS[job][0].format(tmp_path / "in").split()
    path = Path(arguments[1])
    path = path / "model-00001-of-00002.safetensors" if path.is_dir() else path

    def cut(*given: Any) -> str:
        os.truncate(path, 4096)
        return "key"

    begin = stage.begin
    monkeypatch.setattr(stage, "begin", lambda *given: (begin(*given), cut())[0])
    monkeypatch.setattr(quantizing, "_check", cut)
    monkeypatch.setattr(dequantizing, "digest", cut)
    result = command(*arguments, "-o", tmp_path / JOBS[job][1])
    assert result.exit_code == 1 and re.search("became shorter while|bytes are missing", result.stderr)


def forged(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Requests that lack a field, or have another kind of value there."""
    for name in request:
        yield {key: value for key, value in request.items() if key != name}
        yield from ({**request, name: value} for value in (None, 7, -1.5, "x", "", [], [3], {}, {"a": [{}]}, True))


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder"])
def test_forged_requests_are_errors(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, whatever merge-index reads."""
    monkeypatch.setattr(compressing.pieces, "WORTH", 1 << 15)
    out = tmp_path / "out"
    succeed(*JOBS[job][0].format(inputs).split(), "-o", out, "--shard", "1/2")
    request = json.loads((out / stage.STAGE / stage.REQUEST).read_bytes())
    requests = list(forged(request))
    for value in requests if ALL else random.Random(job).sample(requests, 20):
        (out / stage.STAGE / stage.REQUEST).write_text(json.dumps(value))
        result = command("merge-index", out)
        assert result.exit_code == 1 and result.stderr.startswith("error: "), value
    (out / stage.STAGE / stage.REQUEST).write_text(json.dumps(request))
    succeed(*JOBS[job][0].format(inputs).split(), "-o", out)


@pytest.mark.parametrize("place", [".qdsl-stage", ".qdsl-stage/shards", ".qdsl-stage/request.json", ".qdsl-stage/others"])
def test_links_in_unfinished_work_are_refused(place: str, inputs: Path, tmp_path: Path) -> None:
    """Through them, work would be written elsewhere."""
    asked = ("quantize", inputs / "plain", "-f", "fp8_block", "-o", tmp_path / "out", "-j", "1")
    succeed(*asked, "--shard", "1/2")
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "out" / place
    if path.exists():
        path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved" if (tmp_path / "moved").exists() else tmp_path / "elsewhere")
    for again in (asked, ("merge-index", tmp_path / "out")):
        result = command(*again)
        assert result.exit_code == 1 and "a link in unfinished work" in result.stderr
    assert not files(tmp_path / "elsewhere")


@pytest.mark.parametrize("key", ["raw", "crc"])
@pytest.mark.parametrize("text", ["[]", "{", '{"model.layers.0.up": 3}', '{"x": "y"}', "null"])
def test_forged_pieces_are_encoded_again(key: str, text: str, inputs: Path, tmp_path: Path) -> None:
    asked = ("compress", inputs / "plain", "-f", "hlane", "-o", tmp_path / "out", "-j", "1")
    succeed(*asked, "--shard", "1/1")
    [piece] = (tmp_path / "out" / stage.STAGE / "pieces").iterdir()
    with TensorFile(piece) as file:
        tensors = {name: file.tensor(name).clone() for name in file.names()}
        metadata = {**file.header.metadata, key: text}
    write(piece, tensors, metadata)
    succeed(*asked)
    assert files(tmp_path / "out") == files(inputs / "hlane")


# Checksums


@pytest.mark.parametrize("job", ["convert", "compress", "quantize folder"])
def test_a_folder_is_verified_by_its_checksums(job: str, inputs: Path, tmp_path: Path) -> None:
    """A flipped bit in any tensor is named, by the command, by `qdsl.open` and by `load_weights_`."""
    out = tmp_path / "out"
    succeed(*JOBS[job][0].format(inputs).split(), "-o", out)
    assert command("verify", out).stdout == "all tensors fit their checksums\n"
    qdsl.open(out, verify=True).close()
    with Folder(out) as folder:
        places = [(folder.file(name).path, name, folder.entry(name).stop - 1) for name in folder.names()]
    for path, name, place in places:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        result = command("verify", out)
        assert result.exit_code == 1 and result.stdout == f"{path}: tensor '{name}' is damaged\n1 problems\n"
        data[place] ^= 1
        path.write_bytes(data)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged; write or download the folder again"):
        qdsl.open(out, verify=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        qdsl.load_weights_(torch.nn.Linear(2, 2), out, verify=True)
    path.unlink()
    (out / "model.safetensors.index.json").unlink()
    assert f"'{path.name}' is missing" in command("verify", out).stdout


def test_a_folder_without_checksums_cannot_be_verified_alone(inputs: Path) -> None:
    result = command("verify", inputs / "plain")
    assert result.exit_code == 1 and "no qdsl-checksums.json states checksums" in result.stderr
    with pytest.raises(CheckpointError, match=r"no qdsl-checksums\.json"):
        qdsl.open(inputs / "plain", verify=True)
    qdsl.open(inputs / "plain").close()
