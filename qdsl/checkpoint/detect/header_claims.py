"""Metadata about single weights in safetensors headers: JSON under a weight's name, whose tensors have other names.

The weight 'mlp.up_proj.weight' is then stored as 'mlp.up_proj._weight_qdata' and 'mlp.up_proj._weight_scale'.  Other producers
write JSON for all layers under one key, or JSON in a tensor of the layer's module.  specs/producers has the names of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown, strict_json
from qdsl.checkpoint.files.strict_json import strict_object
from qdsl.core.producer import Header

TEXT_LIMIT = 1 << 16                                             # most characters of metadata per weight
DEPTH = 16
CODES = ("U8", "I8")                                             # dtypes of codes, whose order only settings tell
PREFIX = "_weight_"                                                 # prefix of a weight's tensors, in aliases


class HeaderClaims:
    """Metadata of weights that have no tensor of their name, from all headers of a folder; read on demand."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._headers = producers().headers
        self._layers: list[tuple[Header, dict[str, Any]]] = []   # for all layers, under one key
        self._texts: dict[str, tuple[str, str]] = {}
        self._others: dict[str, str] = {}                        # a second file with different metadata
        self.wholes: list[tuple[str, dict[str, Any]]] = []       # what stands beside the JSON of all layers, by place
        for file in folder.files():
            for header in self._headers:
                if header.layers and header.layers in file.header.metadata:
                    where = f"{file.path}: {header.layers}"
                    layers = strict_json(file.header.metadata[header.layers].encode(), where, depth=DEPTH)
                    self.wholes += [(where, {key: own for key, own in layers.items() if key != "layers"})] \
                        if isinstance(layers, Mapping) else []
                    layers = layers.get("layers") if isinstance(layers, Mapping) else None
                    self._layers += [(header, layers)] if isinstance(layers, dict) else []
            for name, text in file.header.metadata.items():
                if name in folder or name in folder.missing:
                    continue
                where = f"{file.path}: {shown(name)} of the header's metadata"
                if self._texts.setdefault(name, (where, text))[1] != text:
                    self._others.setdefault(name, file.path.name)

    def cut(self, module: str, leaf: str) -> tuple[str, str] | None:
        """The weight of a tensor, and the tensor's name relative to it; None if no header names the weight."""
        places = [place for place, letter in enumerate(leaf) if letter == "_" and place > 1] if leaf[:1] == "_" else []
        for place in reversed(places):
            name = f"{module}.{leaf[1:place]}"
            if name in self._texts:
                return name.removesuffix(".weight"), "_weight" + leaf[place:]
        return None

    def name(self, module: str) -> str | None:
        """The name of a module's weight, if metadata describe it; else None."""
        return next((name for name in (f"{module}.weight".lstrip("."), module) if "." in name and name in self._texts), None)

    def text(self, name: str) -> str:
        """The metadata of a weight."""
        return self._texts[name][1]

    def settings(self, module: str, tensors: Mapping[str, str]) -> dict[str, Any] | None:
        """The metadata of the module's weight that is stored in these tensors; None without metadata.

        Raises CheckpointError if it is no JSON object, or if files contradict each other.
        """
        if (own := self._of_layer(module, tensors)) is not None:
            return own
        name = self.name(module)
        if name is None or not any(leaf.startswith(PREFIX) for leaf in tensors):
            return None
        where, text = self._texts[name]
        if name in self._others:
            raise CheckpointError(f"{where}: contradicts {self._others[name]}")
        return _settings(text.encode(), where)

    def _of_layer(self, module: str, tensors: Mapping[str, str]) -> dict[str, Any] | None:
        """The settings of a module from its own tensor, else from the key for all layers; None without any.

        A tensor of zeros or of an empty object says nothing beside numbers, as ComfyUI's files have it.
        """
        listed = self._listed(module)
        for leaf in (header.tensor for header in self._headers if header.tensor and header.tensor in tensors):
            file = self._folder.file(tensors[leaf])
            is_coded = "weight" in tensors and self._folder.entry(tensors["weight"]).dtype in CODES
            if (text := file.start(tensors[leaf], TEXT_LIMIT).rstrip(b"\0")) not in (b"", b"{}") or is_coded:
                own = _settings(text, f"{file.path}: tensor {shown(tensors[leaf])}")
                if listed not in (None, own):
                    raise CheckpointError(f"{file.path}: tensor {shown(tensors[leaf])} says {own}, and the header {listed}")
                return own
        return listed

    def _listed(self, module: str) -> dict[str, Any] | None:
        """The settings of a module under the key for all layers; None without any."""
        layer = next((layers[name] for header, layers in reversed(self._layers) for prefix in header.prefixes
                      if module.startswith(prefix) and (name := module.removeprefix(prefix)) in layers), None)
        return dict(layer) if isinstance(layer, Mapping) else None if layer is None else {"format": str(layer)}


def scale_markers() -> list[str]:
    """The last name parts of tensors that mark a file's 8-bit floats as scaled."""
    return [header.marker for header in producers().headers if header.marker]


def _settings(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text.  Raises CheckpointError."""
    if len(text) > TEXT_LIMIT:
        raise CheckpointError(f"{where}: {len(text)} characters are over the limit of {TEXT_LIMIT}")
    return strict_object(text, where, depth=DEPTH)


def flatten_settings(settings: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """Nested settings as one mapping, with names joined by dots."""
    joined: dict[str, Any] = {}
    for key, value in settings.items():
        joined |= flatten_settings(value, f"{head}{key}.") if isinstance(value, Mapping) else {head + key: value}
    return joined
