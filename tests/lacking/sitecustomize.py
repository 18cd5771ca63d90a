"""Makes a Python process one of a machine that lacks what QDSL_TEST_LACKS names, with commas between.

`pytest --lacks NAME` puts this folder on PYTHONPATH, so that processes that tests start lack the same.
triton: it cannot be imported.  unix: fcntl and what else Windows lacks of `os`, and /proc, which macOS lacks as well.
size: there is one processor, 4 GB of memory, no compiler and no home folder that can be written.
"""

import errno
import os
import sys
import types

UNIX = ("posix_fallocate", "sched_getaffinity", "O_DIRECTORY", "set_blocking")
MEMORY = 4 << 30                                                 # bytes


def lack_unix() -> None:
    """Remove the modules, the attributes and the folders; locks are those of Windows."""
    sys.modules["msvcrt"] = msvcrt()
    sys.modules["fcntl"] = sys.modules["resource"] = None        # type: ignore[assignment]
    for name in UNIX:
        vars(os).pop(name, None)
    os.process_cpu_count = os.cpu_count                          # type: ignore[attr-defined]  # it asks sched_getaffinity
    sys.addaudithook(_refuse)


def msvcrt() -> types.ModuleType:
    """The locks of Windows, by Linux's: of a byte that stands for the file."""
    import fcntl
    import subprocess  # noqa: F401                              # which takes a system with this module for Windows

    def locking(file: int, mode: int, nbytes: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    module = types.ModuleType("msvcrt")
    vars(module).update(LK_NBLCK=2, locking=locking)
    return module


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Raise FileNotFoundError for files of Linux's /proc and /sys."""
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", arguments[0])


def lack_size() -> None:
    """Limit this process, and those that it starts."""
    import resource

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.environ.update(HOME="/proc/nobody", PATH="/proc/nobody", CC="")
    for name in ("XDG_CACHE_HOME", "QDSL_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        os.environ.pop(name, None)


lacks = os.environ.get("QDSL_TEST_LACKS", "").split(",")
if "triton" in lacks:
    sys.modules["triton"] = None                                 # type: ignore[assignment]
if "unix" in lacks:
    lack_unix()
if "size" in lacks:
    lack_size()
