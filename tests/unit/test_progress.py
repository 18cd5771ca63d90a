"""Progress: the time that is left, of work whose kinds have their own speeds, and what a terminal and a log show of it."""

from __future__ import annotations

import heapq
import io
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from qdsl.cli import progress as shown
from qdsl.cli.progress import Meter, amount, duration, progress, sized
from qdsl.host import progress as counted
from qdsl.host.processes import results
from qdsl.host.progress import COPY, FINISHED, Counters, Row

GB = 10**9
Steps = Sequence[tuple[str, int, float]]                         # kind, bytes, seconds


def simulated(steps: Steps, jobs: int, before: float) -> Iterator[tuple[float, float, float]]:
    """(time, seconds left as estimated, as they are) at the end of each step, which `jobs` processes take in order.

    before: seconds until the processes have started.
    """
    amounts: dict[str, int] = {}
    for kind, nbytes, _ in steps:
        amounts[kind] = amounts.get(kind, 0) + nbytes
    counters = Counters(amounts)
    counters.jobs = jobs
    free = [before] * jobs
    ends = []
    for kind, nbytes, seconds in steps:
        start = heapq.heappop(free)
        heapq.heappush(free, start + seconds)
        ends.append((start + seconds, kind, nbytes, seconds))
    last = max(end for end, *_ in ends)
    for end, kind, nbytes, seconds in sorted(ends):
        counters.add(kind, Row(nbytes, seconds))
        left = counters.seconds_left
        yield end, -1.0 if left is None else left, last - end


def folder(rng: random.Random, pace: float) -> Steps:
    """A model that is quantized: an embedding, which is copied fast, then blocks, then a head."""
    layers = [("convert", nbytes, nbytes * pace * rng.uniform(0.8, 1.25)) for _ in range(40)
              for nbytes in (16 << 20, 4 << 20, 4 << 20, 16 << 20, 56 << 20, 56 << 20, 56 << 20)]
    return [(COPY, GB, 1.1), *layers, (COPY, GB, 1.0)]


def gguf(rng: random.Random, pace: float) -> Steps:
    """A GGUF file: an embedding in a slow type, blocks of two types in turn, norms that are copied, in chunks."""
    types = {"IQ3_S": 9 * pace, "Q4_K": 4 * pace, "Q6_K": pace}
    kinds = ["Q6_K"] * 100 + (["Q4_K"] * 20 + [COPY] + ["Q6_K"] * 6 + ["IQ3_S"] * 2) * 30
    return [(kind, 600_000, 600_000 * types.get(kind, 1e-10) * rng.uniform(0.7, 1.4)) for kind in kinds]


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("pace", [2e-9, 2e-8, 2e-7])
@pytest.mark.parametrize("work", [folder, gguf])
def test_the_time_left_is_right_within_a_factor_of_two_after_5_seconds(work: type, jobs: int, pace: float) -> None:
    """But for the last steps of the processes, and before every kind has run: an unseen kind is taken for a usual one."""
    rng = random.Random(repr((work, jobs, pace)))
    steps: Steps = work(rng, pace)
    kinds = {kind for kind, *_ in steps} - {COPY}
    unseen = sum(seconds for kind, _, seconds in steps[:130] if kind in kinds) / jobs
    judged = [(estimate, left) for now, estimate, left in simulated(steps, jobs, before=2.5)
              if now > max(5.0, 2.5 + unseen) and left > 1 + max(seconds for *_, seconds in steps)]
    assert judged or pace < 1e-8
    assert [pair for pair in judged if not 0.5 <= pair[0] / pair[1] <= 2] == []


