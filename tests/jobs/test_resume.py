"""Resumed work: nothing is kept that is not compared with its bytes and its inputs, and complete work ends well when repeated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from qdsl.checkpoint.files import resume
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.cli.progress import Meter
from qdsl.host import files as host_files
from qdsl.host import unfinished
from qdsl.jobs.engine import stage
from tests.support.jobs import JOBS, command, files, job_inputs, succeed

WRITING = [job for job in JOBS if job != "merge-index"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_inputs(tmp_path_factory.mktemp("inputs"))


def last_bytes(path: Path) -> Iterator[tuple[Path, int]]:
    """A file and the last byte of a tensor in it: of one that is copied, and of one that is quantized."""
    if path.is_dir():
        with Folder(path) as folder:
            names = [name for name in folder.names() if name.endswith(("norm.weight", "up.weight"))]
            yield from ((folder.file(name).path, folder.entry(name).stop - 1) for name in names)
    else:
        with GgufFile(path) as file:
            first = file.entry(next(iter(file.tensors)))
            yield path, first.start + first.nbytes - 2           # of the mantissa: the number stays finite


def flip(path: Path, place: int) -> None:
    """Change a bit and nothing else, not even the time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def begin(job: str, arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish a part of the work: all shards of a folder, or the first tensors of a file."""
    if not out.suffix:
        succeed(*arguments, "-o", out, "--shard", "1/1")
        return
    written: list[str] = []
    copy_chunks = resume.copy_chunks

    def copied(file: BinaryIO, pieces: Any, size: int, where: str) -> int:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(where)
        return copy_chunks(file, pieces, size, where)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "copy_chunks", copied)
        assert command(*arguments, "-o", out).exit_code != 0
    assert len(written) == 3 and any(path.name.endswith(".part") for path in out.parent.iterdir())


@pytest.mark.parametrize("job", WRITING)
def test_an_input_that_changed_behind_its_first_mib_is_noticed(job: str, inputs: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and times are what they were."""
    monkeypatch.setattr(host_files, "FIRST", 8)
    shutil.copytree(inputs, tmp_path / "in")
    arguments, name = JOBS[job][0].format(tmp_path / "in").split(), JOBS[job][1]
    places = list(last_bytes(Path(arguments[1])))
    assert places
    for number, (path, place) in enumerate(places):
        out = tmp_path / f"{number}" / name
        out.parent.mkdir()
        begin(job, arguments, out, monkeypatch)
        flip(path, place)
        succeed(*arguments, "-o", out)
        succeed(*arguments, "-o", tmp_path / f"fresh{number}" / name)
        assert files(out.parent) == files(tmp_path / f"fresh{number}")


@pytest.mark.parametrize("job", ["convert", "compress", "decompress", "quantize folder"])
@pytest.mark.parametrize("is_merged", [False, True])
def test_staged_files_are_compared_before_they_are_kept(job: str, is_merged: bool, inputs: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was damaged is written again, or named where parts are merged.  Progress says what is compared."""
    titles: list[str] = []
    monkeypatch.setattr(Meter, "tell", lambda meter, done, name: titles.append(meter.title))
    arguments = [*JOBS[job][0].format(inputs).split(), "-o", str(tmp_path / "out")]
    succeed(*arguments[:-1], tmp_path / "fresh")
    succeed(*arguments, "--shard", "1/1")
    assert {*titles} == {""}
    staged = [path for path in (tmp_path / "out" / stage.STAGE).rglob("*.safetensors") if path.is_file()]
    flip(staged[0], staged[0].stat().st_size - 1)
    if is_merged:
        result = command("merge-index", tmp_path / "out")
        assert result.exit_code == 1 and "are not there, or not of" in result.stderr
    titles.clear()
    succeed(*arguments)
    assert is_merged or (titles[0] == "comparing finished work with checksums" and "" in titles)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


@pytest.mark.parametrize("job", JOBS)
def test_work_that_is_killed_after_its_last_byte_ends_well(job: str, inputs: Path, tmp_path: Path) -> None:
    """As while it prints its report: the same command ends well, and leaves nothing else; another one is refused."""
    arguments, name = JOBS[job]
    asked = (*arguments.format(inputs).split(), "-o", tmp_path / "out" / name)
    if job == "merge-index":
        succeed(*asked)
        asked = ("merge-index", tmp_path / "out" / name)
    with pytest.raises(KeyboardInterrupt), unfinished.command():
        succeed(*asked)
        raise KeyboardInterrupt
    left = files(tmp_path / "out")
    assert len([path for path in left if Path(path).name.startswith(".qdsl-")]) == 1
    if job == "quantize":
        other = command("quantize", inputs / "in.gguf", "-t", "q4_0", "-o", tmp_path / "out" / name, "-j", "1")
        assert other.exit_code == 2 and "exists already" in other.stderr and files(tmp_path / "out") == left
    succeed(*asked)
    assert files(tmp_path / "out") == {path: data for path, data in left.items()
                                       if not Path(path).name.startswith(".qdsl-")}
    assert command(*asked).exit_code != 0                        # as always where an output exists


@pytest.mark.parametrize("job", ["quantize folder", "quantize"])
def test_an_interrupt_tells_where_work_lies(job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, name = JOBS[job]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "write_note", interrupted)
    monkeypatch.setattr(resume, "copy_chunks", interrupted)
    command(*arguments.format(inputs).split(), "-o", tmp_path / name)
    place = tmp_path / name / stage.STAGE if job == "quantize folder" else next(tmp_path.glob(".qdsl-*.part"))
    assert unfinished.interrupt_text() == f"interrupted; run the same command again to resume: what is complete lies in {place}"
    monkeypatch.undo()
    succeed(*arguments.format(inputs).split(), "-o", tmp_path / name)
    assert str(tmp_path) not in unfinished.interrupt_text()
