"""Problems of a whole checkpoint: plain modules that should be quantized, settings without tensors, missing files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.judge import brief, needs_no_settings
from qdsl.checkpoint.detect.layer import Layer, UnquantizedModule
from qdsl.checkpoint.detect.quantization import Quantization, Scheme
from qdsl.checkpoint.detect.rules import OWN, is_same
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.places import FOLDER_VARIABLE
from qdsl.core.stored import Description
from qdsl.core.text import counted

HEAD = "lm_head"                                                 # may share the embedding's weight


@dataclass(frozen=True, slots=True)
class Report:
    """The settings of a folder, and the checks of its layers against them.

    quantizations: from its files, the decisive one first.  groups: weights in one entropy code.
    """

    folder: Folder
    quantizations: Sequence[Quantization]
    groups: Sequence[Group]
    formats: Sequence[Description]

    @property
    def first(self) -> Quantization | None:
        """The decisive settings, or None."""
        return self.quantizations[0] if self.quantizations else None

    def left(self, modules: Mapping[str, Mapping[str, str]], layers: Mapping[str, Layer]) -> list[UnquantizedModule]:
        """Modules with plain matrices; suspicious if no rule excludes them although similar modules are quantized."""
        quantized = {_pattern(name) for name, layer in layers.items() if layer.format}
        plain: list[UnquantizedModule] = []
        for name, tensors in modules.items():
            full = tensors.get("weight", "")
            if not full or full in self.folder.missing or len(self.folder.entry(full).shape) < 2:
                continue
            scheme = self.first.scheme(name) if self.first else Scheme({})
            problem = ""
            if scheme.settings is not None and self.first is not None and name in self.first.layers:
                problem = f"plain, though {self.first.source} has settings for it"
            elif scheme.settings is not None and self.first is not None and _pattern(name) in quantized:
                problem = f"plain, though {self.first.source} has no rule for that, and others of its kind are quantized"
            plain.append(UnquantizedModule(name, scheme.by if scheme.settings is None else "", problem))
        return plain

    def problems(self, layers: Mapping[str, Layer], modules: Collection[str]) -> list[str]:
        """The problems of the whole checkpoint, which change no number.  modules: of all tensors, including plain ones."""
        problems = [problem for quantization in self.quantizations for problem in quantization.problems]
        if self.first is not None:
            problems += self._without_tensors(self.first, modules)
            is_read = layers or (self.groups and self.first.method == OWN) or self._unknown_format(self.first)
            if not is_read:
                problems.append(f"{self.first.source} says {brief(self.first.settings)}, but no tensor is quantized")
        problems += [problem for other in self.quantizations[1:] for problem in _differing(self.quantizations[0], other)]
        shards = list(self.folder.missing.values())
        return [*problems, *(f"{shard} is missing, with {counted(shards.count(shard), 'tensor')}"
                             for shard in dict.fromkeys(shards))]

    def notes(self, modules: Collection[str]) -> list[str]:
        """What is wrong in the index, and entries of the decisive settings' lists that name no module.  modules: of all tensors.

        A head that shares the embedding's weight has no tensor, and lists name it nevertheless.
        """
        names = {name[:end] for name in modules for end in (*(i for i, letter in enumerate(name) if letter == "."), None)}
        entries = [] if self.first is None else self.first.unmatched(names)
        return [*self.folder.notes, *(f"{shown(entry)} in the lists of {self.first.source} names no layer" for entry in entries
                                      if self.first is not None and HEAD not in entry)]

    def contradictions(self, layers: Mapping[str, Layer]) -> list[str]:
        """Settings of the whole checkpoint that name another format than its tensors have, or none that is known."""
        if self.first is None:
            return []
        unknown = self._unknown_format(self.first)
        return [*self._wrong_format(self.first, layers),
                *([f"{self.first.source} says {brief(self.first.settings)}, and {unknown}"] if unknown else [])]

    def _unknown_format(self, first: Quantization) -> str:
        """The remedy for settings of qdsl with an unknown format; '' for others."""
        name = first.settings.get("format")
        if first.method != OWN or not isinstance(name, str) or name in [format.name for format in descriptions()]:
            return ""
        return f"qdsl has no format {shown(name)}: set {FOLDER_VARIABLE} to the folder of its spec"

    def _without_tensors(self, first: Quantization, modules: Collection[str]) -> list[str]:
        """Layers with settings but without tensors."""
        if not first.layers:
            return []
        names = {name[:end] for name in modules for end in (*(i for i, letter in enumerate(name) if letter == "."), None)}
        return [f"{first.source} has settings for {shown(name)}, of which there is no tensor"
                for name in first.layers if name not in names]

    def _wrong_format(self, first: Quantization, layers: Mapping[str, Layer]) -> list[str]:
        """The problem if qdsl's settings state another format than all layers and groups have."""
        if first.method != OWN or "format" not in first.settings:
            return []
        of_groups = {group.format for group in self.groups}
        formats = {layer.format for layer in layers.values()} | of_groups
        unstated = {format.name for format in self.formats if needs_no_settings(format)} | of_groups
        if not formats or not formats <= unstated or first.settings["format"] in formats:
            return []
        return [f"{first.source} says {brief(first.settings)}; the tensors fit {' and '.join(sorted(formats))}"]


def _differing(first: Quantization, other: Quantization) -> list[str]:
    """Settings that differ between two places."""
    return [f"{other.source} says {key} = {value}, {first.source} {first.settings[key]}" for key, value in other.settings.items()
            if isinstance(value, int | str) and first.settings.get(key) is not None and not is_same(value, first.settings[key])]


def _pattern(name: str) -> str:
    """A module's name with all numbers replaced by *, so that blocks and experts are equal."""
    return re.sub(r"\d+", "*", name)
