"""A format's kernels executed on random weights: how exact they are, what the checkers find, what they really executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from qdsl.analyze.execute.launch import execute
from qdsl.analyze.execute.machine import Finding, Options
from qdsl.analyze.gpus import AnalyzeError, arch_of
from qdsl.analyze.launches import TYPES
from qdsl.runtime import PackedWeight, configure, launch, ops
from qdsl.runtime.call import Call

SHAPE = (256, 1024)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of the launches of one call.

    error: the largest, as a share of sum |x w|; for dequantize 0 where all bits are the reference's, else of the largest weight;
    None where only some programs ran.  instructions: that threads executed, per weight.  ideal: bytes of the weight, x and
    out.  memory: as in Execution.
    """

    title: str
    arch: str
    kernels: tuple[str, ...]
    error: float | None
    findings: tuple[Finding, ...]
    instructions: float
    ideal: int
    memory: Mapping[str, int]

    @property
    def is_right(self) -> bool:
        """Whether nothing was found, and dequantize is exact; the error of linear is the reader's to judge."""
        return not self.findings and (self.error is None or not self.title.startswith("dequantize") or self.error == 0)


def trial(module: ModuleType, kind: str, arch: str, *, storage: str | None = None, params: Mapping[str, int | str] | None = None,
          shape: tuple[int, int] = SHAPE, rows: int = 1, x: str = "bf16", programs: Sequence[int] | None = None,
          options: Options | None = None) -> Trial:
    """Run the launches of `linear` or `dequantize` of a random weight for an architecture.

    programs: the numbers of those of each grid that run; the weight is then zeros, and of any size, since memory that nobody
    touches is none.  Raises AnalyzeError, FormatError, ExecutionError.
    """
    options = options or Options(counts=True)
    packed = _weight(module, storage, dict(params or {}), shape, zeros=programs is not None)
    n, k = packed.shape
    out = torch.full((n, k) if kind == "dequantize" else (rows, n), torch.nan, dtype=TYPES[x]) if programs is None else \
        torch.empty((n, k) if kind == "dequantize" else (rows, n), dtype=TYPES[x])
    activation = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(TYPES[x])
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        calls = list(_calls(packed, kind, activation, out))
    executions = [execute(call, arch, outputs=(out,) if call is calls[-1] and programs is None else (), programs=programs,
                          options=options) for call in calls]
    memory: Counter[str] = sum((Counter(execution.memory) for execution in executions), Counter())
    moved = sum(tensor.nbytes for tensor in (*packed.tensors.values(), out, *(() if kind == "dequantize" else (activation,))))
    what = f"{kind} of {packed.format.name}.{packed.storage} [{n}, {k}]"
    title = f"{what} to {x}" if kind == "dequantize" else f"{what}, {rows} row{'s' * (rows > 1)} of x in {x}"
    return Trial(title, arch, tuple(execution.name for execution in executions),
                 _error(packed, kind, activation, out) if programs is None else None,
                 tuple(finding for execution in executions for finding in execution.findings),
                 sum(execution.instructions for execution in executions) / (n * k), moved, dict(memory))


def _weight(module: ModuleType, storage: str | None, params: dict[str, int | str], shape: tuple[int, int],
            zeros: bool) -> PackedWeight:
    if zeros:
        packed: PackedWeight = module.FORMAT.empty(shape, storage, "cpu", (), **module.FORMAT.complete(params))
        return packed
    if not hasattr(module, "quantize"):
        raise AnalyzeError(f"{module.SPEC.name} says not how weights are quantized, so that there are none to execute with")
    packed = module.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), **params)
    if storage in (None, packed.storage):
        return packed
    converted: PackedWeight = module.planar(packed) if storage == "planar" else module.convert(packed, storage)
    return converted


def _calls(packed: PackedWeight, kind: str, x: Tensor, out: Tensor) -> Iterator[Call]:
    if kind == "dequantize":
        yield from launch.dequantize_calls(packed, out)
    else:
        stored, weight = ops.as_stored(x, packed)
        yield from launch.linear_calls(stored, weight, None, out)


def _error(packed: PackedWeight, kind: str, x: Tensor, out: Tensor) -> float:
    if kind == "dequantize":
        weight = packed.format.dequantize(packed, out.dtype)
        same = (out == weight) | (out.isnan() & weight.isnan())
        return 0.0 if bool(same.all()) else ((out.double() - weight.double()).abs().max() / weight.double().abs().max()).item()
    weight = packed.format.dequantize(packed, torch.float32).double()
    exact, spread = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    return ((out.double() - exact).abs() / spread).max().item()


def block(trial: Trial) -> Iterator[str]:
    """What came of it, in lines for people."""
    counts = trial.memory
    yield f"{trial.title}, {trial.arch}: {', '.join(trial.kernels)}"
    if trial.error is not None:
        exact = "every bit is the reference's" if trial.error == 0 else f"{trial.error:.1e}"
        yield f"  error         {exact}{'' if trial.title.startswith('dequantize') else ' of the sum of |x w|, at most'}"
    yield f"  findings      {len(trial.findings) or 'none'}"
    yield from (f"    {finding}" for finding in trial.findings)
    if trial.error is not None:
        moved = counts["load bytes"] + counts["store bytes"]
        yield f"  instructions  {trial.instructions:.2f} per weight, executed by threads"
        yield f"  memory        {moved} bytes loaded and stored, {moved / trial.ideal:.2f} of weight, x and out"
    for what in ("load", "store"):
        if requests := counts[f"{what} requests"]:
            yield f"  {what + 's':<13} {counts[f'{what} sectors'] / requests:.1f} sectors of 32 bytes per request of a warp"
    for what in ("shared load", "shared store"):
        if ideal := counts[f"{what} ideal passes"]:
            yield f"  {what + 's':<13} {counts[f'{what} passes'] / ideal:.2f} of the passes without bank conflicts"
