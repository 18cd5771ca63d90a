"""The GPU of this machine, and launches for a GPU that is not present."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch

from qdsl.analyze.gpus import GPUS
from qdsl.runtime.gpu import configure
from qdsl.runtime.gpu.devices import of_device


@dataclass(frozen=True)
class DeviceInfo:
    """capability: 90 on Hopper.  l2: bytes of the L2 cache.  A process that has no GPU makes the same launches from these."""

    name: str
    capability: int
    multiprocessors: int
    l2: int


H200 = DeviceInfo("NVIDIA H200", 90, 132, 50 << 20)                   # for plans and predictions where there is no GPU


def device_info() -> DeviceInfo:
    """The properties of the GPU that torch uses."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceInfo(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count,
                      int(properties.L2_cache_size))


def launches_for(info: DeviceInfo) -> AbstractContextManager[None]:
    """Tensors that are on no GPU are launched as on this one."""
    gpu = of_device(info.name, divmod(info.capability, 10), info.multiprocessors)
    return configure.assumed(info.capability // 10, info.multiprocessors, gpu)


def clock_rate() -> float | None:
    """Cycles per second of the multiprocessors at this moment, as the driver says; None where it does not."""
    with suppress(Exception):                                    # needs NVIDIA's management library
        return torch.cuda.clock_rate() * 1e6
    return None


def product(name: str) -> str | None:
    """The name in qdsl.analyze of a GPU that torch calls so."""
    return next((key for key in GPUS if key in name.lower().replace(" ", "")), None)
