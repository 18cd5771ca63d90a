"""What the metadata of headers say of single weights: JSON under a weight's name, whose tensors have names of their own.

torchao writes it so: the weight 'mlp.up_proj.weight' lies in 'mlp.up_proj._weight_qdata' and 'mlp.up_proj._weight_scale'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.safetensors import CheckpointError, shown, strict_json

TEXT_LIMIT = 1 << 16                                             # characters that say one weight
DEPTH = 16
PREFIX = "_weight_"                                                 # what names of a weight's tensors begin with, in aliases


class Stated:
    """The texts of a folder's files by the names of weights, which are names of no tensor; read when they are asked for."""

    def __init__(self, folder: Folder) -> None:
        self._texts: dict[str, tuple[str, str]] = {}
        self._others: dict[str, str] = {}                        # a second file that says something else
        for file in folder.files():
            for name, text in file.header.metadata.items():
                if name in folder or name in folder.missing:
                    continue
                where = f"{file.path}: {shown(name)} of the header's metadata"
                if self._texts.setdefault(name, (where, text))[1] != text:
                    self._others.setdefault(name, file.path.name)

    def cut(self, module: str, leaf: str) -> tuple[str, str] | None:
        """The weight that a tensor is of, and its name as one of a weight called 'weight'; None where no header names it."""
        places = [place for place, letter in enumerate(leaf) if letter == "_" and place > 1] if leaf[:1] == "_" else []
        for place in reversed(places):
            name = f"{module}.{leaf[1:place]}"
            if name in self._texts:
                return name.removesuffix(".weight"), "_weight" + leaf[place:]
        return None

    def name(self, module: str) -> str | None:
        """What a module's weight is called, of which something is said; None where nothing is."""
        return next((name for name in (f"{module}.weight".lstrip("."), module) if "." in name and name in self._texts), None)

    def text(self, name: str) -> str:
        """What is said of a weight."""
        return self._texts[name][1]

    def settings(self, module: str, leaves: Collection[str]) -> dict[str, Any] | None:
        """What is said of a module's weight that lies in these tensors; None where nothing is.

        Raises CheckpointError where it is no JSON object, or files differ in it.
        """
        name = self.name(module)
        if name is None or not any(leaf.startswith(PREFIX) for leaf in leaves):
            return None
        where, text = self._texts[name]
        if name in self._others:
            raise CheckpointError(f"{where}: {self._others[name]} says something else")
        if len(text) > TEXT_LIMIT:
            raise CheckpointError(f"{where}: {len(text)} characters are over the limit of {TEXT_LIMIT}")
        found = strict_json(text.encode(), where, depth=DEPTH)
        if not isinstance(found, dict):
            raise CheckpointError(f"{where}: not a JSON object")
        return found


def flat(settings: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """Settings within settings as one mapping, their names joined by dots."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{head}{key}.") if isinstance(value, Mapping) else {head + key: value}
    return found
