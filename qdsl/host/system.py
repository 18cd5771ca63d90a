"""Every difference between Linux, macOS and Windows that qdsl depends on: locks, disk space, memory, processors, signals.

Other modules call these functions instead of testing for a system.  A function tests for the feature, not for the system's name,
so that removing the feature tests the branch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.byteorder != "little":
    raise ImportError("qdsl reads and writes little-endian bytes in place, and this machine is big-endian")

READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)    # without waiting for the writer of a pipe
LOCKED_BYTE = 1 << 43                                            # beyond the end of any file: Windows locks bytes
UNLIMITED = 1 << 62


def name() -> str:
    """The operating system's name: Linux, macOS, Windows, or Python's name for it."""
    return {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def lock(file: int, shared: bool = False) -> bool | None:
    """Lock an open file for this process until it is closed: True, False if another process has it, None without locks.

    Network file systems may have no locks.  On Windows a lock is never shared.
    """
    try:
        import fcntl
    except ImportError:
        return _lock_byte(file)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lock_byte(file: int) -> bool | None:
    """`lock` by msvcrt, which locks bytes at the file's position."""
    try:
        import msvcrt
    except ImportError:
        return None
    position = os.lseek(file, 0, os.SEEK_CUR)
    try:
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EDEADLK) else None
    finally:
        os.lseek(file, position, os.SEEK_SET)
    return True


def open_folder(path: Path) -> int | None:
    """A descriptor of a folder, for locking and fsync; None on Windows, which cannot open folders."""
    return None if not hasattr(os, "O_DIRECTORY") else os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def open_new(path: str) -> int:
    """A descriptor of a file to read and write, created if missing; links are not followed, and bytes are not translated."""
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def write_error(folder: Path) -> int:
    """The error number of new files in a folder, by its permissions and those of the disk; 0 where they are allowed."""
    if os.access(folder, os.W_OK | os.X_OK):
        return 0
    return errno.EROFS if hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES


def copy_mode(source: Path, file: BinaryIO) -> None:
    """Give an open file the permissions of another, if files have permissions."""
    if hasattr(os, "fchmod"):
        os.fchmod(file.fileno(), stat.S_IMODE(source.stat().st_mode))


def replace(source: Path, target: Path) -> None:
    """Rename a file over another.  Raises PermissionError with the reason if Windows has the target open or mapped."""
    try:
        os.replace(source, target)
    except PermissionError as error:
        if not target.is_file() or hasattr(os, "fchmod"):
            raise
        raise PermissionError(error.errno, "open in this or another program, which must close it first", str(target)) from None


def allocate(file: BinaryIO, nbytes: int) -> None:
    """Reserve disk space for a file of that size.  Raises OSError ENOSPC if the disk has less."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    missing = nbytes - os.fstat(file.fileno()).st_size
    if missing > shutil.disk_usage(os.path.dirname(os.path.abspath(file.name))).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    file.truncate(nbytes)


def map_file(file: BinaryIO) -> mmap.mmap:
    """The whole file as memory, copy on write: torch needs writable memory, and writes to a read-only map would crash."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # NORESERVE: the file may be larger than the memory.
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_memory(nbytes: int) -> mmap.mmap:
    """So many zero bytes of this process, in huge pages where the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):                      # systems without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def page_out(address: int, nbytes: int) -> None:
    """Take whole pages of memory out of it until they are read again; their contents stay.  Does nothing where Linux is not.

    Pages of a mapped file that nobody wrote are dropped, and others go to the swap space, if there is any.
    """
    size, page_out_advice = mmap.PAGESIZE, 21                    # MADV_PAGEOUT, of Linux 5.4 and later
    first = -(-address // size) * size
    length = (address + nbytes) // size * size - first
    if sys.platform == "linux" and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), page_out_advice)


def stop_blocking(pipe: int) -> None:
    """Make writes to a full pipe fail at once; Windows supports that from Python 3.12 on, and does not need it for signals."""
    if hasattr(os, "set_blocking"):
        os.set_blocking(pipe, False)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delays Ctrl-C; processes that start meanwhile inherit that, and print nothing if interrupted during imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block_interrupts() -> None:
    """Block SIGINT in this thread from now on, if threads have signal masks."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def processors() -> int:
    """The number of processors that this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_flags() -> frozenset[str]:
    """The features of the first processor, by Linux's names; empty on other systems."""
    return frozenset(_processor_line("flags").split())


def is_intel() -> bool:
    """Whether Linux says that the first processor is Intel's."""
    return _processor_line("vendor_id").strip() == "GenuineIntel"


def _processor_line(key: str) -> str:
    """What Linux says of the first processor under a key; '' on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text().partition(key)[2].partition("\n")[0].lstrip("\t: ")
    except OSError:
        return ""


def allow_tiles() -> bool:
    """Whether Linux lets this process use the registers of AMX, which hold matrices; asks it to."""
    call, code, registers = 158, 0x1023, 18                      # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of x86-64
    return sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(call, code, registers) == 0


def free_memory() -> int:
    """Bytes of memory that this process may still use: the machine's free memory, or the process or container limit if less.

    Half of the machine's memory if the system does not report free memory, UNLIMITED if it reports nothing.
    """
    limits = [UNLIMITED]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    except (OSError, ValueError, StopIteration):
        limits.append(_windows_memory() or _machine_memory() // 2)
    with suppress(OSError, ValueError):                          # 'max' means no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(ImportError, AttributeError):                  # Windows
        import resource

        bounds = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        limits += [bound for bound in bounds if bound != resource.RLIM_INFINITY]
    return min(limits)


def _windows_memory() -> int:
    """Bytes of free memory on Windows; 0 elsewhere."""
    import ctypes

    # MEMORYSTATUSEX: its length and the load in percent, then seven sizes, of which the second is free memory.
    status = (ctypes.c_uint64 * 8)(ctypes.sizeof(ctypes.c_uint64 * 8))
    windows = getattr(ctypes, "windll", None)
    return int(status[2]) if windows is not None and windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0


def _machine_memory() -> int:
    """Bytes of memory of the machine; twice UNLIMITED if the system does not report it."""
    with suppress(AttributeError, OSError, ValueError):          # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * UNLIMITED


def resident_bytes() -> int:
    """Bytes of this process in memory, including mapped files; 0 if the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
