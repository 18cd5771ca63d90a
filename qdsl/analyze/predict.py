"""What share of a GPU's memory bandwidth a kernel is predicted to reach.

A bound, not a simulation.  The tensors of a launch are read or written once, from memory and not from the L2 cache; the pipe
that is busiest may take longer than that, and so may loads of which too few are under way.  Left out: dependencies between
instructions, conflicts of shared memory, wide accesses to the L1 cache, the time of the launch itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from qdsl.analyze.counts import Report
from qdsl.analyze.gpus import WARP, AnalyzeError, Gpu, arch_of

REACHABLE = 0.9                                                  # of the data sheet's bandwidth: a plain copy's share, rounded
LATENCY = 700e-9                                                 # seconds from a load to its data under traffic, assumed


@dataclass(frozen=True, slots=True)
class Prediction:
    """A launch on one GPU.

    share: of the data sheet's bandwidth, predicted.  limit: what holds it there: 'memory', 'latency', a pipe, or that a
    program 'does not fit' on a multiprocessor.  seconds: of the launch, predicted; None where it cannot run.
    headroom: time of the memory by time of the busiest pipe; above 1 the memory is slower.
    resident: programs on a multiprocessor at once.  occupancy: their warps by the most that it holds.
    in_flight: bytes of weights that all programs which run at once wait for, by those that the bandwidth asks for.
    """

    gpu: str
    share: float
    limit: str
    seconds: float | None
    headroom: float
    resident: int
    occupancy: float
    in_flight: float


def predict(report: Report, gpu: Gpu) -> Prediction:
    """The share of bandwidth of a kernel that was compiled for the GPU's architecture.  Raises AnalyzeError."""
    if report.arch != gpu.arch:
        raise AnalyzeError(f"{gpu.title} runs kernels of {gpu.arch}, not of {report.arch}")
    arch = arch_of(gpu.arch)
    resident = arch.resident(report.registers, report.shared_bytes, report.warps)
    memory = report.traffic / (gpu.bandwidth * 1e9)
    pipe = max(report.cycles, key=lambda name: report.cycles[name])
    headroom = memory / _pipe_seconds(report, gpu, pipe)
    in_flight = _in_flight(report, gpu, resident) / (gpu.bandwidth * 1e9 * LATENCY)
    if not resident:
        return Prediction(gpu.name, 0.0, "does not fit", None, headroom, resident, 0.0, 0.0)
    share, limit = min((REACHABLE, "memory"), (headroom, pipe), (in_flight, "latency"))
    return Prediction(gpu=gpu.name, share=share, limit=limit, seconds=memory / share, headroom=headroom, resident=resident,
                      occupancy=resident * report.warps / arch.warps, in_flight=in_flight)


def _pipe_seconds(report: Report, gpu: Gpu, pipe: str) -> float:
    """Seconds for which the busiest multiprocessor occupies a pipe: programs come whole."""
    program = report.cycles[pipe] / WARP * report.weights
    return -(-report.programs // gpu.multiprocessors) * gpu.multiprocessors * program / gpu.cycles


def _in_flight(report: Report, gpu: Gpu, resident: int) -> float:
    """Bytes that all programs which run at once have asked for, if each has asked for a trip's.

    Of a trip's loads those count that bring something new: no more than the trip's part of the launch's bytes.
    """
    new = report.traffic / report.programs * report.hot_weights / report.weights
    ahead = max(1, report.stages - 1) if report.copied else 1
    return min(report.programs, resident * gpu.multiprocessors) * min(new, report.hot_bytes) * ahead
