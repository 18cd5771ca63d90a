"""The fuzz target and its loop: that mistakes are found, not that there are none."""

from __future__ import annotations

import sys

import pytest

from qdsl.checkpoint.files import gguf, gguf_metadata
from tests import fuzz
from tests.fuzz import explore, parts


@pytest.mark.parametrize(("name", "rounds"), [
    ("gguf", 400), ("safetensors", 100), ("imatrix", 100), ("spec", 20), ("config", 30), ("original", 60), ("checksums", 60),
    ("request", 8), ("note", 8), ("journal", 100)])
def test_nothing_is_found_in_readers(name: str, rounds: int) -> None:
    part = parts()[name]
    assert explore(part.target, part.seeds, part.files, range(rounds), 1, part.change)


def lock(data: bytes) -> None:
    """Opens for one input in millions, whose bytes are guessed one after the other by what they lead to."""
    if data[:1] == b"A":
        if data[1:2] == b"B":                                    # a line for each byte: each leads to something new
            if data[2:3] == b"D":  # noqa: SIM102
                if data[3:4] == b"H":
                    raise AssertionError("open")
            data = b""
        data = b""


@pytest.mark.parametrize("seed", range(3))
def test_inputs_that_lead_to_something_new_are_kept(seed: int) -> None:
    with pytest.raises(AssertionError, match="open") as caught:
        explore(lock, [b"@@@@"], {__file__}, range(20_000), seed)
    assert "41424448" in caught.value.__notes__[0]


def unbounded(cursor: gguf_metadata.Cursor, count: int, what: str) -> int:
    cursor.place += count
    cursor.data += cursor.file.read(max(0, min(cursor.place, cursor.size) - len(cursor.data)))
    return cursor.place - count


@pytest.mark.parametrize(("module", "name", "broken"), [
    (gguf_metadata, "_word", lambda cursor, word, key: gguf_metadata._WORDS[word]),
    (gguf, "_padded", lambda place, alignment: place),
    (gguf_metadata.Cursor, "skip", unbounded),
])
def test_a_broken_parser_is_found_out(monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object) -> None:
    monkeypatch.setattr(module, name, broken)
    part = parts()["gguf"]
    with pytest.raises(Exception) as caught:
        explore(part.target, part.seeds, part.files, range(2000), seed=0)
    assert caught.value.__notes__[0].startswith("input of ")


def test_the_loop_ends_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fuzz, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "1", "gguf"])
    fuzz.main()
    assert "led to something new" in capsys.readouterr().out
