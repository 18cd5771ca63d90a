"""Reports and predictions as text: a block of lines per kernel and architecture, and a table of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qdsl.analyze.counts import Report
from qdsl.analyze.gpus import GPUS
from qdsl.analyze.pipes import PIPES
from qdsl.analyze.predict import Prediction
from qdsl.runtime.gpu.costs import EXPOSED, REACHABLE

HEADS = ["predicted for", "kernel of", "us", "of bandwidth", "limited by", "start", "memory", "L2", "busy", "chain", "warps"]
LEGEND = f"""
Predicted, not measured.
us: start, the longer of memory and of L2, busy and chain after the first loads, and {EXPOSED:.0%} of the shorter.
of bandwidth: of the data sheet's, for every byte of weight, x and out moved once; at most {REACHABLE:.0%}.
start: the launch, and until the first loads have arrived.  memory, L2: until all bytes have been moved.
busy: until the busiest pipe has done its work.  chain: until programs have waited for all their loads and results.
warps: at once on a multiprocessor, and their part of the most that it holds."""


def report_lines(title: str, report: Report) -> Iterator[str]:
    yield f"{title}, {report.arch}: {report.kernel}"
    yield (f"  resources   {report.registers} registers, {report.spills} spills, {report.stack} B stack, {report.shared_bytes} B "
           f"shared, {report.warps} warps, {report.programs} programs of {report.weights} weights")
    if report.has_loop:
        twice = f" ({report.unroll} of the source's)" if report.unroll > 1 else ""
        yield (f"  hot loop    {report.hot:.2f} instructions per weight, {report.hot_weights} weights in a trip{twice}, "
               f"{report.trips} trips")
        yield f"              {_listed(report.hot_pipes)}"
    yield f"  kernel      {report.whole:.2f} instructions per weight{'' if report.has_loop else ', no loop'}"
    yield f"              {_listed(report.whole_pipes)}"
    yield f"  loads       {', '.join(f'{opcode} x{count}' for opcode, count in report.loads.items()) or 'none'}"
    yield f"  tensor      {', '.join(f'{opcode} x{count}' for opcode, count in report.tensor.items()) or 'none'}"


def _listed(pipes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {pipes[name]:.2f}" for name in PIPES if pipes.get(name))


def prediction_row(report: Report, prediction: Prediction) -> list[str]:
    """A prediction as texts for a table with HEADS."""
    parts = (prediction.start, prediction.memory, prediction.cached, prediction.busy, prediction.chain)
    return [GPUS[prediction.gpu].title, report.arch, "-" if prediction.seconds is None else _microseconds(prediction.seconds),
            f"{prediction.share:.0%}", prediction.limit, *map(_microseconds, parts),
            f"{prediction.resident * report.warps} ({prediction.occupancy:.0%})"]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
