"""Checks the kernels on this device: every product against the torch reference in float64, and twice for equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.gpu import regimes
from bench.gpu.ahead import Ahead
from bench.gpu.budget import Part
from bench.gpu.plan import INVARIANT, Case, Check
from bench.gpu.report import say
from bench.gpu.weights import DTYPES, packed
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu import product as gpu_product
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.torch.linear import as_stored

COMPILE = 2.0                                                    # seconds per launch that was not compiled ahead, assumed
STUCK = 120.0                                                    # seconds for which a process that compiles is waited for


class DeviceLost(RuntimeError):
    """The device answers no more: an illegal access takes the whole context with it."""


@dataclass(frozen=True)
class Outcome:
    """Of a check.  worst: the largest error by its bound; at most 1 is right.  kernel: which served it."""

    weight: str
    check: str
    storage: str
    kernel: str
    worst: float
    wrong: str = ""


def bound(exact: Tensor, spread: Tensor, columns: int, dtype: torch.dtype, rounded: bool) -> Tensor:
    """How far a product in a dtype may lie from the exact one: rounded once, its sum of K terms in float32.

    spread: sum |x| |w|.  rounded: the weights were rounded to x's dtype before.
    """
    eps = torch.finfo(dtype).eps
    slack = columns * 2.0 ** -24 + (eps / 2 if rounded else 0.0)
    return exact.abs() * eps / 2 + spread * slack + torch.finfo(dtype).tiny


def worst(actual: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """The largest error by what is allowed; infinite where something is no number."""
    ratio = (actual.double() - exact).abs() / allowed
    return float(torch.where(actual.isfinite(), ratio, torch.inf).max()) if ratio.numel() else 0.0


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None, invariant: bool = False, is_tiled: bool = False) -> Tensor:
    """By the kernel for so many rows, in the launches of the runtime; decoded where there is none on a GPU."""
    x, weight = as_stored(x, weight)
    if not invariant and is_decoded(x, weight):
        return gpu_product.product_by(Candidate("decode"), x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    candidate = None if invariant else regimes.candidate(x, weight, is_tiled)
    for call in launch.linear_calls(x, weight, bias, out, invariant, candidate):
        call.run()
    return out


def is_decoded(x: Tensor, weight: PackedWeight) -> bool:
    """Whether a check decodes the weight: on a GPU, beyond the rows of fused kernels."""
    return x.device.type == "cuda" and regimes.is_decoded(x, weight)


class Examined:
    """A case's weight on the device and its exact value on the CPU."""

    def __init__(self, case: Case, device: torch.device) -> None:
        on_cpu = packed(case.weight, seed=sum(case.weight.shape))
        self.label = str(case.weight)
        self.reference: Tensor = on_cpu.format.dequantize(on_cpu, torch.float32)
        self.exact = self.reference.double()
        self.weight = on_cpu.to(device)
        self.device = device

    def run(self, check: Check) -> Outcome:
        if not check.rows:
            return self._dequantized(check)
        return self._invariant(check) if check.invariant else self._product(check)

    def _outcome(self, check: Check, kernel: str, worst: float, wrong: str) -> Outcome:
        return Outcome(self.label, str(check), f"{self.weight.format.name}.{self.weight.storage}", kernel, worst, wrong)

    def _dequantized(self, check: Check) -> Outcome:
        dtype = DTYPES[check.x]
        out = torch.empty(self.weight.shape, dtype=dtype, device=self.device)
        launch.dequantize(self.weight, out)
        same = torch.equal(out.cpu().view(torch.uint8), self.reference.to(dtype).view(torch.uint8))
        return self._outcome(check, "dequantize", 0.0 if same else float("inf"), "" if same else "other bits than the reference")

    def _x(self, rows: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return (torch.randn(rows, self.weight.shape[1], generator=generator) / 16).to(dtype).to(self.device)

    def _product(self, check: Check) -> Outcome:
        dtype, rows = DTYPES[check.x], check.rows
        x = self._x(rows, dtype)
        bias = (torch.randn(self.weight.shape[0], generator=torch.Generator().manual_seed(1)).to(dtype).to(self.device)
                if check.bias else None)
        result, again = (product(x, self.weight, bias, is_tiled=check.tiled) for _ in range(2))
        tiles = is_decoded(x, self.weight)
        kernel = "dequantize and matmul" if tiles else kernel_of(x, self.weight, bias, check.tiled)
        rounded = tiles or self.weight.layout.kernels.rounds_tables(x.dtype, self.weight.tensors)
        wide, added = x.cpu().double(), torch.zeros(1).double() if bias is None else bias.cpu().double()
        exact = wide @ self.exact.t() + added
        spread = wide.abs() @ self.exact.abs().t() + added.abs()
        ratio = worst(result.cpu(), exact, bound(exact, spread, self.weight.shape[1], dtype, rounded))
        wrong = "" if ratio <= 1 else f"{ratio:.3g} times the bound"
        if self.device.type == "cuda":                           # as a model calls it, by the plan, and launched prepared
            asked, prepared = (self.weight.format.linear(x, self.weight, bias) for _ in range(2))
            ratio = max(ratio, worst(prepared.cpu(), exact, bound(exact, spread, self.weight.shape[1], dtype, True)))
            again = again if torch.equal(asked, prepared) else prepared[:0]
        if not torch.equal(result, again):                        # where something is no number too
            wrong = f"{wrong}{', ' * bool(wrong)}other bits in a second run"
        return self._outcome(check, kernel, ratio, wrong)

    def _invariant(self, check: Check) -> Outcome:
        """A row's bits are its own: among others, among fewer, alone, and in another place."""
        x = self._x(max(INVARIANT), DTYPES[check.x])
        whole = product(x, self.weight, None, invariant=True)
        parts = [("alone", x[2:3], whole[2:3]), ("among three", x[2:5], whole[2:5]),
                 ("in another place", x.flip(0), whole.flip(0))]
        wrong = [what for what, rows, wanted in parts
                 if not torch.equal(product(rows.contiguous(), self.weight, None, invariant=True), wanted)]
        return self._outcome(check, "skinny", 0.0 if not wrong else float("inf"),
                             f"other bits {', '.join(wrong)}" if wrong else "")


def kernel_of(x: Tensor, weight: PackedWeight, bias: Tensor | None, is_tiled: bool = False) -> str:
    """What the kernel that serves a product is called: 'gemv', 'skinny', 'tile_gemm' or 'linear'."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device="meta")
    calls = launch.linear_calls(x, weight, bias, out, candidate=regimes.candidate(x, weight, is_tiled))
    names = dict.fromkeys(call.family for call in calls)
    return " and ".join(names)


def examine(case: Case, device: torch.device) -> Iterator[Outcome]:
    """All checks of a case.  Raises DeviceLost."""
    examined = Examined(case, device)
    for check in case.checks:
        try:
            yield examined.run(check)
        except Exception as error:                               # whatever a kernel does wrong is a result
            message = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            yield examined._outcome(check, "", float("inf"), message)
            _alive(device)


def _alive(device: torch.device) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            raise DeviceLost(str(error).splitlines()[0]) from error


@dataclass
class Checked:
    """What the checks came to, kept as it grows."""

    planned: int
    done: int
    outcomes: list[Outcome]
    left_out: list[str]
    ahead: str = ""

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.wrong]

    def data(self) -> dict[str, object]:
        """Failures in full; of the rest how many and how near to its bound, by storage and kernel."""
        by: dict[tuple[str, str], list[float]] = {}
        for outcome in self.outcomes:
            by.setdefault((outcome.storage, outcome.kernel), []).append(outcome.worst)
        return {"planned": self.planned, "done": self.done, "wrong": [finite(asdict(outcome)) for outcome in self.wrong],
                "by_kernel": [finite({"storage": storage, "kernel": kernel, "checks": len(errors), "worst": max(errors)})
                              for (storage, kernel), errors in sorted(by.items())],
                "compiled_ahead": self.ahead}


def finite(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity."""
    return {key: None if isinstance(value, float) and value == float("inf") else
            float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}


def run(cases: list[Case], left_out: list[str], ahead: Ahead, part: Part, device: torch.device, checked: Checked) -> None:
    """Check case by case while the part's time lasts; what is not reached is named.  Raises DeviceLost."""
    checked.left_out += left_out
    launches, seconds, missed = 0, 0.0, 0
    for place, case in enumerate(cases):
        if not part.allows():
            checked.left_out += [f"{len(cases) - place} weights, from {case.weight} on: no time"]
            ahead.drop(cases[place:])
            break
        job = ahead.wait(case, min(part.left, STUCK))
        if job is None and not part.allows(COMPILE * len(case.checks)):
            checked.left_out.append(f"{case.weight}: not compiled in time")
            continue
        launches, seconds, missed = (launches + (job.launches if job else 0), seconds + (job.seconds if job else 0.0),
                                     missed + (job is None))
        if job and job.error:
            say(f"compiling {case.weight}: {job.error}")
        for outcome in examine(case, device):
            checked.outcomes.append(outcome)
            checked.done += 1
            if outcome.wrong:
                say(f"WRONG {outcome.weight}, {outcome.check} ({outcome.kernel}): {outcome.wrong}")
        checked.ahead = f"{launches} launches in {seconds:.0f} s of all processes; {missed} weights not ahead"
        if place % 10 == 9 or place == len(cases) - 1:
            say(f"checks: {place + 1} of {len(cases)} weights, {checked.done} checks, {len(checked.wrong)} wrong")
