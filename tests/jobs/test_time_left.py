"""The time left that a command shows, by a clock that only work moves: right within a factor of two soon after the start.

The clock counts the numbers that torch reads and writes, so that it is the same on every machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import qdsl
from qdsl.cli import app
from qdsl.encode.calibrated import descent, solve
from qdsl.encode.calibrated.hessian import Hessian
from qdsl.host import progress
from qdsl.host.progress import SOLVE, Counters, Row
from qdsl.jobs.compress import pieces
from qdsl.jobs.gguf import run
from qdsl.models import calibrate, gguf_vocabulary
from tests.support import language_models
from tests.support.quantize_command import drawn

Counts = list[tuple[Counters, float, float | None]]                # the counters, the time, and the seconds left
BLOCKS = 6
SOON = 0.1                                                       # of a job's time: 5 s of one that takes 50
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60
CALIBRATE = ("--calibrate", "text.txt", "--samples", "12", "--length", "48")
FOLDER = ("quantize", "model", "--jobs", "1", "--out", "out", "--format")
GGUF = ("quantize", "model", "--jobs", "1", "--out", "out.gguf", "--type")
# Commands, after those that prepare what they take.
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "search": [(*FOLDER, "hqq")],
    "gguf": [(*GGUF, "Q4_K_M")],
    "calibrate": [(*FOLDER, "int_group", *CALIBRATE)],
    "calibrate gguf": [(*GGUF, "Q4_0", *CALIBRATE, "--one-shot")],
    "convert": [(*FOLDER, "int_group"), ("convert", "out", "--to", "awq", "--out", "again", "--jobs", "1")],
    "compress": [("compress", "model", "--format", "fix4", "--out", "out", "--jobs", "1")],
    "imatrix": [("imatrix", "model", "text.txt", "--out", "out.gguf", "--samples", "12", "--length", "48")],
    "evaluate": [("evaluate", "model", "--text", "text.txt", "--context", "48", "--against", "model")],
}


class Clock(TorchDispatchMode):
    """Counts what torch's operations read, multiply and write.  number: the time of a number that is read or written."""

    def __init__(self, number: float = 1e-6) -> None:
        super().__init__()
        self.now, self.number = 0.0, number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (args, result))
        self.now += self.number * sum(leaf.numel() for leaf in inputs + outputs)
        if "mm" in str(function) and outputs and inputs:         # an output is a sum of as many products as the first has columns
            self.now += 1e-8 * outputs[0].numel() * inputs[0].shape[-1]
        return result


def solved(clock: Clock, format: Any, weight: Tensor, hessian: Any, method: str = "", power: float = 1,
           **options: Any) -> Any:
    """A stand-in for solving: as much work, in parts, and the codes of rounding."""
    for _ in range(4):
        clock.now += 1e-5 * weight.numel()
        progress.advance_units(weight.numel() / 4)
    with progress.step_share(0, 1):                                    # rounding counts rows, too
        return format.quantize(weight, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Work that torch does not do takes time by its bytes: types of GGUF files have paces of their own."""
    encode, compressed = run.encode, pieces._encoded
    with Clock() as clock:
        def encoded(source: Any, task: run.Task) -> Any:
            pace = {"Q6_K": 2e-6, "Q4_K": 8e-6, "Q5_0": 4e-6}.get(task.type, 3e-6)
            clock.now += pace * (task.stop - task.start) * source.tensors[task.name].columns
            return encode(source, task)

        def compress(unit: Any, *more: Any) -> Any:
            clock.now += 1e-6 * unit.nbytes
            return compressed(unit, *more)

        for module, name, stand_in in (
                (solve, "quantize", partial(solved, clock)), (calibrate, "quantize", partial(solved, clock)),
                (run, "encode", encoded), (pieces, "_encoded", compress), (progress, "monotonic", lambda: clock.now)):
            monkeypatch.setattr(module, name, stand_in)
        yield clock


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Counts:
    """The counters, the time, and the seconds left, at every count."""
    times: Counts = []
    add, start = Counters.add, Counters.__init__

    def started(self: Counters, *amounts: Any) -> None:
        start(self, *amounts)
        times.append((self, clock.now, None))

    def recorded(self: Counters, kind: str, row: Row) -> None:
        add(self, kind, row)
        times.append((self, clock.now, self.seconds_left))

    monkeypatch.setattr(Counters, "__init__", started)
    monkeypatch.setattr(Counters, "add", recorded)
    return times


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of some blocks."""
    folder: Path = tmp_path_factory.mktemp("blocks") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(language_models._SMALL, "num_hidden_layers", BLOCKS)
        for cached in ("config", "weights"):                     # of two blocks, for all other tests
            patch.setattr(language_models, cached, getattr(language_models, cached).__wrapped__)
        language_models.add_byte_tokenizer(language_models.write_plain(folder, "qwen3"), [TEXT])
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_the_time_left_is_right_within_a_factor_of_two(name: str, model: Path, counts: Counts, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bar that is shown, at each count after the start and before the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda tokenizer, folder: "gpt-2")
    shutil.copytree(model, "model")
    Path("text.txt").write_text(TEXT)
    for line in COMMANDS[name]:
        counts.clear()
        result = CliRunner().invoke(app, list(line), catch_exceptions=False)
        assert result.exit_code == 0, result.output
    judged = [pair for one in {id(one): one for one, *_ in counts}.values() for pair in estimates(counts, one)]
    assert len(judged) >= BLOCKS
    assert [(left, actual) for left, actual in judged if left is None or not 0.5 <= left / actual <= 2] == []


@pytest.mark.parametrize("name", ["int_group", "q4_k"])
def test_the_time_left_inside_of_a_matrix_whose_fields_are_chosen_again(name: str, clock: Clock, counts: Counts,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """By the products alone, which take most of the time of large matrices, where all sweeps are needed."""
    monkeypatch.setattr(descent, "LEAST_GAIN", -1)
    weight, hessian = drawn(64, 512).float(), Hessian.empty(512, torch.device("cpu"))
    hessian.add(drawn(600, 512).float())
    packed = qdsl.load(name).quantize(weight)
    clock.number = 0
    with progress.counting({SOLVE: 1000}), progress.step(SOLVE, 1000), progress.step_share(1000, weight.numel()):
        descent.descend(descent.Descent(packed, weight, hessian))
    judged = estimates(counts, counts[0][0])
    assert len(judged) >= 20
    assert [(left, actual) for left, actual in judged if left is None or not 0.5 <= left / actual <= 2] == []


def estimates(counts: Counts, counters: Counters) -> list[tuple[float | None, float]]:
    """The seconds left of one bar, as shown and as they are, from soon after its start until shortly before its end."""
    own = [(now, left) for one, now, left in counts if one is counters]
    begin, end = own[0][0], own[-1][0]
    assert counters.done == pytest.approx(sum(counters.amounts.values()))
    return [(left, end - now) for now, left in own if begin + SOON * (end - begin) < now < begin + 0.9 * (end - begin)]
