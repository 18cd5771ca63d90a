"""Ratios of what the sides took, with the goals: figures in which rounds count that nobody disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.figure import Figure
from bench.generate.runs import Job, Sample, Samples

Goals = dict[tuple[str, int], float]                             # by work and threads


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast one side is as another, with goals."""

    side: str
    peer: str
    goals: Goals


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured of a model.  decode, prompts: tokens of the jobs.  scaling: the goal of two threads to one.

    bandwidth: the goal of the bytes per second of products to those of llama.cpp's whole token.
    """

    name: str
    decode: int
    prompts: tuple[int, ...]
    ratios: tuple[Ratio, ...]
    scaling: float | None
    bandwidth: float

    def jobs(self, threads: Sequence[int]) -> list[Job]:
        """All jobs, those of the same work one after the other."""
        works = [("decode", self.decode), *(("prompt", tokens) for tokens in self.prompts)]
        return [Job(work, tokens, count) for work, tokens in works for count in threads]


TO_DENSE: Goals = {("prompt 128", 1): 1.0, ("prompt 128", 2): 1.0, ("prompt 512", 1): 1.0, ("prompt 512", 2): 1.0}
SMOLLM2 = Model("SmolLM2-135M Q4_1", 32, (128, 512), (
    Ratio("exact", "llama.cpp", {("decode", 1): 0.4, ("decode", 2): 0.25}),
    Ratio("int8", "llama.cpp", {}),
    Ratio("exact", "dense", {("decode", 1): 2.5, ("decode", 2): 2.2, **TO_DENSE}),
    Ratio("floor", "llama.cpp", {})), None, 0.7)
LLAMA = Model("Llama 1.17 B Q4_0", 12, (128,), (
    Ratio("exact", "llama.cpp", {("decode", 1): 0.85, ("decode", 2): 0.7, ("prompt 128", 1): 1.2, ("prompt 128", 2): 1.0}),
    Ratio("int8", "llama.cpp", {("decode", 1): 0.95, ("decode", 2): 0.85}),
    Ratio("exact", "dense", TO_DENSE),
    Ratio("floor", "llama.cpp", {})), 1.5, 1.0)


def figures(model: Model, samples: Samples) -> Iterator[Figure]:
    """The table's rows of a model."""
    jobs = list(dict.fromkeys(job for _, job in samples))
    for job in jobs:
        what = f"{model.name}, {job.name}, {job.threads} thread{'s' if job.threads > 1 else ''}"
        for ratio in model.ratios:
            if (ours := samples.get((ratio.side, job))) and (theirs := samples.get((ratio.peer, job))):
                yield _figure(f"{what}, {ratio.side} to {ratio.peer}", (ours, theirs), lambda ours, theirs: theirs / ours,
                              ratio.goals.get((job.name, job.threads)), _note(ours, theirs))
        if job.work == "decode" and all((side, job) in samples for side in ("exact", "floor", "llama.cpp")):
            sides = tuple(samples[side, job] for side in ("exact", "floor", "llama.cpp"))
            yield _figure(f"{what}, bytes per second of exact products to llama.cpp's token", sides,
                          lambda ours, floor, theirs: theirs / max(ours - floor, 1e-9),
                          model.bandwidth if job.threads == 1 else None, "exact less floor")
    for side in ("exact", "int8", "llama.cpp"):
        yield from _scaling(model, side, samples)


def _scaling(model: Model, side: str, samples: Samples) -> Iterator[Figure]:
    """Two threads to one, of a side's decoding."""
    one, two = (samples.get((side, Job("decode", model.decode, threads))) for threads in (1, 2))
    if one and two:
        yield _figure(f"{model.name}, decode, {side}, two threads to one", (one, two), lambda one, two: one / two,
                      model.scaling if side == "exact" else None, "")


def _figure(what: str, sides: Sequence[Sequence[Sample]], value: Callable[..., float], goal: float | None, note: str) -> Figure:
    """A figure of the rounds that nobody disturbed; in doubt, and of all rounds, where these are not more than half."""
    rounds = list(zip(*sides, strict=True))
    quiet = [samples for samples in rounds if all(sample.is_quiet for sample in samples)]
    doubt = "" if 2 * len(quiet) > len(rounds) else f"no conclusion: {len(quiet)} of {len(rounds)} rounds undisturbed"
    counted = rounds if doubt else quiet
    return Figure(what, "x", [value(*(sample.wall for sample in samples)) for samples in counted], goal, note=note, doubt=doubt)


def _note(ours: Sequence[Sample], theirs: Sequence[Sample]) -> str:
    """Both speeds, and the ratio of CPU times, which others disturb less."""
    ratio = median(b.cpu / a.cpu for a, b in zip(ours, theirs, strict=True))
    return f"{_speed(ours)} to {_speed(theirs)}: by CPU time {ratio:.2f} x"


def _speed(samples: Sequence[Sample]) -> str:
    """Tokens per second, and CPU milliseconds per token, by medians."""
    wall, cpu = (median(getattr(sample, name) for sample in samples) for name in ("wall", "cpu"))
    return f"{1e3 / wall:.1f} tok/s, {cpu:.1f} CPU ms"
