"""Mutated files into all that reads files, answers or errors in words out: `python -m tests.fuzz [SECONDS [PART]]`.

A loop keeps inputs that lead from a line of the readers to a line that no input before them led to; the parts share the time.
A part that is named runs under atheris where that is installed.  An input that gets another answer ends it, with the input.
"""

from __future__ import annotations

import copy
import inspect
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from itertools import count, pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from qdsl.checkpoint.detect import groups, ignored, layers, quantization
from qdsl.checkpoint.files import checksums, crc, gguf, gguf_metadata, resume, safetensors
from qdsl.checkpoint.files import folder as folders
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.checkpoint.report import contents as inspecting
from qdsl.compiler.spec import grammar, marked, schema
from qdsl.compiler.spec.source import SpecError
from qdsl.core.places import shipped
from qdsl.jobs.compress import original
from qdsl.jobs.engine import stage
from qdsl.jobs.gguf import imatrix
from tests.support.ggufs import array, framed, info, pair, text
from tests.support.jobs import command, job_inputs, succeed

LONGEST = 8192                                                   # bytes of an input
PATIENCE = 20                                                    # seconds for one
Target = Callable[[bytes], object]
Change = Callable[[random.Random, Sequence[bytes]], bytes]

GGUFS = [
    framed([info(b"t.weight", [32, 3], 8), info(b"u", [3, 2], 0, 128)],
           [pair(b"general.alignment", "u32", 32), pair(b"tokens", "string[]", [b"a", b"bc"]), pair(b"s", "string", b"text"),
            pair(b"comfy.gguf.orig_shape.u", "i32[]", [6])], bytes(160)),
    framed(pairs=[pair(b"k%d" % place, type, 1) for place, type in enumerate(("u8", "i16", "u64", "f32", "f64", "bool"))]),
    framed([info(b"%d" % place, [type.elements, 1, 1], type.id, 512 * place) for place, type in enumerate(BY_NAME.values())],
           data=bytes(512 * len(BY_NAME))),
    framed(pairs=[text(b"k") + array("array", 1) + bytes(12)]),
]
NUMBERS = [0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 31, 32, 33, 64, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]
VALUES = [None, True, False, 0, 1, -1, 2**31, 2**63, 1e308, 0.5, "", "x", "re:(", "../x", "\u202e", [], {}, [[]], {"x": {}}]


# -- the loop ----------------------------------------------------------------------------------------------------------


def explore(target: Target, seeds: Sequence[bytes], files: Collection[str], rounds: Iterable[object], seed: int,
            change: Change | None = None) -> list[bytes]:
    """Run a target on seeds and on what becomes of them, once a round; the inputs that led to something new.

    Lines of `files` are watched.  change: by default `changed`.  Raises what the target raises, with the input in its notes.
    """
    draw = random.Random(seed)
    seen: set[tuple[str, int, int]] = set()
    kept: list[bytes] = []
    waiting = list(seeds)
    for _ in rounds:
        data = waiting.pop() if waiting else (change or changed)(draw, kept)
        steps = watched(target, data, files)
        if not steps <= seen:
            seen |= steps
            kept.append(data)
    return kept


def watched(target: Target, data: bytes, files: Collection[str]) -> set[tuple[str, int, int]]:
    """Run a target once: the steps from line to line in the files."""
    steps: set[tuple[str, int, int]] = set()
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        if frame.f_code.co_filename not in files:
            return None
        steps.add((frame.f_code.co_name, last.get(frame, 0), frame.f_lineno))
        last[frame] = frame.f_lineno
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        target(data)
    except BaseException as error:
        error.add_note(f"input of {len(data)} bytes: {data.hex()}")
        raise
    finally:
        sys.settrace(before)
    return steps


def changed(draw: random.Random, kept: Sequence[bytes]) -> bytes:
    """An input made of those that were kept, by some changes."""
    data = bytearray(draw.choice(kept))
    for _ in range(1 << draw.randrange(4)):
        at = draw.randrange(len(data) + 1)
        stop = min(len(data), at + draw.choice((0, 1, 4, 8, 16)))
        other = draw.choice(kept)
        start = draw.randrange(len(other) + 1)
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                width = draw.choice((1, 4, 8))
                data[at:at + width] = (draw.choice(NUMBERS) & (1 << 8 * width) - 1).to_bytes(width, "little")
            case 2:
                del data[at:stop]
            case 3:
                data[at:at] = draw.randbytes(draw.choice((1, 4, 8)))
            case 4:
                data[at:stop] = other[start:start + draw.choice((8, 16, 40, 200))]
            case _:
                data[at:] = other[start:]
    return bytes(data[:LONGEST])


