"""The examples in the docstrings of passes: pairs of a spec's lines and what the pass adds to the program.

`shown` compiles a spec of 4-bit codes with a scale per 32 columns, with the lines that the example replaces, and prints what the
pass changes in the text of the program; or what is wrong.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from difflib import unified_diff

import pytest

from qdsl.compiler.ir.program import Program
from qdsl.compiler.ir.text import text
from qdsl.compiler.passes import PASSES, Pass, compile_spec
from qdsl.compiler.spec.schema import parse
from qdsl.compiler.spec.source import SpecError

SPEC = """\
format: example
weight: [N, K]
fields: {{{fields}}}
decode: {decode}
storage:
  p:
    blocks:
      run: k
      record: |
        {record}
{more}
"""
LINES = {"fields": "d: 'f16[n, k // 32]', q: 'u4[n, k]'", "decode": "d * (q - 8)", "record": "d; l<16: q[l] q[l + 16]",
         "more": ""}


def shown(step: Pass, **lines: str) -> None:
    """Print the lines that a pass adds to the program of a spec."""
    before: list[str] = []

    def after(name: str, program: Program) -> None:
        nonlocal before
        if program.storage == "p":
            now = text(program).rstrip().split("\n")
            if name == step.__name__:
                changed = [line[1:].strip() for line in unified_diff(before, now, lineterm="", n=0) if line.startswith("+")]
                print("\n".join([line for line in changed if line and not line.startswith("++")]) or "nothing")
            before = now

    chosen = {**LINES, **lines}
    source = SPEC.format(**{**chosen, "record": chosen["record"].replace("; ", "\n        ")})
    try:
        compile_spec(parse(source, "example"), after)
    except SpecError as error:
        print(str(error).split("\n")[0].partition(": ")[2])


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.__name__)
def test_examples_of_a_pass(step: Pass) -> None:
    """Every pass has one."""
    def own(**lines: str) -> None:
        shown(step, **lines)

    names: dict[str, Callable[..., None]] = {"shown": own}
    [examples] = doctest.DocTestFinder(recurse=False).find(step, step.__name__, globs=names)
    assert examples.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    runner.run(examples, out=output.append)
    assert not runner.failures, "".join(output)
