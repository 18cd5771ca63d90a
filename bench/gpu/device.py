"""What is known of the GPU, and launches made for it where it is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch

from qdsl.analyze.gpus import GPUS
from qdsl.runtime.gpu import configure
from qdsl.runtime.gpu.devices import of_device


@dataclass(frozen=True)
class Facts:
    """capability: 90 on Hopper.  l2: bytes of the L2 cache.  A process that has no GPU makes the same launches from these."""

    name: str
    capability: int
    multiprocessors: int
    l2: int


H200 = Facts("NVIDIA H200", 90, 132, 50 << 20)                   # for plans and predictions where there is no GPU


def facts() -> Facts:
    """Of the GPU that is there."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Facts(found.name, 10 * found.major + found.minor, found.multi_processor_count, int(found.L2_cache_size))


def launches_for(facts: Facts) -> AbstractContextManager[None]:
    """Tensors that are on no GPU are launched as on this one."""
    gpu = of_device(facts.name, divmod(facts.capability, 10), facts.multiprocessors)
    return configure.assumed(facts.capability // 10, facts.multiprocessors, gpu)


def clock_rate() -> float | None:
    """Cycles per second of the multiprocessors at this moment, as the driver says; None where it does not."""
    with suppress(Exception):                                    # needs NVIDIA's management library
        return torch.cuda.clock_rate() * 1e6
    return None


def product(name: str) -> str | None:
    """The name in qdsl.analyze of a GPU that torch calls so."""
    return next((key for key in GPUS if key in name.lower().replace(" ", "")), None)
