"""Lines of a kernel by the loop that they stand in, and from there to nested blocks of text."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from qdsl.emit.lines import indent
from qdsl.ir.program import Lane


@dataclass(slots=True)
class Body:
    """Lines by loop, each under a condition or '': level 0 stands ahead of the units, level 1 in a unit, then the lanes."""

    levels: list[list[tuple[str, str]]] = field(default_factory=list)
    arguments: frozenset[str] = frozenset()
    at: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, level: int, target: str, text: str, guard: str = "") -> str:
        """`target = text` under a condition; the same text at the same place is computed once."""
        for other, line in self.levels[level]:
            if other == guard and line.split(" = ", 1)[1:] == [text]:
                return line.split(" = ", 1)[0]
        taken = {line.split(" = ", 1)[0] for rows in self.levels for other, line in rows if other == guard or not other}
        names = (target, *(f"{target}{i}" for i in range(1, 99)))
        free = next(word for word in names if word not in taken and word not in self.arguments)
        self.levels[level].append((guard, f"{free} = {text}"))
        self.at[free, guard] = level
        return free

    def level(self, variable: str, guard: str | None = None) -> int:
        """The innermost loop in which a variable is set: under a condition, or (None) under any."""
        if guard is not None and (variable, guard) in self.at:
            return self.at[variable, guard]
        return max((at for (other, _), at in self.at.items() if other == variable), default=0)


def nest(body: Body, lanes: list[Lane], tail: list[str]) -> list[str]:
    """The levels of a unit as nested loops around `tail`."""
    lines = tail
    for level in reversed(range(1, len(body.levels))):
        lines = [*guarded(body.levels[level]), *lines]
        if level > 1:
            lane = lanes[level - 2]
            lines = [f"for {lane.name} in tl.static_range({lane.extent}):", *indent(lines)]
    return lines


def guarded(rows: list[tuple[str, str]]) -> list[str]:
    """Lines with the conditions under which they hold; opposite conditions that follow one another become if and else."""
    lines: list[str] = []
    for tensor, group in groupby(rows, key=lambda row: row[0].split(" ")[0]):
        held = list(group)
        first = held[0][0]
        same = [line for guard, line in held if guard == first]
        other = [line for guard, line in held if guard != first]
        lines += [f"if {first}:", *indent(same)] if tensor else same
        lines += ["else:", *indent(other)] if other else []
    return lines
