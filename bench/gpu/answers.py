"""Measures properties of the device that the design assumes; each answer has numbers and a sentence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.gpu import clock, machine, probes
from bench.gpu.ahead import Ahead, Job
from bench.gpu.budget import Part
from bench.gpu.device import DeviceInfo, clock_rate, launches_for
from bench.gpu.report import say
from bench.gpu.weights import DTYPES, Weight, clones, every, large
from bench.weights import format_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch, plan
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.libraries.call import Call

Answer = dict[str, Any]
SCHEDULERS = 4                                                   # of a multiprocessor
TRIPS = 400                                                      # of the loops; a launch takes some tenths of a millisecond
ROUNDS = 5
SPLITS = (1, 2, 4, 8)                                            # programs that share K
LEAD = "q4_0.planar"                                             # whose kernel for one row is asked about
GROUPED = "int_group.planar"                                     # with 4 bits and groups of 128: whose kernel for many rows is


@dataclass(frozen=True)
class Asked:
    """Where questions are asked."""

    info: DeviceInfo
    ahead: Ahead


def run(asked: Asked, part: Part) -> tuple[list[Answer], list[str]]:
    """Answers in order of value while there is time, and what was not asked."""
    answers: list[Answer] = []
    left_out: list[str] = []
    for job in jobs():
        asked.ahead.wait(job, part.left)
    for question, ask in QUESTIONS.items():
        if not part.allows(1.0):
            left_out.append(f"question {question}, {ask.__name__.replace('_', ' ')}: no time")
            continue
        try:
            answer = {"question": question, "what": (ask.__doc__ or "").split("\n")[0].rstrip("."), **ask(asked)}
        except Exception as error:                               # one that fails keeps no other from being asked
            answer = {"question": question, "what": (ask.__doc__ or "").split("\n")[0].rstrip("."),
                      "answer": f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
            torch.cuda.synchronize()                             # a device that is lost ends the run here
        answers.append(answer)
        say(f"answer {question}: {answer['answer']}")
    return answers, left_out


def jobs() -> list[Job]:
    """All that is launched here, to be compiled ahead."""
    return [probes.Probes(), *_launched()]


def _launched() -> list[probes.Launched]:
    return [probes.Launched(weight((4096, 4096)), 1, x, warps=probes.WARPS_ALONG_K) for x in ("bf16", "f16")] + [
        probes.Launched(weight((16896, 8192), GROUPED), rows, "bf16", stages=STAGED) for rows in (16, 64)]


STAGED = ((2, 1), (3, 1), (4, 1), (3, 2))                        # STAGES and R


def weight(shape: tuple[int, int], name: str = LEAD) -> Weight:
    """A format's storage at its default parameters."""
    return next(candidate for candidate in every(shape) if f"{candidate.name}.{candidate.storage}" == name)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _under_load(call: Call, seconds: float) -> float | None:
    """The clock in the middle of some 50 ms of a launch's replays, None where the driver does not say."""
    clock_rate()                                                 # the first time it has to be found
    for _ in range(max(2, int(0.05 / seconds))):
        call.run()
    rate = clock_rate()
    torch.cuda.synchronize()
    return rate


def subnormals(asked: Asked) -> Answer:
    """Are products of float16 and bfloat16 subnormals with whole numbers exact on matrix units."""
    generator = torch.Generator().manual_seed(0)
    wrong: dict[str, int] = {}
    for (unit, (m, n, k, _)), (dtype, numbers) in itertools.product(probes.MATRIX_UNITS.items(), probes.SUBNORMAL.items()):
        title = f"{unit} {str(dtype)[6:]}"
        wrong[title] = 0
        for _ in range(20):
            codes = torch.randint(0, 1 << numbers.bits, (m, k), generator=generator, dtype=torch.int16)
            factors = torch.randint(-15, 16, (k, n), generator=generator)
            out = torch.empty(m, n, device="cuda")
            probes.multiply_call(unit, dtype, "cuda", codes.cuda(), (factors * numbers.factor).to(dtype).cuda(), out).run()
            wanted = (codes.double() @ factors.double()) * (numbers.unit * numbers.factor)
            wrong[title] += int((out.cpu().double() != wanted).sum())
    exact = not any(wrong.values())
    return {"values": {"wrong elements": wrong}, "answer": "exact, by mma.sync and by wgmma" if exact else f"not exact: {wrong}"}


