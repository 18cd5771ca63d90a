"""The walk of docs/design.md: the text of one format at every stage, from the spec on that page."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import unified_diff
from functools import cache

from qdsl.compiler.emit.module.module import module_files
from qdsl.compiler.ir.program import Program
from qdsl.compiler.ir.text import text
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import parse
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "design.md"
STORAGE = "gguf"                                                 # whose program is shown


@cache
def _stages() -> tuple[dict[str, list[str]], str]:
    """What each pass changes in the program of the storage, and the generated module."""
    source = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    changes: dict[str, list[str]] = {}
    before: list[str] = []

    def after(name: str, program: Program) -> None:
        nonlocal before
        if program.storage == STORAGE:
            now = text(program).rstrip().split("\n")
            lines = unified_diff(before, now, lineterm="", n=0)
            changes[name] = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
            before = now

    [files] = [module_files(compile_spec(parse(source, PAGE.name), after))]
    [[_, printed]] = files.items()
    return changes, printed


def fenced(lines: list[str]) -> list[str]:
    return ["", "```text", *lines, "```", ""]


def walk_fields() -> list[str]:
    return fenced([line for line in _stages()[0]["type_fields"] if line])


def walk_records() -> list[str]:
    return fenced(_stages()[0]["read_records"])


def walk_layouts() -> list[str]:
    return fenced(_stages()[0]["infer_layouts"])


def walk_values() -> list[str]:
    return fenced(_stages()[0]["type_decode"])


def walk_affine() -> list[str]:
    return fenced(_stages()[0]["factor_decode"])


def walk_units() -> list[str]:
    return fenced(_stages()[0]["choose_units"])


def _cut(*starts: str) -> list[str]:
    """Definitions of the generated module that begin with these lines."""
    printed, lines = _stages()[1], list[str]()
    for start in starts:
        first = printed.index(f"\n{start}") + 1
        end = re.compile(r"\n(?=\n\S)|\n\n\n").search(printed, first)
        lines += [*([""] if lines else []), *printed[first:end and end.start()].rstrip().split("\n")]
    return lines


def walk_literal() -> list[str]:
    return fenced(_cut("PROGRAM = {"))


def walk_torch() -> list[str]:
    return fenced(_cut("def unpack_gguf(", "def decode(", "def encode("))


def walk_triton() -> list[str]:
    return fenced(_cut("@triton.jit\ndef _decode_gguf("))


def walk_c() -> list[str]:
    return fenced(_cut("ROW_FUNCTIONS = "))


WALK: tuple[Callable[[], list[str]], ...] = (walk_fields, walk_records, walk_layouts, walk_values, walk_affine, walk_units,
                                             walk_literal, walk_torch, walk_triton, walk_c)
