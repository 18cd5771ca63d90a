"""Bytes into the GGUF parser, answers or CheckpointError out: `python -m tests.fuzz_gguf [SECONDS]`.

Runs under atheris where it is installed, and else in a loop of its own, which keeps inputs that lead from a line of the parser to
a line that no input before them led to.  An input that gets another answer ends it, with the input.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, pairwise
from pathlib import Path
from types import FrameType

from qdsl.checkpoint import gguf, gguf_metadata
from qdsl.checkpoint.ggml_types import BY_NAME
from qdsl.checkpoint.safetensors import CheckpointError
from tests.support.ggufs import array, framed, info, pair, text

LONGEST = 4096                                                   # bytes of an input
PATIENCE = 20                                                    # seconds for one
PARSER = (gguf.__file__, gguf_metadata.__file__)
Target = Callable[[bytes], object]

SEEDS = [
    framed([info(b"t.weight", [32, 3], 8), info(b"u", [3, 2], 0, 128)],
           [pair(b"general.alignment", "u32", 32), pair(b"tokens", "string[]", [b"a", b"bc"]), pair(b"s", "string", b"text"),
            pair(b"comfy.gguf.orig_shape.u", "i32[]", [6])], bytes(160)),
    framed(pairs=[pair(b"k%d" % place, type, 1) for place, type in enumerate(("u8", "i16", "u64", "f32", "f64", "bool"))]),
    framed([info(b"%d" % place, [each.elements, 1, 1], each.id, 512 * place) for place, each in enumerate(BY_NAME.values())],
           data=bytes(512 * len(BY_NAME))),
    framed(pairs=[text(b"k") + array("array", 1) + bytes(12)]),
]
NUMBERS = [0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 31, 32, 33, 64, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def target(data: bytes) -> None:
    """What must hold of any bytes: refused, or metadata that can be decoded and are the file's own bytes, and tensors that can
    be read lie in the file, aligned, and apart from each other.
    """
    try:
        header = gguf.parse(data, len(data), Path("x.gguf"))
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return
    place = 24
    for key, value in header.metadata.stored().items():
        assert isinstance(header.metadata[key], list) == value.type.endswith("[]")
        raw = text(key.encode()) + value.stored()
        assert data[place:place + len(raw)] == raw
        place += len(raw)
    read = [each for each in header.tensors.values() if each.problem is None]
    spans = sorted((each.start, each.start + each.nbytes) for each in read if each.nbytes)
    assert all(place <= start < stop <= len(data) and start % header.alignment == 0 for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(each.problem.isprintable() for each in header.tensors.values() if each.problem is not None)


def explore(target: Target, seeds: Sequence[bytes], files: Collection[str], rounds: Iterable[object], seed: int) -> list[bytes]:
    """Run a target on seeds and on what becomes of them, once a round; the inputs that led to something new.

    Lines of `files` are watched.  Raises what the target raises, with the input in its notes.
    """
    draw = random.Random(seed)
    seen: set[tuple[str, int, int]] = set()
    kept: list[bytes] = []
    waiting = list(seeds)
    for _ in rounds:
        data = waiting.pop() if waiting else changed(draw, kept)
        found = watched(target, data, files)
        if not found <= seen:
            seen |= found
            kept.append(data)
    return kept


def watched(target: Target, data: bytes, files: Collection[str]) -> set[tuple[str, int, int]]:
    """Run a target once: the steps from line to line in the files."""
    found: set[tuple[str, int, int]] = set()
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        if frame.f_code.co_filename not in files:
            return None
        found.add((frame.f_code.co_name, last.get(frame, 0), frame.f_lineno))
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
    return found


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
    print(f"{number} inputs")


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    try:
        import atheris
    except ImportError:
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        print(f"{len(explore(target, SEEDS, PARSER, for_seconds(seconds), seed))} of them led to something new")
        return
    atheris.instrument_all()
    folder = tempfile.mkdtemp()
    for place, data in enumerate(SEEDS):
        (Path(folder) / str(place)).write_bytes(data)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-max_len={LONGEST}", f"-timeout={PATIENCE}", folder], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
