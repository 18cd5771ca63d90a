"""Failing disks, cut files, hostile JSON and interrupts: one sentence, a documented exit code, and no byte lost or changed.

What is tried is drawn: $QDSL_TEST_SEED draws something else, QDSL_TEST_ALL=1 more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from qdsl.host import library
from qdsl.jobs.engine import stage
from tests.support import folders
from tests.support.jobs import CHECKS, JOBS, SEED, command, drawn, files, job_inputs, succeed
from tests.support.json_bombs import drawn_json
from tests.support.paths import ROOT

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
              pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
TIMES = 20 if os.environ.get("QDSL_TEST_ALL") else 1
EVERY = JOBS | CHECKS
SHARDED = ["convert", "compress", "decompress", "quantize folder"]
SOME = list(EVERY) if TIMES > 1 else drawn("jobs").sample(list(EVERY), 4)

# Commands that read each input.
READERS = {
    "plain": ["inspect {}", "verify {} {}", "quantize {} -f fp8_block -j 1 -o {out}", "compress {} -f hlane -j 1 -o {out}",
              "plan {} --vram 20GB", "serve-check {}"],
    "fp8": ["inspect {} --check", "verify {} {} --decoded", "convert {} --requantize q8_0 -j 1 -o {out}"],
    "hlane": ["inspect {}", "decompress {} -j 1 -o {out}"],
    "in.gguf": ["inspect {} --check", "verify {} {}", "dequantize {} -o {out}.safetensors",
                "quantize {} -t q8_0 -j 1 -o {out}.gguf"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job_inputs(tmp_path_factory.mktemp("inputs"))
    config = json.loads((path / "fp8" / "config.json").read_text())
    settings = config.pop("quantization_config")
    for name, text in (("quantize_config.json", settings), ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})):
        shutil.copytree(path / "fp8", path / name)
        (path / name / "config.json").write_text(json.dumps(config))
        (path / name / name).write_text(json.dumps(text))
    return path


def damaged(path: Path, data: bytes, reader: str, out: Path) -> int:
    """The exit code of a command that reads a changed file, which is put back: one sentence, and nothing written, if not 0."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        result = command(*reader.replace("{out}", str(out / "out")).split())
    finally:
        path.write_bytes(before)
    assert result.exit_code in (0, 1, 2, 3), result.output
    if result.exit_code in (1, 2):
        message = result.stderr or result.stdout.splitlines()[-1]
        assert len(message) < 5000 and (message.count("\n") <= 1 or "inspect" in reader), message
        assert not files(out), reader
    shutil.rmtree(out)
    out.mkdir()
    return result.exit_code


def containers(inputs: Path) -> Iterator[tuple[str, Path]]:
    for name in READERS:
        path = inputs / name
        yield from ((name, file) for file in ([path] if path.is_file() else sorted(path.iterdir())) if file.is_file())


def test_a_cut_file_is_named(inputs: Path, tmp_path: Path) -> None:
    """Cut at a multiple of 64 bytes, or just before the end."""
    draw = drawn("cuts")
    for name, path in containers(inputs):
        data = path.read_bytes()
        for _ in range(TIMES):
            for length in (draw.randrange(0, len(data), 64), len(data) - 1):
                reader = draw.choice(READERS[name]).replace("{}", str(inputs / name))
                code = damaged(path, data[:length], reader, tmp_path)
                is_read = path.suffix in (".safetensors", ".gguf") or path.name.endswith("index.json")
                assert code or not is_read or data[length:].isspace(), (reader, path, length)


def test_hostile_json_is_refused_or_read(inputs: Path, tmp_path: Path) -> None:
    draw = drawn("json")
    texts = [(name, path) for name, path in containers(inputs) if path.suffix == ".json"]
    texts += [("fp8", inputs / name / name) for name in ("quantize_config.json", "hf_quant_config.json")]
    for name, path in texts:
        for _ in range(2 * TIMES):
            reader = draw.choice(READERS[name]).replace("{}", str(path.parent))
            damaged(path, drawn_json(path.read_bytes(), draw), reader, tmp_path)


@pytest.mark.parametrize("job", SOME)
def test_an_interrupt_ends_with_130(job: str, inputs: Path, tmp_path: Path) -> None:
    """At any operation on the output, or on the inputs of a command that only reads.  The same command then ends well."""
    draw, (arguments, name) = drawn(f"interrupts {job}"), EVERY[job]
    asked = arguments.replace("{}", str(inputs)).split()
    watched = tmp_path / "out" if name else inputs

    def work(place: str) -> list[str | Path]:
        (tmp_path / place).mkdir()
        own: list[str | Path] = [*asked, *(("-o", tmp_path / place / name) if name else ())]
        if job != "merge-index":
            return own
        succeed(*own)
        return ["merge-index", tmp_path / place / name]

    fresh = work("fresh")
    count = folders.operations(lambda: succeed(*fresh), tmp_path / "fresh" if name else inputs)
    for _ in range(TIMES):
        again = work("out")
        after = draw.randrange(count)
        code, text = folders.signalled(again, watched, after, signal.SIGINT, tmp_path / "log")
        *_, last = text.splitlines()
        assert code == 130 and last.startswith("interrupted") and "Traceback" not in text, (after, code, text)
        _, is_named, place = last.partition(" lies in ")
        if files(tmp_path / "out") != files(tmp_path / "fresh"):
            assert not is_named or Path(place).exists()
            succeed(*again)
        elif not name:
            succeed(*again)
        assert files(tmp_path / "out") == files(tmp_path / "fresh")
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("job", SHARDED if TIMES > 1 else drawn("shards").sample(SHARDED, 1))
def test_parts_are_killed_while_the_clock_jumps(job: str, inputs: Path, tmp_path: Path) -> None:
    """The time of what is staged lies in the past or in the future.  What is merged has the bytes of one run, or is refused."""
    draw, out = drawn(f"shards {job}"), tmp_path / "out"
    asked = [*JOBS[job][0].replace("{}", str(inputs)).split(), "-o", str(out)]
    count = folders.operations(lambda: succeed(*asked[:-1], tmp_path / "fresh"), tmp_path / "fresh")
    for _ in range(TIMES):
        for part in ("1/2", "2/2"):
            folders.killed(partial(succeed, *asked, "--shard", part), out, draw.randrange(count // 2))
            for path in out.rglob("*"):
                moment = draw.choice([0, 1 << 31, 1 << 33, time.time() - 1e6])
                os.utime(path, (moment, moment))
        if command("merge-index", out).exit_code:
            for part in ("2/2", "1/2"):
                succeed(*asked, "--shard", part)
            assert (out / stage.STAGE).is_dir()
            succeed("merge-index", out)
        assert files(out) == files(tmp_path / "fresh")
        shutil.rmtree(out)


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library as Linux does")
@pytest.mark.skipif(not library.has_compiler(), reason="needs a C compiler")
def test_failing_reads_and_writes_are_errors(tmp_path: Path) -> None:
    shim, support = tmp_path / "failing_calls.so", ROOT / "tests" / "support"
    subprocess.run([*library.compiler(), "-shared", "-fPIC", "-o", shim, support / "failing_calls.c", "-ldl"], check=True)
    run = subprocess.run([sys.executable, "-m", "tests.support.failing_calls", shim, tmp_path / "work", str(4 * TIMES), str(SEED),
                          *SOME], cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT)})
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stdout + run.stderr
