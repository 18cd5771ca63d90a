"""How long a launch is predicted to take on a GPU, and what share of its memory bandwidth it reaches.

The formula is runtime/gpu/costs.py's, on counts of this very kernel.  Left out: conflicts of shared memory, wide and scattered
accesses to the L1 cache, what the L2 cache still has of an earlier launch, and clocks below the boost clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from qdsl.analyze.counts import Report
from qdsl.analyze.gpus import AnalyzeError, Gpu, arch_of
from qdsl.runtime.gpu.costs import LAUNCH, Cost, launch_times


@dataclass(frozen=True, slots=True)
class Prediction:
    """A launch on one GPU.

    seconds: of the launch, predicted; None where it cannot run.  share: of the data sheet's bandwidth in that time.
    limit: the largest term: 'memory', 'L2', a pipe, 'chain', 'start', or that a program 'does not fit' on an SM.
    start: seconds of the launch and until the first loads have arrived.  memory, cached, busy, chain: seconds for which memory,
    the L2 cache and the busiest pipe work, and in which programs of an SM that do not run at once follow their dependences.
    resident: programs on an SM at once.  occupancy: their warps by the most that it holds.
    """

    gpu: str
    share: float
    limit: str
    seconds: float | None
    start: float
    memory: float
    cached: float
    busy: float
    chain: float
    resident: int
    occupancy: float


def predict(report: Report, gpu: Gpu) -> Prediction:
    """The time of a kernel that was compiled for the GPU's architecture.  Raises AnalyzeError."""
    if report.arch != gpu.arch:
        raise AnalyzeError(f"{gpu.title} runs kernels of {gpu.arch}, not of {report.arch}")
    arch = arch_of(gpu.arch)
    resident = arch.resident_programs(report.registers, report.shared_bytes, report.warps)
    if not resident:
        return Prediction(gpu.name, 0.0, "does not fit", None, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0)
    taken = launch_times(report_cost(report), report.programs, report.trips, report.traffic, report.work, gpu)
    limits = {"memory": taken.memory, "L2": taken.cached, busiest_pipe(report): taken.busy, "chain": taken.chain - taken.first,
              "start": LAUNCH + taken.first}
    limit = max(limits, key=lambda name: limits[name])
    return Prediction(gpu=gpu.name, share=report.traffic / (gpu.bandwidth * 1e9) / taken.seconds, limit=limit,
                      seconds=taken.seconds, start=LAUNCH + taken.first, memory=taken.memory, cached=taken.cached,
                      busy=taken.busy, chain=taken.chain, resident=resident, occupancy=resident * report.warps / arch.warps)


def busiest_pipe(report: Report) -> str:
    """The pipe that is busy for longest, or 'issue': the scheduler itself."""
    return max(report.cycles, key=lambda name: report.cycles[name])


def report_cost(report: Report) -> Cost:
    """A report as runtime/gpu/costs.py takes it: the cycles of the busiest pipe, of the loop and outside of it."""
    pipe = busiest_pipe(report)
    return Cost(report.registers, report.shared_bytes, report.warps, report.hot_weights,
                report.hot_cycles.get(pipe, 0.0), report.outside_cycles.get(pipe, 0.0),
                report.hot_chain.cycles, report.hot_chain.loads, report.outside_chain.cycles, report.outside_chain.loads)
