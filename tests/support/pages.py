"""Reads pages of the documentation: their blocks in order, and the commands of a block of a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Programs of which nothing is run with a page, and what runs them instead.  All other commands run.
ELSEWHERE = {"make": "tests/walk.py runs demo, and CI the others", "vllm": "make live-vllm runs its engine",
             "python": "the benches take a machine of their own"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run_page(path: Path, folder: Path, run: Callable[[list[str]], str], names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the blocks of a page in order, in the working folder: specs and named blocks become files, Python
    shares one namespace.

    run: runs a command, and returns what it printed.  What stands below commands as text must be among that; numbers may differ,
    because those of the page are those of a larger model.  Returns the names of Python.
    """
    names, printed = {} if names is None else names, ""
    for language, block in BLOCK.findall(path.read_text()):
        if file := file_of(language, block):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(block)
        elif language == "python":
            exec(compile(block, path.name, "exec"), names)  # noqa: S102
        elif language == "sh":
            printed = "\n".join(run(words) for words in commands(block) if words[0] not in ELSEWHERE)
        elif language == "text" and printed.strip():
            words = {"...", *map(without_numbers, printed.splitlines())}
            wrong = [line for line in block.splitlines() if without_numbers(line) not in words]
            assert not wrong, (wrong, printed)
    return names


def file_of(language: str, block: str) -> str:
    """The file that a block is, by a comment in its first line or by the name of its format; '' for what is no whole file."""
    first, second = [*block.split(maxsplit=2), "", ""][:2]
    if first == "#" and second.endswith((".py", ".yaml")):
        return second
    return f"{second}.yaml" if language == "yaml" and first == "format:" else ""


def without_numbers(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "0", line)).strip()