def test_nothing_is_promised_before_work_is_measured_and_copies_do_not_promise_the_rest() -> None:
    counters = Counters({COPY: GB, "convert": GB})
    assert counters.seconds_left is None
    counters.add(COPY, Row(GB, 1.0))
    assert counters.seconds_left is None
    counters.add("convert", Row(GB // 100, 1.0))
    assert counters.seconds_left == pytest.approx(99, rel=0.02)


def test_what_an_interrupted_command_wrote_has_no_speed() -> None:
    counters = Counters({"Q4_K": 10 * GB})
    counters.add("Q4_K", Row(before=9 * GB))
    counters.add("Q4_K", Row(GB // 10, 10.0))
    assert counters.done == pytest.approx(9.1 * GB) and counters.seconds_left == pytest.approx(90)


def test_the_first_step_of_a_process_is_slow_and_does_not_count_where_others_are_measured() -> None:
    counters = Counters({"Q4_K": 1000})
    counters.add("Q4_K", Row(first=100, first_seconds=10.0))
    assert counters.seconds_left == pytest.approx(90)
    counters.add("Q4_K", Row(100, 1.0))
    assert counters.seconds_left == pytest.approx(8)


def work(nbytes: int) -> int:
    """A step that counts a half of its bytes before it ends."""
    with counted.step("convert", nbytes):
        counted.advance(nbytes // 2)
        assert counted.counters[-1].rows()["convert"].done >= nbytes // 2
    return nbytes


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_processes_count_inside_of_steps(jobs: int) -> None:
    with counted.counting({"convert": 40, COPY: 5}) as counters:
        assert list(results(work, [10, 20, 10], jobs)) == [10, 20, 10]
        assert counters.done == 40 and counters.jobs == jobs
    assert not counted.counters
    with counted.step("convert", 3):                             # a step outside of such a block only runs
        counted.advance(1)


def test_units() -> None:
    assert [sized(n) for n in (0, 999, 1_500, 25_100_000, 3 * GB)] == ["0 B", "999 B", "1.5 kB", "25.1 MB", "3.0 GB"]
    assert amount(1.2 * GB, 3 * GB) == "1.2 of 3.0 GB" and amount(5, 10) == "5 of 10 B"
    assert [duration(s) for s in (None, 0, 61, 3599, 3600, 100_000)] == ["-:--", "0:00", "1:01", "59:59", "1:00:00", "27:46:40"]


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Of 7200 MB, 100 done in 10 s."""
    clock = [100.0]
    monkeypatch.setattr(shown, "monotonic", lambda: clock[0])
    counters = Counters({"compare": 7200 * 10**6})
    meter = Meter(counters)
    clock[0] += 10
    meter.tell(100 * 10**6, "model.\x1blayers")
    return meter


def test_work_that_only_tells_its_bytes_is_measured_by_the_clock(meter: Meter) -> None:
    assert meter.line() == "1 %, 0.1 of 7.2 GB, 10.0 MB/s, 11:50 left"


def test_the_rate_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is drawn, every second or once a minute; the first hour was fast, and does not count for ever."""
    for pause in (1, 60):
        clock = [0.0]
        monkeypatch.setattr(shown, "monotonic", lambda clock=clock: clock[0])
        counters = Counters({"Q4_K": 10**15})
        meter = Meter(counters)
        counters.add("Q4_K", Row(before=9 * GB))
        for second in range(pause, 7200, pause):
            clock[0] = second
            counters.add("Q4_K", Row(pause * (10**9 if second <= 3600 else 10**6), pause))
            rate = meter.rate
        assert rate == pytest.approx(1e6)


def test_a_comparison_of_finished_work_says_so() -> None:
    counters = Counters({FINISHED: 200})
    counters.add(FINISHED, Row(100, 1.0))
    assert Meter(counters).line().startswith("comparing finished work with checksums: 50 %, 100 of 200 B, ")


def test_no_terminal_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(shown, "MINUTE", 0.05)
    with progress({"check": 100}) as tell:
        tell(50, "a")
        while log.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = log.getvalue().splitlines()
    assert all(re.fullmatch(r"50 %, 50 of 100 B, \d+ B/s, 0:0\d left|50 %, 50 of 100 B, \d.* left", line) for line in lines)
    monkeypatch.setattr(shown, "MINUTE", 60.0)
    with progress({"check": 100}) as tell:
        tell(100, "b")
    assert log.getvalue().splitlines() == lines


def test_a_terminal_gets_a_bar_with_nothing_that_it_would_obey(monkeypatch: pytest.MonkeyPatch, meter: Meter) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    with shown._bar(meter):
        pass
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert all(part in text for part in ("1 %", "0.1 of 7.2 GB", "10.0 MB/s", "11:50 left", r"model.\x1blayers"))
    assert "\x1b" not in text and max(map(len, re.split("[\r\n]", text))) <= 80


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress({}) as tell:
        tell(0, "x")