def conversions(asked: Asked) -> Answer:
    """How many numbers a multiprocessor converts in a cycle.

    Each is made by a multiply-add and put away by an exclusive or: 'none' is the loop without a conversion, and a conversion
    whose figure is near to it is not what limits its loop.
    """
    programs = probes.PROGRAMS * asked.info.multiprocessors
    values: dict[str, Any] = {}
    for name in probes.CONVERSIONS:
        call = probes.convert_call(name, programs, TRIPS, "cuda")
        seconds = clock.seconds([call.run], ROUNDS)
        rate = _under_load(call, seconds)
        count = 1024 * programs * TRIPS * probes.PER_TRIP
        per_second = count / seconds / asked.info.multiprocessors
        values[name] = {"per multiprocessor and ns": _short(per_second / 1e9), "clock GHz": rate and _short(rate / 1e9),
                        "per multiprocessor and cycle": rate and _short(per_second / rate)}
    key = "per multiprocessor and cycle"
    shown = ", ".join(f"{name} {row[key] if row[key] else '?'}" for name, row in values.items())
    return {"values": values, "answer": f"conversions per multiprocessor and cycle: {shown}"}


def products(asked: Asked) -> Answer:
    """How many cycles a scheduler takes for an mma.sync m16n8k16, with one useful column and with eight."""
    programs = probes.PROGRAMS * asked.info.multiprocessors
    values: dict[str, Any] = {}
    for columns in (1, 8):
        call = probes.matrix_call(columns, programs, TRIPS * 8, "cuda")
        seconds = clock.seconds([call.run], ROUNDS)
        rate = _under_load(call, seconds)
        # Products of a scheduler: 16 in a trip of the loop, and 4 warps in a program.
        product_seconds = seconds / (TRIPS * 8 * 16 * 4 * probes.PROGRAMS / SCHEDULERS)
        values[f"{columns} columns"] = {"ns": _short(product_seconds * 1e9), "clock GHz": rate and _short(rate / 1e9),
                                        "cycles": rate and _short(product_seconds * rate)}
    shown = ", ".join(f"{name} {row['cycles'] or '?'}" for name, row in values.items())
    return {"values": values, "answer": f"cycles per mma.sync m16n8k16 and scheduler: {shown}"}


def patterns(asked: Asked) -> Answer:
    """How fast 8 rows x 64 bytes are read by a warp's load, beside pieces of 1 KB that lie together."""
    rows, words = 28672, 1024                                    # the codes of a 4-bit weight [28672, 8192]
    count = clock.copies(rows * words * 4, asked.info.l2)
    data = [torch.randint(-2 ** 31, 2 ** 31 - 1, (rows, words), dtype=torch.int32, device="cuda") for _ in range(count)]
    graphs = [clock.Graph([probes.read_call(weight, tiled).run for weight in data]) for tiled in (False, True)]
    medians = [median(samples) for samples in clock.sides(graphs, ROUNDS)]
    apart, together = (rows * words * 4 / seconds / 1e9 for seconds in medians)
    return {"values": {"8 rows x 64 B GB/s": _short(apart), "1 KB GB/s": _short(together)},
            "answer": f"rows apart {apart:.0f} GB/s, 1 KB together {together:.0f} GB/s, {apart / together:.2f} x"}


def warps(asked: Asked) -> Answer:
    """How many warps should share K in the kernel for one row, 4096 x 4096 at 4 bits."""
    values: dict[str, float] = {}
    for x in ("bf16", "f16"):
        calls, chosen = _row_calls(x, asked)
        graphs = [clock.Graph([probes.along_k(call, share).run for call in calls]) for share in probes.WARPS_ALONG_K]
        for share, samples in zip(probes.WARPS_ALONG_K, clock.sides(graphs, ROUNDS), strict=True):
            values[f"{x} WK {share}{' (chosen)' * (share == chosen)} us"] = _short(median(samples) * 1e6)
    return {"values": values, "answer": ", ".join(f"{name[:-3]} {time_us} us" for name, time_us in values.items())}


def _row_calls(x: str, asked: Asked) -> tuple[list[Call], int]:
    """Launches for one row on copies of the weight, and how many warps the runtime has chosen."""
    packed = large(weight((4096, 4096)), "cuda")
    vector = torch.randn(1, 4096, device="cuda").to(DTYPES[x])
    calls = [call for copy in clones(packed, clock.copies(packed.nbytes, asked.info.l2))
             for call in _calls("gemv", vector, copy, torch.empty(1, 4096, dtype=DTYPES[x], device="cuda"))]
    return calls, int(calls[0].constants["WK"])


def _calls(kind: str, x: torch.Tensor, packed: PackedWeight, out: torch.Tensor) -> list[Call]:
    """The launches of a kernel in its first configuration."""
    legal = plan.candidates(packed, x.shape[0], x.dtype, x.device)
    candidate = next(choice for choice in legal if choice.kind == kind)
    return list(launch.linear_calls(x, packed, None, out, candidate=candidate))


