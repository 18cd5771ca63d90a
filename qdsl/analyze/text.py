"""Reports and predictions for people: a block of lines per kernel and architecture, a table of predicted shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qdsl.analyze.counts import Report
from qdsl.analyze.gpus import GPUS
from qdsl.analyze.pipes import PIPES
from qdsl.analyze.predict import REACHABLE, Prediction

HEADS = ["predicted for", "kernel of", "of bandwidth", "limited by", "headroom", "in flight", "warps", "us"]
LEGEND = f"""
Predicted, not measured.
of bandwidth: of the data sheet's, for every byte of weight, x and out moved once; at most {REACHABLE:.0%}.
headroom: the time in which these bytes could be moved, by the time in which the busiest pipe has done its work.
in flight: bytes that programs wait for at once, by those that the memory's latency asks for.
warps: at once on a multiprocessor, and their part of the most that it holds."""


def block(title: str, report: Report) -> Iterator[str]:
    """What was counted, in lines."""
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


def row(report: Report, prediction: Prediction) -> list[str]:
    """A prediction as texts for a table with HEADS."""
    return [GPUS[prediction.gpu].title, report.arch, f"{prediction.share:.0%}", prediction.limit, f"{prediction.headroom:.2f}",
            f"{prediction.in_flight:.2f}", f"{prediction.resident * report.warps} ({prediction.occupancy:.0%})",
            "-" if prediction.seconds is None else f"{prediction.seconds * 1e6:.1f}"]
