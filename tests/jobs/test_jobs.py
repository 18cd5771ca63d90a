"""Jobs that write checkpoints: killed at any point and resumed, forced over an output, and with forged unfinished work."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import qdsl
from qdsl.checkpoint.files import gguf, resume, safetensors
from qdsl.checkpoint.files.crc import checksums_path
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, TensorFile, write
from qdsl.jobs.compress import run as compressing
from qdsl.jobs.compress import tensors
from qdsl.jobs.engine import stage
from qdsl.jobs.gguf import dequantize as dequantizing
from qdsl.jobs.gguf import run as quantizing
from tests.support import folders
from tests.support.jobs import JOBS, command, files, job_inputs, succeed

ALL = bool(os.environ.get("QDSL_TEST_ALL"))
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_random_points(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an operation on files or a tensor of one: the same command ends with the same bytes, and leaves nothing else."""
    copy_chunks = resume.copy_chunks

    def copied(file: BinaryIO, *arguments: Any) -> int:
        sys.audit("open", str(file.name), "tensor", 0)
        return copy_chunks(file, *arguments)

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
    chosen = random.Random(job).sample(range(points), min(points, 20 if ALL else 2))
    for number, point in enumerate((*chosen, points - 1)):       # the last one, too: all bytes are written
        folder = tmp_path / f"{number}"
        begin(folder)
        assert folders.killed(lambda path=folder: run(path), folder, point)
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
        shutil.copy(next((tmp_path / name).glob("*.safetensors")), tmp_path / name / "model-00007-of-00009.safetensors")
        (tmp_path / name / ".hidden").write_bytes(b"mine")
    succeed(*asked, "--force")
    assert files(tmp_path) == whole | ({f"{name}/.hidden": b"mine"} if (tmp_path / name).is_dir() else {})


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


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder", "quantize", "dequantize"])
def test_an_input_that_changes_meanwhile_is_refused(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    ) -> None:
    """The next run reads it anew."""
    shutil.copytree(inputs, tmp_path / "in")
    arguments = JOBS[job][0].format(tmp_path / "in").split()
    path = Path(arguments[1])
    path = path / "model-00001-of-00002.safetensors" if path.is_dir() else path
    functions = {(stage, "write_note"): stage.write_note, (resume, "copy_chunks"): resume.copy_chunks}

    def touching(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (function(*arguments), os.utime(path, ns=(1, 1)))[0]

    for (module, name), function in functions.items():
        monkeypatch.setattr(module, name, touching(function))
    result = command(*arguments, "-o", tmp_path / JOBS[job][1])
    assert result.exit_code == 1 and f"{path} changed while it was read; run the same command again" in result.stderr
    assert not (tmp_path / JOBS[job][1]).is_file()
    for (module, name), function in functions.items():
        monkeypatch.setattr(module, name, function)
    succeed(*arguments, "-o", tmp_path / JOBS[job][1])


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder", "quantize", "dequantize"])
def test_an_input_that_is_cut_meanwhile_is_an_error(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    ) -> None:
    """Not a signal that ends the process."""
    shutil.copytree(inputs, tmp_path / "in")
    arguments = JOBS[job][0].format(tmp_path / "in").split()
    path = Path(arguments[1])
    path = path / "model-00001-of-00002.safetensors" if path.is_dir() else path

    def cut(*arguments: Any) -> str:
        os.truncate(path, 4096)
        return "key"

    begin = stage.begin
    monkeypatch.setattr(stage, "begin", lambda *arguments: (begin(*arguments), cut())[0])
    monkeypatch.setattr(quantizing, "_check", cut)
    monkeypatch.setattr(dequantizing, "digest", cut)
    result = command(*arguments, "-o", tmp_path / JOBS[job][1])
    assert result.exit_code == 1 and re.search("became shorter while|bytes are missing", result.stderr)


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder", "quantize", "dequantize"])
def test_an_input_that_is_cut_within_a_tensor_is_an_error(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          ) -> None:
    """When it was checked that the file is whole, and the tensor is about to be read."""
    shutil.copytree(inputs, tmp_path / "in")
    elements, read_into = safetensors.elements, safetensors.read_into

    def cut(path: object, start: int, nbytes: int) -> None:
        if isinstance(path, Path) and nbytes > 8192:             # no map, and more than a page of memory
            os.truncate(path, min(path.stat().st_size, start + nbytes // 2))

    def read_elements(data: Any, start: int, nbytes: int, dtype: torch.dtype, *buffers: Any) -> torch.Tensor:
        cut(data, start, nbytes)
        return elements(data, start, nbytes, dtype, *buffers)

    def read_octets(path: Path, start: int, memory: memoryview) -> None:
        cut(path, start, memory.nbytes)
        read_into(path, start, memory)

    monkeypatch.setattr(safetensors, "elements", read_elements)
    monkeypatch.setattr(gguf, "elements", read_elements)
    monkeypatch.setattr(tensors, "read_into", read_octets)
    result = command(*JOBS[job][0].format(tmp_path / "in").split(), "-o", tmp_path / JOBS[job][1])
    assert result.exit_code == 1 and "became shorter while it was read" in result.stderr


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
    for value in requests if ALL else random.Random(job).sample(requests, 10):
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


def test_a_tensor_without_elements_has_a_checksum(tmp_path: Path) -> None:
    folders.folder(tmp_path / "plain", {"model.layers.0.up.weight": torch.ones(128, 128), "unused": torch.ones(0)})
    succeed("quantize", tmp_path / "plain", "-f", "fp8_block", "-o", tmp_path / "out", "-j", "1")
    assert command("verify", tmp_path / "out").stdout == "all tensors fit their checksums\n"


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
        assert result.exit_code == 1 and result.stdout == f"{path}: tensor '{name}' is damaged\n1 problem\n"
        data[place] ^= 1
        path.write_bytes(data)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged; write or download it again"):
        qdsl.open(out, verify=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        qdsl.load_weights_(torch.nn.Linear(2, 2), out, verify=True)
    path.unlink()
    (out / "model.safetensors.index.json").unlink()
    assert f"'{path.name}' is missing" in command("verify", out).stdout


@pytest.mark.parametrize("job", ["quantize", "dequantize"])
def test_a_file_is_verified_by_its_checksums(job: str, inputs: Path, tmp_path: Path) -> None:
    """They lie next to it; without them it can still be read, but not verified alone."""
    arguments, name = JOBS[job]
    out = tmp_path / name
    succeed(*arguments.format(inputs).split(), "-o", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, checksums_path(out).name]
    assert command("verify", out).stdout == "all tensors fit their checksums\n"
    qdsl.open(out, verify=True).close()
    data = out.read_bytes()
    out.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    assert re.fullmatch(rf"{out}: tensor '[\w.]+' is damaged\n1 problem\n", command("verify", out).stdout)
    with pytest.raises(CheckpointError, match="is damaged"):
        qdsl.open(out, verify=True)
    out.write_bytes(data[:-32])
    result = command("verify", out)
    assert "is damaged" in result.stdout or "bytes are missing" in result.stderr
    checksums_path(out).unlink()
    assert command("verify", out).exit_code == 1
    out.write_bytes(data)
    assert "no qdsl-checksums.json states checksums" in command("verify", out).stderr


def test_a_folder_without_checksums_cannot_be_verified_alone(inputs: Path) -> None:
    result = command("verify", inputs / "plain")
    assert result.exit_code == 1 and "no qdsl-checksums.json states checksums" in result.stderr
    with pytest.raises(CheckpointError, match=r"no qdsl-checksums\.json"):
        qdsl.open(inputs / "plain", verify=True)
    qdsl.open(inputs / "plain").close()
