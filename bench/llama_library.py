"""llama.cpp's prebuilt library and its C interface, as the npm package @node-llama-cpp/linux-x64 has them.

QDSL_LLAMA_LIBRARY names the folder with libllama, bins/linux-x64 of that package.  Without the variable the one is taken that
`make live` unpacks.  The declarations are those of the Python package llama-cpp-py-sync.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FASTEST = None                                                   # in place of a backend's name: the best for this processor


@dataclass(frozen=True, slots=True)
class Library:
    """ffi: of cffi, with the declarations.  functions: of libllama.  log: the callback that must outlive it."""

    ffi: Any
    functions: Any
    log: Any


def folder() -> Path | None:
    """Where the library lies; None where it, or a package to call it, is not there."""
    variable = os.environ.get("QDSL_LLAMA_LIBRARY")
    places = [Path(variable)] if variable else sorted(ROOT.glob(".venv-live/node-llama/package/bins/linux-x64"))
    is_callable = find_spec("cffi") is not None and find_spec("llama_cpp_py_sync") is not None
    return next((place for place in places if is_callable and any(place.glob("libllama.*.so"))), None)


@cache
def library(cpu: str | None = FASTEST) -> Library:
    """The library with one backend for CPUs: the fastest for this processor, or one by name, such as haswell.

    A process can use one backend only: call it with one name.
    """
    import cffi
    from llama_cpp_py_sync import _cffi_bindings

    place = folder()
    assert place is not None
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")              # which takes a minute
    for pattern in ("libggml-base.so", "libggml.*.so"):
        ctypes.CDLL(str(next(place.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    ffi = cffi.FFI()
    ffi.cdef(_cffi_bindings._LLAMA_H_CDEF)
    functions = ffi.dlopen(str(next(place.glob("libllama.*.so"))))
    silent = ffi.callback("void(enum ggml_log_level, const char*, void*)", lambda level, text, user: None)
    functions.llama_log_set(silent, ffi.NULL)
    backends = ctypes.CDLL(str(next(place.glob("libggml.*.so"))))
    name = fastest_cpu() if cpu is FASTEST else cpu
    backends.ggml_backend_load.argtypes, backends.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
    backends.ggml_backend_load(str(place / f"libggml-cpu-{name}.so").encode())
    functions.llama_backend_init()
    return Library(ffi, functions, silent)


@cache
def fastest_cpu() -> str:
    """The name of the backend that llama.cpp itself would load here: that with the best score for this processor."""
    place = folder()
    assert place is not None
    scores: dict[str, int] = {}
    for path in sorted(place.glob("libggml-cpu-*.so")):
        score = ctypes.CDLL(str(path)).ggml_backend_score
        score.argtypes, score.restype = [], ctypes.c_int
        scores[path.stem.removeprefix("libggml-cpu-")] = score()
    return max(scores, key=lambda name: scores[name])