def changed_json(draw: random.Random, kept: Sequence[bytes]) -> bytes:
    """An input made of those that were kept: mostly one value of JSON in place of another, or gone."""
    try:
        value, other = (json.loads(draw.choice(kept)) for _ in range(2))
    except ValueError:
        return changed(draw, kept)
    if draw.randrange(4) == 0:
        return changed(draw, kept)
    for _ in range(1 << draw.randrange(3)):
        owners = [node for node in _nodes(value) if isinstance(node, (dict, list)) and node]
        if not owners:
            break
        owner = draw.choice(owners)
        key: Any = draw.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        if draw.randrange(4):
            owner[key] = copy.deepcopy(draw.choice([*VALUES, *list(_nodes(other))[:99]]))
        else:
            del owner[key]
    return json.dumps(value).encode()[:LONGEST]


def _nodes(value: Any) -> Iterable[Any]:
    """A value of JSON, and all within it."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(inner)


def for_seconds(seconds: float) -> Iterable[int]:
    """Rounds, of PATIENCE each at most, until the time is over."""
    def too_long(*_: object) -> None:
        raise TimeoutError(f"an input took more than {PATIENCE} seconds")

    signal.signal(signal.SIGALRM, too_long)
    end = time.monotonic() + seconds
    for number in count():
        signal.alarm(PATIENCE)
        if time.monotonic() > end:
            break
        yield number
    signal.alarm(0)
    print(f"{number} inputs", end=", ")


@dataclass(frozen=True, slots=True)
class Part:
    """What is fuzzed together: a target, inputs to begin with, and the modules whose lines are watched."""

    target: Target
    seeds: Sequence[bytes]
    modules: Sequence[ModuleType]
    change: Change = changed_json

    @property
    def files(self) -> list[str]:
        return [inspect.getfile(module) for module in self.modules]


# -- what must hold of any bytes ---------------------------------------------------------------------------------------


def read_gguf(data: bytes) -> None:
    """What must hold of any bytes: refused, or metadata that can be decoded and are the file's own bytes, and tensors that can
    be read lie in the file, aligned, and apart from each other.
    """
    try:
        header = gguf.parse(BytesIO(data), len(data), Path("x.gguf"))
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return
    place = 24
    for key, value in header.metadata.stored().items():
        assert isinstance(header.metadata[key], list) == value.type.endswith("[]")
        raw = text(key.encode()) + value.stored()
        assert data[place:place + len(raw)] == raw
        place += len(raw)
    read = [tensor for tensor in header.tensors.values() if tensor.problem is None]
    spans = sorted((tensor.start, tensor.start + tensor.nbytes) for tensor in read if tensor.nbytes)
    assert all(place <= start < stop <= len(data) and start % header.alignment == 0 for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(tensor.problem.isprintable() for tensor in header.tensors.values() if tensor.problem is not None)


def refused(read: Callable[[bytes], object]) -> Target:
    """A target that reads bytes, or refuses them in words."""
    def target(data: bytes) -> None:
        try:
            read(data)
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 5000
        except SpecError as error:
            assert error.problems and all(problem.render() for problem in error.problems)

    return target


@cache
def work() -> Path:
    """A folder with the inputs of jobs, and 'out', of which a job has written one part of two."""
    path = job_inputs(Path(tempfile.mkdtemp(prefix="qdsl-fuzz-")))
    (path / "file").mkdir()
    succeed("quantize", path / "plain", "-f", "fp8_block", "-o", path / "out", "-j", "1", "--shard", "1/2")
    return path


def read_spec(data: bytes) -> None:
    schema.parse(data.decode(errors="replace"))


def read_imatrix(data: bytes) -> None:
    path = work() / "file" / "imatrix"
    path.write_bytes(data)
    imatrix.read(path)


def read_config(data: bytes) -> None:
    (work() / "fp8" / "config.json").write_bytes(data)
    report = inspecting.contents(work() / "fp8")
    json.dumps(report)
    assert all(line.isprintable() for text in inspecting.lines(report) for line in text.split("\n"))


def read_original(data: bytes) -> None:
    (work() / "hlane" / original.ORIGINAL).write_bytes(data)
    with folders.Folder(work() / "hlane") as folder:
        original.read(folder)


def read_checksums(data: bytes) -> None:
    (work() / "plain" / crc.FILE).write_bytes(data)
    checksums.checksum_problems(work() / "plain")


def read_state(name: str) -> Target:
    """A target that completes the unfinished work with another file of that name in it."""
    def target(data: bytes) -> None:
        [path] = (work() / "out" / stage.STAGE).rglob(name)
        before = path.read_bytes()
        path.write_bytes(data)
        result = command("merge-index", work() / "out")
        path.write_bytes(before)
        assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output

    return target


TENSORS = [("a", [b"a" * 8], 8, 2), ("b", [b"b" * 3], 3, 0)]


def read_journal(data: bytes) -> None:
    unfinished = resume.Resume("", {})
    file = BytesIO(b"start" + b"a" * 8 + bytes(2) + b"b" * 3)
    whole = resume._keep_complete(file, BytesIO(data), b"start", TENSORS, unfinished, {})
    assert len(unfinished.notes) == whole and file.tell() in (0, 15, 18)


@cache
def parts() -> dict[str, Part]:
    """What is fuzzed, by name."""
    path, readers = work(), (safetensors, folders)
    unfinished = {name: next((path / "out" / stage.STAGE).rglob(name)).read_bytes() for name in (stage.REQUEST, stage.NOTE)}
    header = (path / "fp8" / "model-00001-of-00002.safetensors").read_bytes()
    line = json.dumps({"name": "a", "crc": 0x6F1E4D4C, "zeros": "0000", "note": None}).encode() + b"\n"
    old = b"".join(number.to_bytes(4, "little") for number in (1, 1)) + b"a" + (1).to_bytes(4, "little") * 2 + bytes(4)
    numbers = framed([info(b"a.in_sum2", [8, 1], 0), info(b"a.counts", [1, 1], 0, 32)], [pair(b"k", "u32", 1)], bytes(64))
    return {
        "gguf": Part(read_gguf, GGUFS, (gguf, gguf_metadata), changed),
        "safetensors": Part(refused(lambda data: safetensors.parse_header(data, Path("x"))),
                            [header[8:8 + int.from_bytes(header[:8], "little")].rstrip()], (safetensors,)),
        "imatrix": Part(refused(read_imatrix), [old, numbers], (imatrix, gguf), changed),
        "spec": Part(refused(read_spec), [spec.read_bytes() for spec in shipped() if spec.stat().st_size < 1500],
                     (marked, schema, grammar), changed),
        "config": Part(refused(read_config), [json.dumps(config).encode() for config in CONFIGS],
                       (quantization, layers, ignored, groups)),
        "original": Part(refused(read_original), [(path / "hlane" / original.ORIGINAL).read_bytes()], (original, *readers)),
        "checksums": Part(refused(read_checksums), [(path / "fp8" / crc.FILE).read_bytes()], (checksums, *readers)),
        "request": Part(read_state(stage.REQUEST), [unfinished[stage.REQUEST]], (stage,)),
        "note": Part(read_state(stage.NOTE), [unfinished[stage.NOTE]], (stage,)),
        "journal": Part(read_journal, [line, line + line], (resume,)),
    }


WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
CONFIGS: list[dict[str, Any]] = [{"model_type": "llama", "num_hidden_layers": 1, "quantization_config": own} for own in (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "dynamic": {"-:.*down.*": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*up"], "format": "pack-quantized",
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}},
    {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*up*"]},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
    {"quant_method": "qdsl", "format": "q4_0", "storage": "gguf"})]


def run_part(name: str, part: Part, seconds: float) -> None:
    """Fuzz a part for a while, and print what was learned."""
    seed = random.randrange(1 << 32)
    print(f"{name}: seed {seed}", end=", ", flush=True)
    kept = explore(part.target, part.seeds, part.files, for_seconds(seconds), seed, part.change)
    print(f"{len(kept)} of them led to something new", flush=True)


def run_atheris(part: Part, seconds: float) -> None:
    """Fuzz a part under atheris, which ends the process."""
    import atheris

    atheris.instrument_all()
    folder = Path(tempfile.mkdtemp())
    for place, data in enumerate(part.seeds):
        (folder / str(place)).write_bytes(data)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST}", f"-timeout={PATIENCE}", str(folder)],
                  part.target)
    atheris.Fuzz()


def main() -> None:
    seconds, named = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, sys.argv[2:]
    if named and find_spec("atheris"):
        run_atheris(parts()[named[0]], seconds)
    chosen = {name: part for name, part in parts().items() if name in (named or parts())}
    for name, part in chosen.items():
        run_part(name, part, seconds / len(chosen))


if __name__ == "__main__":
    main()
