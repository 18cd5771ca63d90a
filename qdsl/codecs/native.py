"""Compiles the inner loops of codecs (native.c) with this machine's C compiler; without one numpy computes the same.

`QDSL_CPU_COMPILE=never` disables them.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from qdsl.host import library
from qdsl.host.c_functions import CFunctions
from qdsl.host.system import processor_flags

SOURCE = Path(__file__).with_name("native.c")
OPTIONS = ("-O3",)                                               # after library.OPTIONS: vectorizes loops


def functions() -> CFunctions | None:
    """The functions of native.c; None without a compiler, or if QDSL_CPU_COMPILE forbids it."""
    return None if library.setting() == "never" else _compile_native()


@cache
def _compile_native() -> CFunctions | None:
    source = SOURCE.read_text(encoding="ascii")                  # fails for an incomplete package: numpy must not hide that
    for options in ((*OPTIONS, *_machine_options()), OPTIONS):   # an old compiler may not know the processor
        try:
            return CFunctions(library.load(source, options), source)
        except (library.NoCompiler, OSError):
            continue
    return None


def _machine_options() -> tuple[str, ...]:
    """Options for the vector instructions of this machine's processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    flags = processor_flags()
    if flags >= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}:
        return ("-march=x86-64-v4",)
    return ("-march=x86-64-v3",) if flags >= {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"} else ()
