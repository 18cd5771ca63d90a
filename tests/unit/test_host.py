"""Systems that lack what Linux has: each branch of qdsl.host runs here with the feature removed."""

from __future__ import annotations

import builtins
import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdsl.compiler.emit.module.build import files_of
from qdsl.host import files, system
from qdsl.host.files import OutputError, cache_folder, check_output, locked, replacing, write_text
from qdsl.host.private import private_folder
from qdsl.host.processes import affordable, needed
from qdsl.runtime.libraries.triton import use_writable_cache
from tests.support.paths import ROOT

OF_ONE_SYSTEM = ("import fcntl", "import msvcrt", "import resource", "/proc", "/sys/", "posix_fallocate",
                 "sched_getaffinity", "O_DIRECTORY", "O_BINARY", "pthread_sigmask", "fchmod", "MAP_",
                 "sys.platform", "os.name", "sysconf")


class Msvcrt(types.ModuleType):
    """The locks of Windows: of bytes, by position, held per descriptor."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.locks: dict[tuple[int, int], int] = {}

    def locking(self, file: int, mode: int, nbytes: int) -> None:
        assert mode == self.LK_NBLCK and nbytes == 1
        place = os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR)
        if self.locks.get(place, file) != file:
            raise OSError(errno.EACCES, "Permission denied")
        self.locks[place] = file


@pytest.fixture
def without_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, without_fcntl: None) -> Iterator[Msvcrt]:
    """The names that Windows lacks are gone, and its locks are there."""
    monkeypatch.setitem(sys.modules, "msvcrt", module := Msvcrt())
    for name in ("O_DIRECTORY", "O_NOFOLLOW", "fchmod", "posix_fallocate", "sched_getaffinity", "set_blocking", "sysconf"):
        monkeypatch.delattr(os, name)
    for name in [name for name in vars(mmap) if name.startswith("MAP_")]:
        monkeypatch.delattr(mmap, name)
    monkeypatch.delattr(signal, "pthread_sigmask")
    yield module


@pytest.fixture
def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(self: Path, *arguments: Any, **options: Any) -> str:
        if str(self).startswith(("/proc", "/sys")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return original(self, *arguments, **options)

    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize("path", sorted((ROOT / "qdsl").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_host_has_what_one_system_has(path: Path) -> None:
    if path.parent.name != "host":
        text = path.read_text()
        assert [word for word in OF_ONE_SYSTEM if word in text] == []


def test_files_are_written_and_locked_on_windows(windows: Msvcrt, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with replacing(path, "a" * 16) as file:
        file.write(b"new")
        assert len(windows.locks) == 1 and file.tell() == 3, "the lock leaves the position"
        with pytest.raises(OutputError, match="another process is writing"), replacing(path, "a" * 16):
            pass
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]
    with locked(tmp_path):
        pass                                                     # folders have no locks there


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks")
def test_files_and_folders_are_locked_for_one_writer(tmp_path: Path) -> None:
    """Two descriptors of a process lock each other out, as two processes do."""
    with replacing(tmp_path / "x", "a" * 16) as file:
        file.write(b"new")
        with pytest.raises(OutputError, match="another process is writing"), replacing(tmp_path / "x", "a" * 16):
            pass
    with locked(tmp_path), pytest.raises(BlockingIOError), locked(tmp_path):
        pass
    with locked(tmp_path, shared=True):
        with locked(tmp_path, shared=True):
            pass
        with pytest.raises(BlockingIOError), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_files_are_written_without_any_locks(without_fcntl: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    with open(tmp_path / "x", "wb") as file:
        assert system.lock(file.fileno()) is None
    write_text(tmp_path / "x", "text")
    assert (tmp_path / "x").read_text() == "text"


def test_a_mapped_file_is_not_replaced_on_windows(windows: Msvcrt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Access is denied", str(target))

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"must close it first: '.*x'"):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("out", ["MODEL", "MODEL/out", "."])
def test_an_output_is_no_input_where_names_have_no_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str) -> None:
    """macOS resolves links and not case, so two names of one folder stay: here a link that is not resolved."""
    (tmp_path / "model").mkdir()
    (tmp_path / "MODEL").symlink_to("model")
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    with pytest.raises(OutputError, match=r"the output (is the input|lies in|is a folder that holds)"):
        check_output(tmp_path / out, tmp_path / "model")


def test_names_and_paths_as_long_as_the_system_has_them(tmp_path: Path) -> None:
    """Unfinished files have short names, whatever the output is called."""
    folder = tmp_path.joinpath(*["f" * 200] * 10)
    folder.mkdir(parents=True)
    write_text(folder / ("x" * 255), "text")
    assert os.listdir(folder) == ["x" * 255]
    with pytest.raises(OSError, match=r"File name too long: .*x{256}'"):
        write_text(folder / ("x" * 256), "text")


def test_a_spec_with_the_line_ends_of_windows(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "nf4.yaml").read_bytes()
    for name, data in (("unix", text), ("windows", text.replace(b"\n", b"\r\n"))):
        (tmp_path / f"{name}.yaml").write_bytes(data)
    assert b"\r\n" in (tmp_path / "windows.yaml").read_bytes()
    assert files_of(tmp_path / "windows.yaml", "nf4.yaml") == files_of(tmp_path / "unix.yaml", "nf4.yaml")


def test_jobs_take_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB are room for some processes with small layers, and for one with a large one."""
    monkeypatch.setattr(system, "processors", lambda: 64)
    monkeypatch.setattr(system, "free_memory", lambda: 4 << 30)
    assert 8 < affordable(needed(2 * 4096 * 4096)) < 20
    assert affordable(needed(2 * 128256 * 16384)) == 1


