"""What a user reads of a format: its name, formula, parameters and storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdsl.core.shapes import values_text
from qdsl.core.text import Displayed
from qdsl.runtime.weight.layout import Variant


@dataclass(frozen=True, slots=True, repr=False)
class Spec(Displayed):
    """A format's name, number types and storages, known without reading a tensor."""

    name: str
    title: str
    source: str
    formula: str
    params: Mapping[str, tuple[int | str, ...]]
    storages: tuple[str, ...]
    variants: Mapping[tuple[int | str, ...], Variant]
    detect: Mapping[str, Any]

    def __str__(self) -> str:
        params = [f"  {name}: one of {values_text(values)}" for name, values in self.params.items()]
        return "\n".join([f"{self.name}: {self.title}", f"  w = {self.formula}", *params,
                          f"  storages: {', '.join(self.storages)}", *([f"  from {self.source}"] if self.source else [])])

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """The formula, parameters and storages."""
        rows = [("w", self.formula), *((name, values_text(values)) for name, values in self.params.items()),
                ("storages", ", ".join(self.storages)), ("source", self.source)]
        return f"{self.name}: {self.title}", ("", ""), [*rows]
