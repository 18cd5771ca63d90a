"""Words, numbers and operators of the grammars inside a spec's scalars."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdsl.compiler.spec.source import Problem, Text

MAX_LENGTH = 2000
_TOKEN = re.compile(r"[ \t\n]*(?:(?P<float>\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)|(?P<int>\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
                    r"|(?P<op>\*\*|//|[-+*/%^()\[\]{},<:=.;]))")


class GrammarError(Exception):
    """A scalar that does not parse; `problem` has the position and what was expected."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.message)


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its kind ('float', 'int', 'name', 'op' or 'end'), and where it begins and ends."""

    kind: str
    text: str
    begin: int
    end: int


def tokens(text: Text, begin: int, end: int) -> list[Token]:
    """The tokens of a part of a text, the last one 'end'.  Raises GrammarError."""
    if end - begin > MAX_LENGTH:
        raise GrammarError(Problem(f"longer than {MAX_LENGTH} characters", text.at(begin, begin + 1)))
    read: list[Token] = []
    at = begin
    stop = begin + len(text.value[begin:end].rstrip(" \t\n"))
    while at < stop:
        match = _TOKEN.match(text.value, at, stop)
        if match is None:
            at += len(text.value[at:stop]) - len(text.value[at:stop].lstrip(" \t\n"))
            raise GrammarError(Problem(f"unexpected character {text.value[at]!r}", text.at(at, at + 1)))
        kind = match.lastgroup or "op"
        read.append(Token(kind, match.group(kind), match.start(kind), match.end()))
        at = match.end()
    return [*read, Token("end", "", stop, stop)]
