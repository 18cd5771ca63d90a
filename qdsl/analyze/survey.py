"""Surveys a format's kernels: compiles every launch for several architectures, counts, and predicts times for several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qdsl.analyze.counts import Report, report
from qdsl.analyze.gpus import GPUS, AnalyzeError, Gpu, arch_of, gpu_of
from qdsl.analyze.launches import TYPES, product_calls, title
from qdsl.analyze.predict import Prediction, predict
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure

ARCHS = ("sm_80", "sm_90")                                       # shown by default
# Classes of major compute capability that may use different kernels.
CLASSES: tuple[Callable[[int], bool], ...] = (
    lambda digit: digit >= 8 and digit != 9, lambda digit: digit == 9, lambda digit: digit == 7, lambda digit: digit == 0)
REFUSALS = (AnalyzeError, FormatError)                           # errors of a survey about its arguments


@dataclass(frozen=True, slots=True)
class ExaminedLaunch:
    """A launch, with its kernel on each architecture, and predictions for each GPU."""

    title: str
    reports: dict[str, Report]
    predictions: list[Prediction]


def resolve_targets(archs: Sequence[str], gpus: Sequence[str]) -> tuple[list[str], list[Gpu]]:
    """Architectures to show and GPUs to predict for; each defaults to those of the other.  Raises AnalyzeError."""
    shown = [arch_of(name).name for name in archs]
    chosen = [gpu_of(name) for name in gpus]
    if shown and not chosen:
        chosen = [gpu for gpu in GPUS.values() if gpu.arch in shown]
    elif not shown:
        shown = [gpu.arch for gpu in chosen] or list(ARCHS)
        chosen = chosen or [gpu for gpu in GPUS.values() if arch_of(gpu.arch).capability >= 80]
    return list(dict.fromkeys(shown)), list(dict.fromkeys(chosen))


def survey(packed: PackedWeight, kinds: Iterable[str], rows: int, x: str, archs: Sequence[str], gpus: Sequence[Gpu],
           ) -> Iterator[ExaminedLaunch]:
    """Every launch of the kernels, on all architectures that are shown or that a GPU has.

    kinds: of launches.KERNELS.  rows: of x.  x: its dtype, one of launches.TYPES.  Raises AnalyzeError.
    """
    every = list(dict.fromkeys([*archs, *(gpu.arch for gpu in gpus)]))
    classes = {arch: arch_of(arch).capability // 10 for arch in every}
    alike = [[arch for arch in every if wanted(classes[arch])] for wanted in CLASSES]
    for kind in kinds:
        what = title(packed, kind, rows, x)
        for group in filter(None, alike):
            gpu = next((gpu for gpu in GPUS.values() if gpu.arch == group[0]), None)
            with configure.assumed(classes[group[0]], configure.MULTIPROCESSORS, gpu):
                launches = product_calls(packed, kind, rows, TYPES[x])
            if not launches:
                raise AnalyzeError(f"{what} launches no kernel")
            if not all(call.weights for call in launches):       # DF11's
                raise AnalyzeError(f"{what}: how often loops go round depends on the weights, so that nothing can be "
                                   "counted for each")
            for call in launches:
                reports = {arch: report(call, arch) for arch in group}
                yield ExaminedLaunch(what, reports, [predict(reports[g.arch], g) for g in gpus if g.arch in group])


def report_data(examined: ExaminedLaunch, listing: bool) -> Iterator[dict[str, Any]]:
    """Data for programs: a report with predictions per architecture; the hot loop's text if `listing`."""
    for arch, reports in examined.reports.items():
        row = {"what": examined.title, **asdict(reports),
               "predicted": [asdict(prediction) for prediction in examined.predictions if GPUS[prediction.gpu].arch == arch]}
        if not listing:
            del row["listing"]
        yield row
