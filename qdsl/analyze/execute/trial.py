"""Executes a format's kernels on random weights: their errors, the checkers' findings, and the executed instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from qdsl.analyze import launches
from qdsl.analyze.counts import report
from qdsl.analyze.execute.machine import Finding, Options
from qdsl.analyze.execute.run_launch import Execution, execute
from qdsl.analyze.gpus import WARP, AnalyzeError, arch_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch.linear import as_stored

SHAPE = (256, 1024)
ALIKE = 0.02                                                     # static and executed counts agree up to this relative error


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the launches of one call.

    error: the largest, relative to sum |x w|; for dequantize relative to the largest weight, 0 if all bits are the reference's.
    None if only some programs ran.  ideal: bytes of the weight, x and out.  memory: as in Execution.

    instructions: executed by threads, per weight.  issued: issued by warps, as instructions of 32 threads, per weight.  counted:
    the static count of `qdsl analyze`, with the hot loop's iterations and everything else once.  sass: the same count of SASS.
    corrected: sass scaled by issued / counted.  None if only some programs ran, or if iterations depend on weights.
    """

    kind: str
    title: str
    arch: str
    kernels: tuple[str, ...]
    error: float | None
    findings: tuple[Finding, ...]
    ideal: int
    memory: Mapping[str, int]
    instructions: float
    issued: float
    counted: float | None
    sass: float | None
    corrected: float | None

    @property
    def is_right(self) -> bool:
        """Whether there are no findings and dequantize is exact; readers judge the error of linear themselves."""
        return not self.findings and (self.error is None or self.kind != "dequantize" or self.error == 0)


def run_trial(module: ModuleType, kind: str, arch: str, *, storage: str | None = None,
              params: Mapping[str, int | str] | None = None, shape: tuple[int, int] = SHAPE, rows: int = 1, x: str = "bf16",
              programs: Sequence[int] | None = None, options: Options | None = None) -> Trial:
    """Run the launches of `linear` or `dequantize` of a random weight for an architecture.

    programs: numbers of programs of each grid to run.  The weight is then zeros of any size, because untouched memory takes no
    space.  Raises AnalyzeError, FormatError, ExecutionError.
    """
    options = options or Options(counts=True)
    packed = _random_weight(module, storage, dict(params or {}), shape, zeros=programs is not None)
    n, k = packed.shape
    out = torch.empty(launches.out_shape(packed, kind, rows), dtype=launches.TYPES[x], device="cpu")
    if programs is None:
        out.fill_(torch.nan)
    activation = _random((rows, k), 1).to(out.dtype)
    stored, weight = as_stored(activation, packed) if kind == "linear" else (activation, packed)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        calls = launches.calls_on(weight, kind, stored, out)
    executions = [execute(call, arch, outputs=(out,) if call is calls[-1] and programs is None else (), programs=programs,
                          options=options) for call in calls]
    memory: Counter[str] = sum((Counter(execution.memory) for execution in executions), Counter())
    moved = sum(tensor.nbytes for tensor in (*packed.tensors.values(), out, *(() if kind == "dequantize" else (activation,))))
    issued = sum(execution.issued for execution in executions) / (n * k)
    counted, sass = _static_instructions_per_weight(calls, executions, arch, n * k) if programs is None else (None, None)
    return Trial(kind=kind, title=launches.title(packed, kind, rows, x), arch=arch,
                 kernels=tuple(execution.name for execution in executions),
                 error=_relative_error(packed, kind, activation, out) if programs is None else None,
                 findings=tuple(finding for execution in executions for finding in execution.findings),
                 ideal=moved, memory=dict(memory), instructions=sum(execution.instructions for execution in executions) / (n * k),
                 issued=issued, counted=counted, sass=sass, corrected=sass * issued / counted if sass and counted else None)


def _static_instructions_per_weight(calls: Sequence[Call], executions: Sequence[Execution], arch: str, weights: int,
                                    ) -> tuple[float, float] | tuple[None, None]:
    """Instructions per weight of PTX and SASS by the static count; none if it is not possible."""
    try:
        reports = [report(call, arch) for call in calls]
    except AnalyzeError:                                         # trips that depend on weights
        return None, None
    ptx = sum(execution.program.instructions_per_thread(report.trips * report.unroll) * WARP * report.warps * report.programs
              for execution, report in zip(executions, reports, strict=True))
    return ptx / weights, sum(report.whole * report.weights * report.programs for report in reports) / weights


def _random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def _random_weight(module: ModuleType, storage: str | None, params: dict[str, int | str], shape: tuple[int, int],
                   zeros: bool) -> PackedWeight:
    if zeros:
        packed: PackedWeight = module.FORMAT.empty(shape, storage, "cpu", (), **module.FORMAT.complete(params))
        return packed
    if not hasattr(module, "quantize"):
        raise AnalyzeError(f"{module.SPEC.name} says not how weights are quantized, so that there are none to execute with")
    packed = module.quantize(_random(shape, 0), **params)
    if storage in (None, packed.storage):
        return packed
    converted: PackedWeight = module.planar(packed, larger=True) if storage == "planar" else module.convert(packed, storage)
    return converted


def _relative_error(packed: PackedWeight, kind: str, x: Tensor, out: Tensor) -> float:
    if kind == "dequantize":
        weight = packed.format.dequantize(packed, out.dtype)
        same = (out == weight) | (out.isnan() & weight.isnan())
        return 0.0 if bool(same.all()) else ((out.double() - weight.double()).abs().max() / weight.double().abs().max()).item()
    weight = packed.format.dequantize(packed, torch.float32).double()
    exact, spread = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    return ((out.double() - exact).abs() / spread).max().item()


def trial_lines(trial: Trial) -> Iterator[str]:
    counts = Counter(trial.memory)
    yield f"{trial.title}, {trial.arch}: {', '.join(trial.kernels)}"
    if trial.error is not None:
        exact = "every bit is the reference's" if trial.error == 0 else f"{trial.error:.1e}"
        yield f"  error         {exact}{'' if trial.kind == 'dequantize' else ' of the sum of |x w|, at most'}"
    yield f"  findings      {len(trial.findings) or 'none'}"
    yield from (f"    {finding}" for finding in trial.findings)
    if trial.error is not None:
        moved = counts["load bytes"] + counts["store bytes"]
        yield f"  instructions  {trial.instructions:.2f} of PTX per weight, executed by threads"
        yield from _static_count_lines(trial)
        yield f"  memory        {moved} bytes loaded and stored, {moved / trial.ideal:.2f} of weight, x and out"
    for what in ("load", "store"):
        if requests := counts[f"{what} requests"]:
            yield f"  {what + 's':<13} {counts[f'{what} sectors'] / requests:.1f} sectors of 32 bytes per request of a warp"
    for what in ("shared load", "shared store"):
        if ideal := counts[f"{what} ideal passes"]:
            yield f"  {what + 's':<13} {counts[f'{what} passes'] / ideal:.2f} of the passes without bank conflicts"


def _static_count_lines(trial: Trial) -> Iterator[str]:
    """The static count next to the issued instructions."""
    if trial.counted is None:
        yield f"  issued        {trial.issued:.2f} of PTX per weight; no static count, since trips depend on the weights"
        return
    yield (f"  issued        {trial.issued:.2f} of PTX per weight, {trial.counted:.2f} by the static count; "
           f"SASS {trial.sass:.2f} by that count")
    if abs(trial.issued / trial.counted - 1) > ALIKE:
        yield f"                they differ by {trial.issued / trial.counted - 1:+.0%}: SASS {trial.corrected:.2f}, corrected"
