"""Files appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdsl.files import replacing, write_text

ROOT = Path(__file__).parents[1]


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
def test_replacing_follows_no_link_and_keeps_the_usual_mode(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    write_text(tmp_path / "link", "new")
    assert target.read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").stat().st_mode == target.stat().st_mode
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "new")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "target"]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    program = ("import os, sys; from qdsl.files import replacing\n"
               "with replacing(sys.argv[1]) as file:\n"
               "    file.write(bytes(1 << 20)); os._exit(9)")
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT).returncode == 9
    assert path.read_bytes() == b"old"
    assert [name.endswith(".part") for name in os.listdir(tmp_path) if name != "x.safetensors"] == [True]
