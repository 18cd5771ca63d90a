"""A platform of vllm-omni for CPUs, which vllm-omni itself lacks; an entry point names it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

MEMORY = 1 << 33                                                 # bytes, more than tiny pipelines need


class OmniCpu(OmniPlatform, CpuPlatform):
    """Runs diffusion pipelines on a CPU, with torch's attention."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "tests.support.omni_attention.Backend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return MEMORY

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return MEMORY, MEMORY

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        pass

    @classmethod
    def max_memory_allocated(cls) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls) -> int:
        return 0


def register() -> str:
    """The class that vllm-omni uses as its platform."""
    return f"{__name__}.OmniCpu"


ENTRY_POINT = f"[vllm_omni.platform_plugins]\ncpu = {__name__}:register\n"
