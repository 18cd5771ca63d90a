"""Every kind of mistake as a small wrong spec, whose first lines are the exact answer of the compiler.

A line of the answer stands behind `#! `; the file's name is left out of places.  `pytest --bless` writes the answers into
the files: read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qdsl.compiler.emit.module.module import module_files
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import load, parse
from qdsl.compiler.spec.source import SpecError
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "bad_specs"
FILES = sorted(FOLDER.glob("*.yaml"))
MARK = "#! "

GOOD = """format: good
weight: [N, K]
fields:
  q: i8[n, k]
decode: q
storage:
  plain:
    weight:
      tensor: i8[n<N, k<K]
      record: q[n, k]
"""


def answer(text: str) -> list[str]:
    """The lines that the compiler writes about a text; none where it compiles.  Anything but SpecError is a failure."""
    try:
        module_files(compile_spec(parse(text, "bad.yaml", FOLDER)))
    except SpecError as error:
        assert error.problems and str(error) == "\n".join(problem.render() for problem in error.problems)
        return str(error).replace("bad.yaml:", "").split("\n")
    return []


def split(text: str) -> tuple[list[str], str]:
    """The expected lines, and the spec below them."""
    lines = text.split("\n")
    count = next((i for i, line in enumerate(lines) if not line.startswith(MARK)), len(lines))
    return [line.removeprefix(MARK) for line in lines[:count]], "\n".join(lines[count:])


def write_answer(path: Path) -> None:
    """Write the answer into a file, until the lines that it adds move nothing any more."""
    for _ in range(5):
        text = path.read_bytes().decode()
        lines = answer(text)
        blessed = "\n".join([*(MARK + line for line in lines), split(text)[1]])
        if not lines or blessed == text:
            return
        path.write_bytes(blessed.encode())
    raise AssertionError(f"the answer to {path.name} does not settle")


def test_number_of_mistakes() -> None:
    assert len(FILES) >= 50


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_bad_spec(path: Path, bless: bool) -> None:
    if bless:
        write_answer(path)
    text = path.read_bytes().decode()
    expected, _ = split(text)
    assert expected, f"{path.name} does not say what is wrong with it: run pytest with --bless"
    assert answer(text) == expected


def test_good_spec_has_no_answer() -> None:
    assert answer(GOOD) == []


HEADER = "title: right\u202eto left\n"                  # what a file should not hold, or what a comment would change

TEXTS = {
    "control_character": (GOOD.replace("decode: q", "decode: q\a"), 5, "is not allowed"),
    "carriage_return": (GOOD.replace("decode: q", "decode: q\r"), 5, "lines end with a newline only"),
    "line_separator": (GOOD.replace("decode: q", "decode: q\u2028"), 5, "lines end with a newline only"),
    "right_to_left": (GOOD + HEADER, 11, "one printable line"),
    "no_break_space": (GOOD.replace("decode: q", "decode: q\u00a0+ 1"), 5, "unexpected character '\\xa0'"),
    "zero_width_space": (GOOD.replace("  q: i8", "  q\u200b: i8"), 4, "field name 'q\\u200b' is not allowed"),
    "too_large": (GOOD + "#" * (256 * 1024), 1, "the file is larger than 256 KiB"),
    "too_many_nodes": (GOOD + f"detect: {{a: [{'1, ' * 10_000}]}}\n", 11, "more than 10000 nodes"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text(name: str) -> None:
    text, line, message = TEXTS[name]
    with pytest.raises(SpecError) as caught:
        parse(text, "bad.yaml")
    first = caught.value.problems[0]
    assert first.span.line == line
    assert message in first.message


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"format: good\ntitle: na\xefve\n")
    with pytest.raises(SpecError) as caught:
        load(path, "latin.yaml")
    assert str(caught.value) == "latin.yaml:2:10: error: the file is not UTF-8 text"


def test_file_of_another_system_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert load(path).name.value == "good"
