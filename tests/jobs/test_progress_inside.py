"""Progress of every job that works on weights advances inside of a single large matrix, and no command jumps over most of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.files import gguf_write, safetensors
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.checkpoint.report import verify, verify_decoded
from qdsl.cli import app
from qdsl.encode.calibrated.hessian import Hessian
from qdsl.encode.calibrated.solve import METHODS, quantize
from qdsl.generated import int_group, q4_k
from qdsl.host import progress
from qdsl.host.progress import FINISHED, Counters, Row
from qdsl.jobs.convert import steps
from qdsl.jobs.gguf import compare, dequantize, run
from qdsl.runtime.weight import tiles
from tests.support import folders
from tests.support.quantize_command import drawn

SHAPE = (1536, 768)
NAME = "model.layers.0.mlp.up_proj.weight"
TILE = 1 << 17
MOST = 0.76                                                      # of a matrix, in one step: what encodes streams in one call
QUANTIZE = ("quantize", "plain", "--out", "out", "--jobs", "1", "--format")
# Commands, after those that prepare what they take.
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "search": [(*QUANTIZE, "q4_k")],
    "round": [(*QUANTIZE, "int_group")],
    "gguf": [("quantize", "plain.gguf", "--type", "Q4_K_M", "--out", "out.gguf", "--jobs", "1")],
    "convert": [(*QUANTIZE, "int_group"), ("convert", "out", "--to", "awq", "--out", "again", "--jobs", "1")],
    "requantize": [(*QUANTIZE, "int_group"), ("convert", "out", "--requantize", "q4_0", "--out", "again", "--jobs", "1")],
    "compress": [("compress", "plain", "--format", "fix4", "--out", "out", "--jobs", "1", "--check")],
    "decompress": [("compress", "plain", "--format", "fix4", "--out", "out", "--jobs", "1"),
                   ("decompress", "out", "--out", "again", "--jobs", "1")],
    "dequantize": [("dequantize", "plain.gguf", "--out", "out.safetensors", "--dtype", "bf16")],
    "dequantize folder": [(*QUANTIZE, "int_group"), ("dequantize", "out", "--out", "again", "--jobs", "1")],
    "verify": [("verify", "plain", "plain", "--jobs", "1")],
    "verify decoded": [(*QUANTIZE, "int_group"), ("verify", "plain", "out", "--decoded", "--tolerance", "0.9", "--jobs", "1")],
    "verify gguf": [("verify", "plain.gguf", "copy.gguf")],
    "verify checksums": [("dequantize", "plain.gguf", "--out", "out.safetensors"), ("verify", "out.safetensors")],
}


@pytest.fixture(autouse=True)
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and a GGUF file of one matrix, which is large for the tiles of this test."""
    monkeypatch.chdir(tmp_path)
    for module, constant in ((tiles, "TILE"), (steps, "CHUNK"), (run, "CHUNK"), (dequantize, "WEIGHTS"), (verify, "PIECE"),
                             (verify, "READ"), (verify_decoded, "TILE"), (compare, "CHUNK")):
        monkeypatch.setattr(module, constant, TILE)
    weight = drawn(*SHAPE)
    folders.folder(Path("plain"), {NAME: weight}, config={"model_type": "llama"})
    for path in ("plain.gguf", "copy.gguf"):
        write_gguf(path, weight, 1)


def write_gguf(path: str, weight: torch.Tensor, blocks: int) -> None:
    """A GGUF file with a matrix in F16 in each block."""
    gguf_write.write(path, {"general.architecture": Value.of("string", "llama")}, [
        NewTensor(f"blk.{block}.ffn_up.weight", BY_NAME["F16"], SHAPE, [safetensors.bytes_of(weight.half())])
        for block in range(blocks)])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Counters, float]]]:
    """The counters, and the share of their bytes that is done, at every count of the last command."""
    shares: list[tuple[Counters, float]] = []
    add = Counters.add

    def recorded(self: Counters, kind: str, row: Row) -> None:
        add(self, kind, row)
        shares.append((self, self.done / max(1, sum(self.amounts.values()))))

    monkeypatch.setattr(Counters, "add", recorded)
    yield shares


def largest_step(shares: list[tuple[Counters, float]]) -> float:
    """Of the work that has most steps."""
    works = {id(one): [0.0, *(share for other, share in shares if other is one)] for one, _ in shares}
    most = max(works.values(), key=len, default=[0.0, 1.0])
    assert most[-1] == pytest.approx(1) and all(a <= b + 1e-9 for a, b in pairwise(most))
    return max(b - a for a, b in pairwise(most))


@pytest.mark.parametrize("name", COMMANDS)
def test_progress_advances_inside_of_a_matrix(name: str, watched: list[tuple[Counters, float]]) -> None:
    for line in COMMANDS[name]:
        watched.clear()
        result = CliRunner().invoke(app, list(line), catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert largest_step(watched) <= MOST


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("format", [q4_k, int_group])
def test_solving_a_matrix_advances(format: object, method: str, watched: list[tuple[Counters, float]]) -> None:
    weight, hessian = drawn(256, 512).float(), Hessian.empty(512, torch.device("cpu"))
    hessian.add(drawn(600, 512).float())
    with progress.counting({"Q4_K": 100}), progress.step("Q4_K", 100), progress.step_share(100, weight.numel()):
        quantize(format.FORMAT, weight, hessian, method)                        # type: ignore[attr-defined]
    assert largest_step(watched) <= MOST


def test_a_resumed_file_is_compared_inside_of_a_bar_of_its_own(watched: list[tuple[Counters, float]],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison reads what is written and its inputs, piece by piece; then the rest is counted as what it is."""
    write_gguf("two.gguf", drawn(*SHAPE), 2)
    line = ["quantize", "two.gguf", "--type", "Q8_0", "--out", "out.gguf", "--jobs", "1"]
    encode = run.encode

    def interrupted(source: run.Weights, task: run.Task) -> object:
        if task.name.startswith("blk.1"):
            raise KeyboardInterrupt
        return encode(source, task)

    monkeypatch.setattr(run, "encode", interrupted)
    assert CliRunner().invoke(app, line).exit_code == 130
    monkeypatch.setattr(run, "encode", encode)
    watched.clear()
    assert CliRunner().invoke(app, line, catch_exceptions=False).exit_code == 0
    compared = [(counters, share) for counters, share in watched if FINISHED in counters.amounts]
    assert len(compared) >= 3 and largest_step(compared) <= 0.5
    others = [share for counters, share in watched if FINISHED not in counters.amounts]
    assert others[0] == pytest.approx(0.5) and others[-1] == pytest.approx(1)
