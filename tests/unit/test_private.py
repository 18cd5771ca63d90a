"""Modules and libraries of the cache: only text of this process runs, out of folders and files that nobody else can write."""

from __future__ import annotations

import inspect
import linecache
import os
import py_compile
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from qdsl.compiler import load
from qdsl.host import library
from qdsl.host.private import UnsafeCache, private_folder, read_private, write_private

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
TEXT = "def answer():\n    return 42\n"
EVIL = "raise SystemExit('this ran')\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def only(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def use_module() -> ModuleType:
    """Write a generated module into the cache, and import it."""
    files = {"w4x.py": TEXT, "w4x.json": "{}"}
    sys.modules.pop("qdsl_loaded_w4x", None)
    load._offer_import("qdsl_loaded_w4x", load._write_to_cache(files), "w4x", files)
    return import_module("qdsl_loaded_w4x")


def use_library() -> object:
    return library.load("int run(void) { return 42; }")


def write(name: str) -> Callable[[Path], object]:
    def attack(file: Path) -> None:
        path = file.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(EVIL)
    return attack


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def link_folder(file: Path) -> None:
    folder = file.parent.rename(file.parent.parent.parent / "elsewhere")
    file.parent.symlink_to(folder)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


ATTACKS: dict[str, Callable[[Path], object]] = {
    "file": lambda file: file.chmod(0o666), "group": lambda file: file.chmod(0o620),
    "folder": lambda file: file.parent.chmod(0o777), "root": lambda file: file.parent.parent.chmod(0o730),
    "parent": lambda file: file.parent.parent.parent.chmod(0o777), "link": link, "linked folder": link_folder, "pipe": pipe,
    "owner": lambda file: os.chown(file, 65534, -1), "folder's owner": lambda file: os.chown(file.parent, 65534, -1),
    "root's owner": lambda file: os.chown(file.parent.parent, 65534, -1)}
NEIGHBOURS = ("w4x/__init__.py", "w4x.pyc", "producers/evil.json", "other.json", "sitecustomize.py")


@pytest.mark.parametrize("use", [use_module, use_library])
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_others_can_write_is_refused_with_what_to_do(cache: Path, use: Callable[[], object], attack: str) -> None:
    if "owner" in attack and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    use()
    ATTACKS[attack](next(path for path in only(cache).iterdir() if path.suffix in (".py", ".so")))
    with pytest.raises(UnsafeCache, match=r"executed.*set QDSL_CACHE to a folder of your own|remove it"):
        use()


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_file_that_an_import_could_take_is_refused(cache: Path, name: str) -> None:
    use_module()
    write(name)(only(cache) / "w4x.py")
    with pytest.raises(UnsafeCache, match=r"is no file of qdsl, and .*; remove it"):
        use_module()


def test_only_text_of_this_process_runs(cache: Path) -> None:
    """Not bytecode, nor another text that is put there after the check; kernels are compiled from the same text."""
    use_module()
    path = only(cache) / "w4x.py"
    py_compile.compile(str(path), doraise=True)
    (bytecode,) = (path.parent / "__pycache__").iterdir()
    path.write_text(EVIL)
    py_compile.compile(str(path), cfile=str(bytecode), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert use_module().answer() == 42 and path.read_text() == TEXT
    path.write_text(EVIL)
    linecache.checkcache()
    module = sys.modules["qdsl_loaded_w4x"]
    assert module.__file__ == str(path) and inspect.getsource(module.answer) == TEXT


def test_a_cache_below_a_sticky_folder_and_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /tmp, and a home folder that is a link; whatever the umask."""
    tmp_path.chmod(0o1777)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "home" / ".cache" / "qdsl"))
    before = os.umask(0o002)
    try:
        folder = private_folder("a/b")
        write_private(folder / "file", b"text")
    finally:
        os.umask(before)
    assert folder == tmp_path / "real" / ".cache" / "qdsl" / "a" / "b" and folder.stat().st_mode & 0o777 == 0o700
    assert read_private(folder / "file") == b"text" and read_private(folder / "missing") is None
    assert os.listdir(folder) == ["file"]
