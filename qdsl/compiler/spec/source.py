"""Text with positions: spans, scalars with their place in the file, and problems that refer to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Source:
    """A spec file: its name in messages, and its text."""

    name: str
    text: str

    def line(self, number: int) -> str:
        """Line `number`, from 1; empty past the end.  Unprintable characters, which could control a terminal, become '?'."""
        lines = self.text.split("\n")
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        return "".join(c if c.isprintable() or c == "\t" else "?" for c in line)


@dataclass(frozen=True, slots=True)
class Span:
    """`length` characters of one line; line and column count from 1."""

    source: Source = field(repr=False)
    line: int
    column: int
    length: int = 1

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar of the spec.  starts: for each line of the value, its position in the file."""

    value: str
    starts: tuple[Span, ...]

    def __str__(self) -> str:
        return self.value

    @property
    def span(self) -> Span:
        """The whole scalar, cut at the end of its first line."""
        return self.at(0, len(self.value.split("\n", 1)[0]))

    def at(self, begin: int, end: int) -> Span:
        """The span of characters [begin, end) of the value in the file."""
        before = self.value[:begin]
        row = before.count("\n")
        start = self.starts[min(row, len(self.starts) - 1)]
        return Span(start.source, start.line, start.column + begin - (before.rfind("\n") + 1), max(1, end - begin))


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a spec, its place, and notes.  place: None for the whole spec."""

    message: str
    span: Span
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.span}: error: {self.message}"

    def render(self) -> str:
        """The message, the source line with a caret under the text, and the notes."""
        text = self.span.source.line(self.span.line)
        rows = [str(self)]
        if text.strip() and len(text) <= 200:
            number = str(self.span.line)
            caret = "^" * max(1, min(self.span.length, len(text) - self.span.column + 1))
            rows += [f" {number} | {text}", f" {' ' * len(number)} | {' ' * (self.span.column - 1)}{caret}"]
        return "\n".join(rows + [f"  note: {note}" for note in self.notes])


class SpecError(Exception):
    """A spec that cannot be compiled: all its problems, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=lambda p: (p.span.line, p.span.column)))
        super().__init__("\n".join(problem.render() for problem in self.problems))

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Problem, ...]]]:
        return SpecError, (self.problems,)                       # pickles, for other processes


class Problems:
    """The problems so far; passes add to them, and the driver stops between passes if there are any."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def add(self, span: Span, message: str, *notes: str) -> None:
        """Adds a problem at a place of the spec, with notes."""
        self._problems.append(Problem(message, span, notes))

    def stop(self) -> None:
        """Raises SpecError if there is any problem."""
        if self._problems:
            raise SpecError(self._problems)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a word is close, else `; known: ...` for a short list."""
    words = sorted(words)
    near = get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known here: {', '.join(words)}" if 0 < len(words) <= 16 else ""
