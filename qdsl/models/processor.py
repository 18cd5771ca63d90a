"""The arithmetic of a model on this machine's processor: the dtype of products, how x is rounded, and the threads."""

from __future__ import annotations

import os
from typing import Any

import torch

from qdsl.core.text import counted
from qdsl.host.system import processor_flags
from qdsl.runtime.cpu import dense
from qdsl.runtime.cpu.linear import ROUNDING
from qdsl.runtime.torch.layers import QuantizedLinear

# Instructions that multiply bfloat16, by Linux's names of them, the fastest first.
BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}


def bfloat16_instructions() -> str | None:
    """The instructions of this processor that multiply bfloat16; None where it has none."""
    flags = processor_flags()
    return next((name for flag, name in BFLOAT16.items() if flag in flags), None)


def chosen_dtype(stored: str | None, device_map: Any) -> tuple[str, str]:
    """The dtype of the products of a model of a GGUF file, and why.

    stored: that of its matrices, None where they are packed.  device_map: as transformers takes it.
    """
    if stored is not None:
        return stored, "that of the file's matrices"
    if device_map is not None and not is_cpu(device_map):
        return "float32", "of packed weights"
    instructions = bfloat16_instructions()
    if instructions is None:
        return "float32", "this processor multiplies no bfloat16"
    return "bfloat16", f"this processor has {instructions}"


def is_cpu(device_map: Any) -> bool:
    """Whether a device map of transformers has the CPU alone, as one that transformers chooses on a machine without a GPU."""
    places = {str(place).partition(":")[0] for place in (device_map.values() if isinstance(device_map, dict) else [device_map])}
    return places <= {"cpu", "disk", *(() if torch.accelerator.is_available() else ("auto", "balanced", "sequential"))}


def arithmetic_text(model: Any) -> str:
    """One line for users: the dtype of a model's products, on a CPU also why, how x is rounded, and the threads."""
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu":
        return f"{dtype} on {model.device}"
    report = getattr(getattr(model, "hf_quantizer", None), "report", None)
    shown = getattr(report, "dtype", "") or dtype
    is_rounded = os.environ.get(ROUNDING, "0") not in ("", "0")
    x = "x rounded to 8 bits in products (--exact: as it is)" if is_rounded else "x exact in products (--int8: in 8 bits)"
    decoded = "lossless weights kept decoded; " if _has_decoded(model) else ""
    return f"{shown}; {x}; {decoded}{counted(torch.get_num_threads(), 'thread')}"


def _has_decoded(model: Any) -> bool:
    """Whether a layer with a lossless code keeps its weight decoded."""
    layers = (layer for layer in model.modules() if isinstance(layer, QuantizedLinear))
    lossless = next((layer for layer in layers if layer._packed.layout.streams), None)
    return lossless is not None and dense.kept_decoded(lossless.packed) is not None


def set_processor(threads: int | None = None, exact: bool | None = None) -> None:
    """Set the threads and the arithmetic of products on a CPU, for this process; None leaves what is set."""
    if threads is not None:
        torch.set_num_threads(threads)
    if exact is not None:
        os.environ[ROUNDING] = str(int(not exact))
