"""Compiles C with this machine's compiler, once, and keeps the libraries in the cache folder for all processes.

A library's file name is a digest of its source, the compiler and its options.  Only complete files that no other user can write
are loaded: a file ends with its own digest.

QDSL_CPU_COMPILE selects what is compiled: 'auto', the default, code that gains from it; 'always', also products of small weights;
'never', nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from qdsl.host.private import private_folder, read_private, write_private
from qdsl.host.system import processor_flags

# A fused multiply-add would skip a rounding of the formula.  A shared library of -ffast-math, which $CC may ask for, would switch
# off subnormal numbers in the whole process.
OPTIONS = ("-std=gnu11", "-O2", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
           "-fPIC", "-shared", "-w")
SETTING = "QDSL_CPU_COMPILE"
SECONDS = 120                                                    # time limit of the compiler
_compiling: dict[str, threading.Lock] = {}                       # by file name: other libraries compile meanwhile


class NoCompiler(Exception):
    """This machine has no C compiler, or its compiler failed."""


_chosen = ""


def choose(choice: str) -> None:
    """Use this in this process, instead of QDSL_CPU_COMPILE."""
    global _chosen
    _chosen = choice


def setting() -> str:
    """The choice of the last call of `choose`, else QDSL_CPU_COMPILE, which may be invalid."""
    return _chosen or os.environ.get(SETTING, "auto")


@cache
def compiler() -> tuple[str, ...]:
    """The command of the C compiler: $CC, or the first of cc, gcc and clang.  Raises NoCompiler."""
    command = tuple(shlex.split(os.environ.get("CC", "")))
    names = (command[0],) if command else ("cc", "gcc", "clang")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise NoCompiler(f"no C compiler: {', '.join(names)}")
    return (path, *command[1:])


def has_compiler() -> bool:
    """Whether there is a C compiler."""
    try:
        return bool(compiler())
    except NoCompiler:
        return False


@cache
def machine_options(capability: str) -> tuple[str, ...]:
    """Options for the vector instructions that torch uses on this machine ('AVX512', 'AVX2' or another word)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    dots = ("-mavx512vnni",) if "avx512_vnni" in processor_flags() else ()
    return {"AVX512": ("-march=x86-64-v4", *dots), "AVX2": ("-march=x86-64-v3",)}.get(capability, ())


def load(source: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of C source: from the cache, or compiled now.  Raises NoCompiler and OSError, as UnsafeCache."""
    command = (*compiler(), *OPTIONS, *options)
    status = os.stat(command[0])
    described = "\0".join((*command, str(status.st_size), str(status.st_mtime_ns), platform.platform(), source))
    path = private_folder("cpu") / f"{hashlib.sha256(described.encode()).hexdigest()[:40]}.so"
    if not _is_whole(path):
        with _compiling.setdefault(path.name, threading.Lock()):
            if not _is_whole(path):
                _compile(command, source, path)
    return ctypes.CDLL(str(path))


def _is_whole(path: Path) -> bool:
    """Whether a library exists and ends with its digest.  Raises UnsafeCache."""
    data = read_private(path)
    return data is not None and data[-32:] == hashlib.sha256(data[:-32]).digest()


def _compile(command: tuple[str, ...], source: str, path: Path) -> None:
    """Compile C source to a library at a path, atomically."""
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=path.parent) as folder:
        library = Path(folder) / "library.so"
        try:
            result = subprocess.run([*command, "-x", "c", "-", "-o", str(library), "-lm"], input=source.encode(), timeout=SECONDS,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(str(error)) from error
        if result.returncode or not library.is_file():
            lines = result.stdout.decode(errors="replace").strip().splitlines() or [f"status {result.returncode}"]
            raise NoCompiler(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])[:200]}")
        data = library.read_bytes()
        write_private(path, data + hashlib.sha256(data).digest(), 0o700)
