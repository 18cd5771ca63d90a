"""The device that launches are for, and the file of candidates that `qdsl.tune` timed on it; nothing is timed on first use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qdsl.host.files import cache_folder
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu, of_arch, of_device
from qdsl.runtime.libraries.triton import runs_kernels
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import power
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.settings import EnvironmentSetting

MULTIPROCESSORS = 132                                            # assumed without a GPU: an H100's
OVERLAP = EnvironmentSetting("QDSL_PDL", ("never", "auto"))


@dataclass(frozen=True, slots=True)
class Target:
    """What a launch depends on: the major compute capability (9: Hopper; 0 elsewhere) and the number of multiprocessors."""

    capability: int
    multiprocessors: int


_assumed = Target(0, MULTIPROCESSORS)
_assumed_gpu = GPUS["h100"]


@contextmanager
def assumed(capability: int, multiprocessors: int, gpu: Gpu | None = None) -> Iterator[None]:
    """Choose launches for this device while tensors are on no GPU, to inspect kernels without one.

    gpu: the GPU to model costs for; by default the first of that capability with so many multiprocessors.
    """
    global _assumed, _assumed_gpu
    before, before_gpu = _assumed, _assumed_gpu
    _assumed = Target(capability, multiprocessors)
    _assumed_gpu = gpu or of_device("", (capability or 9, 0), multiprocessors)
    try:
        yield
    finally:
        _assumed, _assumed_gpu = before, before_gpu


def target(device: torch.device) -> Target:
    """The Target of a device; without a GPU the one that `assumed` set."""
    return _target(device) if device.type in ("cuda", "xpu") else _assumed


@cache
def _target(device: torch.device) -> Target:
    if device.type == "xpu":
        return Target(0, torch.xpu.get_device_properties(device).max_compute_units)
    capability = torch.cuda.get_device_capability(device)[0] if torch.version.cuda else 0
    return Target(capability, torch.cuda.get_device_properties(device).multi_processor_count)


def has_mma(device: torch.device) -> bool:
    """Whether a device runs the kernels for NVIDIA's matrix units: NVIDIA GPUs from Ampere on."""
    return target(device).capability >= 8 if runs_kernels(device) else ARCHS[_assumed_gpu.arch].capability >= 80


def has_gemm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `gemm` takes x of a dtype: 16-bit floats, but not before Ampere, for which Triton emits no MMA."""
    return dtype in (torch.float16, torch.bfloat16) and (has_mma(device) or device.type == "xpu" or not gpu(device).is_nvidia)


def has_skinny_streams(x: torch.Tensor, packed: PackedWeight) -> bool:
    """Whether kernels decode the weight's streams in registers and multiply x [M, K], on the device of x."""
    return has_mma(x.device) and stream_kernels.has_skinny(x, packed)


def gpu(device: torch.device) -> Gpu:
    """The data sheet that costs are modelled from: the device's, or the assumed GPU's without a GPU."""
    return _gpu(device) if device.type == "cuda" else _assumed_gpu


@cache
def _gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    if not torch.version.cuda:
        return of_arch(properties.gcnArchName.partition(":")[0], properties.multi_processor_count)
    return of_device(properties.name, torch.cuda.get_device_capability(device), properties.multi_processor_count)


def launches_overlap(device: torch.device) -> bool:
    """Whether a launch may begin before the previous one ends: if QDSL_PDL=auto, on NVIDIA GPUs from Hopper on.

    Raises FormatError for an unknown QDSL_PDL.
    """
    return OVERLAP.value() == "auto" and target(device).capability >= 9


def key(packed: PackedWeight, m: int, dtype: torch.dtype) -> str:
    """The key under which the fastest candidate for x [m, K] is kept: one each for 1 row, up to 8, 16, 32 and so on."""
    n, k = packed.shape
    rows = 1 if m == 1 else max(8, power(m))
    return " ".join((f"{packed.format.name}.{packed.storage}", packed.params_text, f"{n}x{k}", f"M={rows}", str(dtype)[6:]))


@cache
def tuned_file(device: torch.device) -> Path:
    """The path of a device's tuned candidates: in $QDSL_CACHE, or in qdsl below the user's cache folder."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    return cache_folder() / f"tuned-{name.lower()}.json"


@cache
def read_tuned(path: Path) -> dict[str, Any]:
    """The tuned candidates in a file; empty if it is missing or invalid."""
    try:
        choices = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}


def forget() -> None:
    """Forget the files of tuned candidates, so that the next launch reads them again."""
    read_tuned.cache_clear()
    tuned_file.cache_clear()


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether matrix units take E4M3; without a GPU, as on an H100."""
    return device.type != "cuda" or bool(torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9))


def converts_fp8(device: torch.device) -> bool:
    """Whether an instruction converts E4M3: from compute capability 8.9 on, or 9 if assumed."""
    if device.type != "cuda":
        return _assumed.capability >= 9
    return bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (8, 9)