def overlap(asked: Asked) -> Answer:
    """Does one program's matrix work hide another's, in the kernel for many rows, 4 bits, K = 8192.

    Twice the rows of w are twice the programs: with the work of both hidden the time stays, with none it doubles.
    """
    values: dict[str, float] = {}
    full = 64 * asked.info.multiprocessors
    if 2 * full % 256:
        return {"values": {}, "answer": f"not asked: {asked.info.multiprocessors} multiprocessors give no whole weight"}
    packed = large(weight((2 * full, 8192), GROUPED), "cuda")
    for rows in (16, 64):
        graphs, names = [], []
        x = torch.randn(rows, 8192, dtype=torch.bfloat16, device="cuda")
        for per, taken in ((1, full), (2, 2 * full)):
            part = packed.cut("N", 0, taken)
            out = torch.empty(rows, taken, dtype=torch.bfloat16, device="cuda")
            copies = clones(part, clock.copies(part.nbytes, asked.info.l2))
            calls = [call for copy in copies for call in _calls("tile_gemm", x, copy, out)]
            for stages, r in STAGED:
                if r == 1 or per == 2:                           # two tiles of 64 rows in a program: again one per multiprocessor
                    graphs.append(clock.Graph([probes.staged(call, stages, r).run for call in calls]))
                    names.append(f"M {rows}, {per * full} rows of w, STAGES {stages}, R {r} us")
        for name, samples in zip(names, clock.sides(graphs, ROUNDS), strict=True):
            values[name] = _short(median(samples) * 1e6)
    ratios = [f"M {rows} STAGES {stages}: {values[f'M {rows}, {2 * full} rows of w, STAGES {stages}, R 1 us'] / one:.2f} x"
              for rows in (16, 64) for stages, r in STAGED if r == 1
              for one in [values[f"M {rows}, {full} rows of w, STAGES {stages}, R 1 us"]]]
    return {"values": values, "answer": f"two programs per multiprocessor take, of one's time, {', '.join(ratios)}"}


def parts(asked: Asked) -> Answer:
    """How many programs should share K in the kernel for many rows, 4096 x 4096 at 4 bits."""
    packed = large(weight((4096, 4096), GROUPED), "cuda")
    copies = clones(packed, clock.copies(packed.nbytes, asked.info.l2))
    values: dict[str, float] = {}
    for rows in (16, 64):
        x, out = (torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        chosen = plan.fused_candidate(packed, rows, x.dtype, x.device)
        rule = next(candidate for candidate in plan.candidates(packed, rows, x.dtype, x.device) if candidate.kind == "tile_gemm")
        ways = [chosen, *(Candidate("tile_gemm", {**rule.config, "SPLIT": split}) for split in SPLITS)]
        graphs = [clock.Graph([call.run for copy in copies for call in launch.linear_calls(x, copy, None, out, candidate=way)])
                  for way in ways]
        names = [f"M {rows}, {chosen.kind} as chosen us", *(f"M {rows}, SPLIT {split} us" for split in SPLITS)]
        for name, samples in zip(names, clock.sides(graphs, ROUNDS), strict=True):
            values[name] = _short(median(samples) * 1e6)
    return {"values": values, "answer": ", ".join(f"{name[:-3]} {time_us} us" for name, time_us in values.items())}


def launches(asked: Asked) -> Answer:
    """What a launch costs: the same product eagerly, launched by hand, and in a CUDA graph."""
    packed = large(weight((4096, 4096)), "cuda")
    x = torch.randn(1, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, 4096, dtype=torch.bfloat16, device="cuda")
    [call] = launch.linear_calls(x, packed, None, out)
    dense = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    form = format_of(packed.format.name)
    values = {"linear, eager us": _eager(lambda: form.linear(x, packed)), "launch, eager us": _eager(call.run),
              "F.linear bf16, eager us": _eager(lambda: torch.nn.functional.linear(x, dense)),
              "launch, graph us": _short(clock.seconds([call.run], ROUNDS) * 1e6),
              "F.linear bf16, graph us": _short(clock.seconds([lambda: torch.nn.functional.linear(x, dense)], ROUNDS) * 1e6)}
    return {"values": values, "answer": ", ".join(f"{name[:-3]} {time_us} us" for name, time_us in values.items())
            + "; in graphs the weight stays in the L2 cache"}


def _eager(call: Callable[[], Any], count: int = 300) -> float:
    """Microseconds of a call, many in a row, none waited for before the last."""
    for _ in range(20):
        call()
    samples = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begun) / count * 1e6)
    return _short(median(samples))


def executed(asked: Asked) -> Answer:
    """How far are the PTX machine's results from this GPU's.

    A difference of sums is expected: how matrix units round inside of an instruction is not published for all of them.
    """
    with launches_for(asked.info):
        rows = list(machine.differences(f"sm_{asked.info.capability}", "cuda", lambda call: call.run()))
    nearest = {row.what: min(other.error for other in rows if other.what == row.what) for row in rows}
    worst = max(nearest, key=lambda what: nearest[what])
    return {"values": machine.table(rows),
            "answer": f"at most {nearest[worst]:.1e} of the sum of |x w| ({worst}); {sum(row.findings for row in rows)} findings"}


QUESTIONS: dict[int, Callable[[Asked], Answer]] = {1: subnormals, 5: warps, 4: patterns, 6: overlap, 2: conversions, 3: products,
                                                   7: launches, 9: parts, 8: executed}
