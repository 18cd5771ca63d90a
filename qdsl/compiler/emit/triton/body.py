"""Collects lines of a kernel by loop level, and prints them as nested blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count, groupby

from qdsl.compiler.emit.lines import indent
from qdsl.compiler.ir.program import UnrolledDigit

AND = " and "                                                    # between the conditions of a line


@dataclass(slots=True)
class KernelBody:
    """Lines by loop, each under conditions or '': level 0 is before the units, level 1 in a unit, then the lanes."""

    levels: list[list[tuple[str, str]]] = field(default_factory=list)
    arguments: frozenset[str] = frozenset()
    at: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, level: int, target: str, text: str, guard: str = "") -> str:
        """`target = text` under conditions; equal texts at the same place are computed once."""
        for other, line in self.levels[level]:
            if other == guard and line.split(" = ", 1)[1:] == [text]:
                return line.split(" = ", 1)[0]
        taken = {line.split(" = ", 1)[0] for rows in self.levels for other, line in rows if not _exclude(other, guard)}
        names = chain([target], (f"{target}{i}" for i in count(1)))
        free = next(word for word in names if word not in taken and word not in self.arguments)
        self.levels[level].append((guard, f"{free} = {text}"))
        self.at[free, guard] = level
        return free

    def sees(self, variable: str, guard: str) -> bool:
        """Whether a variable is set whenever these conditions hold."""
        return any(other == variable and _terms(condition) <= _terms(guard) for other, condition in self.at)

    def level(self, variable: str, guard: str | None = None) -> int:
        """The innermost loop that sets a variable, under these conditions or (None) under any."""
        if guard is not None and self.sees(variable, guard):
            return max(at for (other, condition), at in self.at.items()
                       if other == variable and _terms(condition) <= _terms(guard))
        return max((at for (other, _), at in self.at.items() if other == variable), default=0)


def both(first: str, second: str) -> str:
    """The conjunction of two conditions; either may be ''."""
    return AND.join(filter(None, (first, second)))


def _terms(guard: str) -> frozenset[str]:
    return frozenset(filter(None, guard.split(AND)))


def _exclude(one: str, other: str) -> bool:
    """Whether two conditions exclude each other: one requires a tensor, the other its absence."""
    return any(a != b and a.split(" ")[0] == b.split(" ")[0] for a in _terms(one) for b in _terms(other))


def print_nested(body: KernelBody, lanes: list[UnrolledDigit], tail: list[str]) -> list[str]:
    """The levels of a unit as nested loops around `tail`."""
    lines = tail
    for level in reversed(range(1, len(body.levels))):
        lines = [*print_guarded(body.levels[level]), *lines]
        if level > 1:
            lane = lanes[level - 2]
            lines = [f"for {lane.name} in tl.static_range({lane.extent}):", *indent(lines)]
    return lines


def print_guarded(rows: list[tuple[str, str]]) -> list[str]:
    """Lines under their conditions; adjacent opposite conditions become if and else."""
    lines: list[str] = []
    for tensor, group in groupby(rows, key=lambda row: row[0].split(" ")[0]):
        split_rows = [(*guard.partition(AND)[::2], line) for guard, line in group]
        if not tensor:
            lines += [line for _, _, line in split_rows]
            continue
        first = split_rows[0][0]
        lines += [f"if {first}:", *indent(print_guarded([(inner, line) for guard, inner, line in split_rows if guard == first]))]
        other = print_guarded([(inner, line) for guard, inner, line in split_rows if guard != first])
        lines += ["else:", *indent(other)] if other else []
    return lines
