"""The arithmetic of a model on this machine's processor: the dtype of products, how x is rounded, and the threads."""

from __future__ import annotations

import os
from typing import Any

import torch

from qdsl.core.text import counted
from qdsl.host.system import processor_flags
from qdsl.runtime.cpu.linear import ROUNDING

# Instructions that multiply bfloat16, by their flags in Linux's /proc/cpuinfo, the fastest first.
BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}


def bfloat16_instructions() -> str | None:
    """The instructions of this processor that multiply bfloat16; None where it has none."""
    flags = processor_flags()
    return next((name for flag, name in BFLOAT16.items() if flag in flags), None)


def arithmetic(model: Any) -> str:
    """One line for users: the dtype of a model's products, on a CPU also why, how x is rounded, and the threads."""
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu":
        return f"{dtype} on {model.device}"
    instructions = bfloat16_instructions()
    why = f"this processor has {instructions}" if instructions else "this processor multiplies no bfloat16"
    is_rounded = os.environ.get(ROUNDING, "0") not in ("", "0")
    x = "x rounded to 8 bits in products (--exact: as it is)" if is_rounded else "x exact in products (--int8: in 8 bits)"
    return f"{dtype} ({why}), {x}, {counted(torch.get_num_threads(), 'thread')}"


def set_processor(threads: int | None = None, exact: bool | None = None) -> None:
    """Set the threads and the arithmetic of products on a CPU, for this process; None leaves what is set."""
    if threads is not None:
        torch.set_num_threads(threads)
    if exact is not None:
        os.environ[ROUNDING] = str(int(not exact))
