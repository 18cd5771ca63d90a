"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import CheckpointError, read_header, write
from qdsl.cli import app
from qdsl.host.files import OutputError, check_output, replacing, write_text
from qdsl.jobs.gguf import imatrix
from tests.support.paths import ROOT


def test_replacing_takes_the_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        assert sorted(os.listdir(tmp_path))[0].startswith(".qdsl-")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]
    write_text(path, "b\u00e4r\n")
    assert path.read_bytes() == b"b\xc3\xa4r\n"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_bytes() == b"b\xc3\xa4r\n"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.skipif(sys.platform == "win32", reason="links and file modes")
def test_replacing_follows_links_and_keeps_the_mode(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to(target)
    write_text(tmp_path / "link", "new")
    assert target.read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path / "elsewhere") == ["target"]


def states(folder: Path) -> dict[str, tuple[int, ...]]:
    """What names of a folder are and when they changed; following a link may change when it was read."""
    stats = {name: (folder / name).lstat() for name in os.listdir(folder)}
    return {name: (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices")
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a pipe"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to(os.devnull)
    else:
        os.mkfifo(tmp_path / "pipe" if "link" in kind else path)
    if kind == "link to a pipe":
        path.symlink_to(tmp_path / "pipe")
    before = states(tmp_path)
    with pytest.raises(OutputError, match="is no regular file"):
        write_text(path, "new")
    assert states(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="locks")
def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Of the same output alone, and not what another process still writes."""
    path, other = tmp_path / "x", tmp_path / "y"
    killed = "import os, sys; from qdsl.host.files import replacing\nwith replacing(sys.argv[1]) as file: os._exit(9)"
    for name in (path, path, other):
        subprocess.run([sys.executable, "-c", killed, str(name)], cwd=ROOT, check=False)
    assert len(os.listdir(tmp_path)) == 2
    with replacing(other), replacing(path):
        writing = set(os.listdir(tmp_path))
        write_text(path, "first")
        assert set(os.listdir(tmp_path)) == {*writing, "x"}
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_an_output_is_no_input(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = folder / "a.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "soft").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for out, inputs in ((source, [source]), (tmp_path / "soft", [source]), (tmp_path / "hard", [source]),
                        (tmp_path / "hard", [folder]), (folder, [folder]), (folder / ".." / "model", [folder])):
        with pytest.raises(OutputError, match="the output is the input, or links to it"):
            check_output(out, *inputs)
    with pytest.raises(OutputError, match=r"the output lies in .*model, which is an input"):
        check_output(folder / "new" / "b.gguf", folder)
    with pytest.raises(OutputError, match="the output is a folder that holds the input"):
        check_output(tmp_path, source)
    check_output(folder / "b.gguf", source)
    check_output(tmp_path / "out", tmp_path / "hard", folder)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user cannot write into; root is told so, who can."""
    folder = tmp_path / "read_only"
    (folder / "sub").mkdir(parents=True)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    else:
        folder.chmod(0o500)
    return folder


@pytest.mark.parametrize("out", ["x.gguf", "new/x.gguf", ""])
def test_a_folder_that_cannot_be_written_is_refused(read_only: Path, tmp_path: Path, out: str) -> None:
    with pytest.raises(PermissionError, match=r"cannot write into .*read_only: Permission denied") as caught:
        check_output(read_only / out)
    assert caught.value.filename == str(read_only / out)
    check_output(read_only / "sub" / "x.gguf")
    check_output(tmp_path / "new" / "x.gguf")


@pytest.mark.parametrize("command", ["quantize IN --type q8_0", "quantize IN --format fp8_block", "convert IN --to awq",
                                     "compress IN --format hlane"])
def test_an_output_is_checked_before_the_input_is_read(read_only: Path, tmp_path: Path, command: str) -> None:
    """The input is no checkpoint: what comes first is reported."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(b"no header")
    words = command.replace("IN", str(tmp_path / "in")).split()
    result = CliRunner().invoke(app, [*words, "--out", str(read_only / "out")])
    assert result.exit_code == 1
    assert result.stderr == f"error: {read_only}/out: cannot write into {read_only}: Permission denied\n"


def test_errors_of_a_hidden_file_name_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, *flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    monkeypatch.setattr("qdsl.host.system.open_new", refused)
    with pytest.raises(PermissionError) as caught:
        write_text(tmp_path / "x", "text")
    assert caught.value.filename == str(tmp_path / "x")


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    program = ("import os, sys; from qdsl.host.files import replacing\n"
               "with replacing(sys.argv[1]) as file:\n"
               "    file.write(bytes(1 << 20)); os._exit(9)")
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT).returncode == 9
    assert path.read_bytes() == b"old"
    assert [name.endswith(".part") for name in os.listdir(tmp_path) if name != "x.safetensors"] == [True]


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "imatrix.gguf", "config.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    """A clone without Git LFS holds texts in place of large files."""
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    read = {"model.safetensors": read_header, "model.gguf": GgufFile, "imatrix.gguf": imatrix.read,
            "config.json": lambda path: Folder(path.parent).config}[name]
    if name == "config.json":
        write(tmp_path / "model.safetensors", {"weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="a pointer of Git LFS, not the file itself; `git lfs pull`"):
        read(path)
