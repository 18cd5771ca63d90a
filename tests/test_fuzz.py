"""The fuzz target and its loop: that mistakes are found, not that there are none."""

from __future__ import annotations

import sys

import pytest

from qdsl.checkpoint import gguf, gguf_metadata
from tests import fuzz_gguf
from tests.fuzz_gguf import PARSER, SEEDS, explore, target


def test_nothing_is_found_in_the_parser() -> None:
    assert len(explore(target, SEEDS, PARSER, range(400), seed=1)) > len(SEEDS)


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
    return cursor.place - count


@pytest.mark.parametrize(("module", "name", "broken"), [
    (gguf_metadata, "_word", lambda cursor, word, key: gguf_metadata._WORDS[word]),
    (gguf, "_padded", lambda place, alignment: place),
    (gguf_metadata.Cursor, "skip", unbounded),
])
def test_a_broken_parser_is_found_out(monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object) -> None:
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Exception) as caught:
        explore(target, SEEDS, PARSER, range(2000), seed=0)
    assert caught.value.__notes__[0].startswith("input of ")


def test_the_loop_ends_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.setattr(sys, "argv", ["fuzz_gguf", "1"])
    fuzz_gguf.main()
    assert "led to something new" in capsys.readouterr().out
