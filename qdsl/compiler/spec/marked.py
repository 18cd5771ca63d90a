"""Strict YAML: plain nodes whose scalars are text with a position in the file.

Only mappings, sequences and scalars are read; nothing is constructed or guessed.  Duplicate keys, anchors, aliases, tags, merge
keys, several documents, folded or escaped scalars and YAML 1.1's booleans are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from qdsl.compiler.spec.source import Problems, Source, Span, Text
from qdsl.core.text import counted

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000
_YAML_1_1_BOOLEANS = frozenset(
    f(word) for word in ("yes", "no", "on", "off", "true", "false") for f in (str.lower, str.upper, str.capitalize))


_KEY = re.compile(r" *[\w-]+:( |$)")                              # a line that begins with a key


@dataclass(frozen=True, slots=True)
class Mapping:
    """A YAML mapping: keys and nodes in the order of the file."""

    span: Span
    items: tuple[tuple[Text, Node], ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A YAML list."""

    span: Span
    items: tuple[Node, ...]


Node = Mapping | Sequence | Text


class _Refused(Exception):
    """Stops reading; the problem is already recorded."""


def read_yaml(source: Source, problems: Problems) -> Node | None:
    """The document of a file, or None if it is not strict YAML; problems are added to `problems`."""
    start = Span(source, 1, 1)
    if len(source.text.encode()) > MAX_BYTES:
        problems.add(start, f"the file is larger than {MAX_BYTES // 1024} KiB, the most that a spec may have")
        return None
    stray = next((i for i, c in enumerate(source.text) if c in "\r\x85\u2028\u2029"), None)
    if stray is not None:
        line = source.text.count("\n", 0, stray) + 1
        problems.add(Span(source, line, 1), f"lines end with a newline only; this one holds {source.text[stray]!r}")
        return None
    reader = _Reader(source, problems)
    try:
        return reader.document()
    except _Refused:
        return None
    except yaml.reader.ReaderError as error:
        before = source.text[:error.position]
        place = Span(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        problems.add(place, f"not YAML: character {error.character!r} is not allowed")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Span(source, mark.line + 1, mark.column + 1) if mark else start
        problem = str(error.problem or error.context)
        if problem.startswith("expected <block end>") and (message := _indentation_problem(source, place)):
            problems.add(place, message)
        else:
            problems.add(place, f"not YAML: {problem}", *_correction_note(problem))
    return None


def _indentation_problem(source: Source, place: Span) -> str:
    """What is wrong with the indentation of a line that begins at a place; '' if it is that of an earlier line."""
    lines = source.text.split("\n")[:place.line]
    own = _indent(lines[-1])
    before = [(number, _indent(line)) for number, line in enumerate(lines[:-1], 1) if line.strip() and line.lstrip()[0] != "#"]
    if not before or place.column != own + 1:
        return ""
    number, indent = before[-1]
    allowed = sorted({depth for _, depth in before if depth <= indent})
    return (f"this line is indented by {counted(own, 'space')}, and line {number} before it by {indent}: indent it by "
            f"{' or '.join(map(str, allowed))}") if own not in allowed else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _correction_note(problem: str) -> tuple[str, ...]:
    """A note with a correction for a common mistake, as in records: `record: j<16: q[j]`."""
    remedies = {"mapping values": "text with a colon and a space needs quotes, such as record: \"j<8: q[n, j]\"",
                "expected ',' or '}'": "text with brackets or commas needs quotes between { and }, such as {q: \"u4[n, k]\"}",
                "found character '\\t'": "indent with spaces, not with a tab"}
    return tuple(remedy for begin, remedy in remedies.items() if problem.startswith(begin))


class _Reader:
    def __init__(self, source: Source, problems: Problems) -> None:
        self.source = source
        self.problems = problems
        self.lines = source.text.split("\n")
        self.events = yaml.parse(source.text, Loader=yaml.SafeLoader)
        self.nodes = 0

    def refuse(self, span: Span, message: str, *notes: str) -> _Refused:
        self.problems.add(span, message, *notes)
        return _Refused()

    def span(self, event: yaml.Event) -> Span:
        """The event's first line, from its start mark to its end mark."""
        start, end = _marks(event)
        length = end.column - start.column if end.line == start.line else 1
        return Span(self.source, start.line + 1, start.column + 1, max(1, length))

    def document(self) -> Node | None:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self.refuse(self.span(event), "a spec is one YAML document; a second one begins here")
                root = self.node(next(self.events), 0)
        if root is None:
            self.problems.add(Span(self.source, 1, 1), "the file is empty; a spec begins with 'format: NAME'")
        return root

    def node(self, event: yaml.Event, depth: int) -> Node:
        span = self.span(event)
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self.refuse(span, f"more than {MAX_NODES} nodes or {MAX_DEPTH} levels: this is not a spec")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self.refuse(span, "anchors and aliases are not allowed: write the value out")
        if tag := getattr(event, "tag", None):
            raise self.refuse(span, f"tags are not allowed: remove '{tag}'")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, span)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(span, tuple(self.children(yaml.SequenceEndEvent, depth)))
        return self.mapping(span, depth)

    def children(self, end: type[yaml.Event], depth: int) -> list[Node]:
        nodes: list[Node] = []
        while not isinstance(event := next(self.events), end):
            nodes.append(self.node(event, depth + 1))
        return nodes

    def mapping(self, span: Span, depth: int) -> Mapping:
        nodes = self.children(yaml.MappingEndEvent, depth)
        items: list[tuple[Text, Node]] = []
        seen: dict[str, Span] = {}
        for key, value in list(pairwise(nodes))[::2]:
            if not isinstance(key, Text):
                raise self.refuse(key.span, "a key is a plain word, not a list or a mapping")
            if key.value in seen:
                self.problems.add(key.span, f"'{key.value}' stands here twice", f"first at {seen[key.value]}")
            if key.value == "<<":
                self.problems.add(key.span, "merge keys are not allowed: write the values out")
            seen.setdefault(key.value, key.span)
            items.append((key, value))
        return Mapping(span, tuple(items))

    def scalar(self, event: yaml.ScalarEvent, span: Span) -> Text:
        start, end = _marks(event)
        first, column = start.line, start.column
        if event.style == ">":
            raise self.refuse(span, "folded text ('>') loses its lines: use '|'")
        if event.style == "|":
            starts = [self.start(first + 1 + i, line) for i, line in enumerate(event.value.split("\n"))]
            return Text(event.value, tuple(starts))
        if end.line != first:
            following = self.lines[first + 1]
            own, before = _indent(following), _indent(self.lines[first])
            if own > before and not event.style and _KEY.match(following):
                raise self.refuse(Span(self.source, first + 2, own + 1, len(following.strip())),
                                  f"a line indented by {counted(own, 'space')}, so that it continues line {first + 1}, "
                                  f"which is indented by {before}: indent both alike")
            raise self.refuse(span, "this text runs over several lines: use '|', or put it on one line")
        if event.style in ("'", '"'):
            raw = self.lines[first][column + 1:end.column - 1]
            if raw != event.value:
                raise self.refuse(span, "escapes are not allowed in quoted text: write it plainly")
            return Text(event.value, (Span(self.source, first + 1, column + 2),))
        if event.value in _YAML_1_1_BOOLEANS and event.value not in ("true", "false"):
            self.problems.add(span, f"'{event.value}' is a boolean to some YAML readers: quote it, or write true or false")
        return Text(event.value, (Span(self.source, first + 1, column + 1),))

    def start(self, row: int, value: str) -> Span:
        """The position in the file at which a line of literal text begins, after the indentation that YAML removes."""
        raw = self.lines[row] if row < len(self.lines) else ""
        return Span(self.source, row + 1, max(0, len(raw) - len(value)) + 1)


def _marks(event: yaml.Event) -> tuple[Any, Any]:
    """The begin and end marks of an event, which the parser always sets."""
    assert event.start_mark is not None and event.end_mark is not None
    return event.start_mark, event.end_mark
