"""Times launches inside CUDA graphs, over enough copies of a weight that none is in the L2 cache when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from bench.timing import interleave

ROTATED = 2                                                      # times the L2 cache, that the copies together exceed
LAUNCHES = 20                                                    # in a graph at least, so that its own launch is a small part
SAMPLE = 3e-3                                                    # seconds of a sample at least, replays one after the other


def copies(nbytes: int, l2: int) -> int:
    """How many copies exceed ROTATED times the L2 cache; two at least."""
    return max(2, ROTATED * l2 // max(1, nbytes) + 1)


class Graph:
    """Launches captured once: `calls` in order, each on a copy of its own, several times over.

    The calls' results are dropped; each is made once before, on another stream, so that nothing is compiled while capturing.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], launches: int = LAUNCHES) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        rounds = -(-launches // len(calls))
        self.launches = rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        self.graph.replay()
        once = self._timed(1)
        self.replays = replays(once)

    def _timed(self, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def seconds(self) -> float:
        """Of a launch, the mean over some replays."""
        return self._timed(self.replays) / self.replays / self.launches


def replays(once: float) -> int:
    """How many replays of a graph that takes so long make a sample."""
    return max(1, min(50, round(SAMPLE / max(once, 1e-7))))


def sides(graphs: Sequence[Graph], rounds: int) -> list[list[float]]:
    """Seconds per launch of every graph, in turn."""
    return interleave([graph.seconds for graph in graphs], rounds)


def seconds(calls: Sequence[Callable[[], Any]], rounds: int) -> float:
    """The median time of a launch under a graph."""
    return median(sides([Graph(calls)], rounds)[0])


def copy_bandwidth(rounds: int, nbytes: int = 2 << 30) -> float:
    """Bytes per second of a plain copy from device to device, read and written both counted."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(1)
    out = torch.empty_like(source)
    return 2 * nbytes / seconds([lambda: out.copy_(source)] * 2, rounds)