@pytest.mark.parametrize("free, fits", [(1000, True), (999, False)])
def test_space_is_reserved_without_fallocate(windows: Msvcrt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int,
                                             fits: bool) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))
    with open(tmp_path / "x", "wb") as file:
        file.write(b"head")
        if fits:
            system.allocate(file, 1004)
            assert os.path.getsize(tmp_path / "x") == 1004
        else:
            with pytest.raises(OSError, match="No space left") as error:
                system.allocate(file, 1004)
            assert error.value.errno == errno.ENOSPC
            assert os.path.getsize(tmp_path / "x") == 4


def test_maps_are_private_everywhere(windows: Msvcrt, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with open(tmp_path / "x", "rb") as file:
        memory = system.map_file(file)
    memory[0] = 0
    assert (tmp_path / "x").read_bytes() == b"abc"
    memory.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's advice")
def test_pages_of_files_leave_memory_and_come_back(tmp_path: Path) -> None:
    """What was written to a private map stays, too."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (1 << 18))              # 64 MiB
    with path.open("rb") as file:
        mapped = system.map_file(file)
    mapped[5 << 20] = 77
    before = bytearray(mapped)
    resident = system.resident_bytes()
    system.page_out(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped))
    assert resident - system.resident_bytes() > 32 << 20
    assert mapped[5 << 20] == 77 and before == mapped


def test_signals_without_masks(windows: Msvcrt) -> None:
    with system.interrupts_blocked():
        system.block_interrupts()
    reader, writer = os.pipe()
    system.stop_blocking(writer)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("count, processors", [(6, 6), (None, 1)])
def test_processors_and_memory_where_nothing_tells_them(windows: Msvcrt, without_proc: None, monkeypatch: pytest.MonkeyPatch,
                                                        count: int | None, processors: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert system.processors() == processors
    assert system.free_memory() == system.UNLIMITED
    assert system.resident_bytes() == 0
    assert affordable(1) == processors


@pytest.mark.parametrize("succeeds, free", [(1, 3 << 30), (0, system.UNLIMITED)])
def test_memory_that_windows_tells(without_proc: None, windows: Msvcrt, monkeypatch: pytest.MonkeyPatch, succeeds: int, free: int,
                                   ) -> None:
    class MemoryStatus(ctypes.Structure):
        """As winbase.h has it."""

        _fields_ = (("dwLength", ctypes.c_uint32), ("dwMemoryLoad", ctypes.c_uint32), ("ullTotalPhys", ctypes.c_uint64),
                    ("ullAvailPhys", ctypes.c_uint64), ("others", ctypes.c_uint64 * 5))

    def status_of(pointer: Any) -> int:
        status = ctypes.cast(pointer, ctypes.POINTER(MemoryStatus)).contents
        assert status.dwLength == ctypes.sizeof(MemoryStatus) == 64
        status.dwMemoryLoad, status.ullTotalPhys, status.ullAvailPhys = 25, 4 << 30, 3 << 30
        return succeeds

    kernel32 = types.SimpleNamespace(GlobalMemoryStatusEx=status_of)
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel32), raising=False)
    assert system.free_memory() == free


def test_half_of_the_memory_is_free_where_the_system_tells_the_whole(without_proc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert system.free_memory() == 2 << 30
    monkeypatch.setattr(system, "processors", lambda: 8)
    assert affordable(1 << 30) == 2
    assert affordable(1 << 40) == 1, "one process runs on any machine"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache" / "qdsl"))
    assert cache_folder() == tmp_path / "cache" / "qdsl" and not os.listdir(tmp_path)
    monkeypatch.setenv("QDSL_CACHE", "/proc/nobody/qdsl")
    files._temporary_cache.cache_clear()
    with pytest.warns(UserWarning, match=r"/proc/nobody/qdsl cannot be written; .* Set QDSL_CACHE"):
        folder = cache_folder()
    private_folder("traces")
    assert folder.stat().st_mode & 0o777 == 0o700 and cache_folder() == folder
    shutil.rmtree(folder)
    files._temporary_cache.cache_clear()


def test_triton_compiles_into_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for home, cache in ((tmp_path, None), (Path("/proc/nobody"), tmp_path / "triton")):
        for name, value in (("TRITON_HOME", home), ("QDSL_CACHE", tmp_path), ("TRITON_CACHE_DIR", "")):
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TRITON_CACHE_DIR")
        use_writable_cache.__wrapped__()
        assert os.environ.get("TRITON_CACHE_DIR") == (None if cache is None else str(cache))


def test_a_temporary_cache_ends_with_the_process(tmp_path: Path) -> None:
    code = ("import warnings; warnings.simplefilter('ignore')\n"
            "from qdsl.host.files import cache_folder; print(cache_folder())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True,
                          env=os.environ | {"TMPDIR": str(tmp_path), "QDSL_CACHE": "/proc/nobody/qdsl"})
    assert done.stdout.startswith(f"{tmp_path}/qdsl-") and os.listdir(tmp_path) == []


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    monkeypatch.delitem(sys.modules, "qdsl.host.system")
    with pytest.raises(ImportError, match="little-endian"):
        builtins.__import__("qdsl.host.system", fromlist=["system"])


CUT_OFF = """
from contextlib import closing
from qdsl.host.processes import results
if __name__ == "__main__":
    with closing(results(bytes, [1 << 25] * 4, 2)) as all_bytes:
        next(all_bytes)                                          # the processes write the next results meanwhile
    print("ended")
"""


def test_results_that_nobody_reads_do_not_keep_a_command_alive(tmp_path: Path) -> None:
    """Where a process is ended in the middle of a large result, as when the disk is full."""
    (tmp_path / "cut.py").write_text(CUT_OFF)
    run = subprocess.run([sys.executable, str(tmp_path / "cut.py")], capture_output=True, text=True, timeout=60, check=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.stdout == "ended\n"
