"""The source of a checkpoint's weights: safetensors folders, headers alone, or GGUF files, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.gguf_weights import companions, packed_weight
from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.detect.ledger import Finding
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.transforms import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from qdsl.runtime.weight.packed import PackedWeight

Shapes = Mapping[str, Sequence[int]]


class Source(Protocol):
    """A checkpoint's tensors, as packed layers, groups that are coded together, and plain tensors.

    layers: by module names.  plain: all other tensors.  problems: of the checkpoint and not of one layer.  transforms: of
    modules with plain weights, by name; layers have their own.  findings: settings and
    tensors with which qdsl does not compute.
    """

    path: Path

    @property
    def layers(self) -> Mapping[str, Layer]: ...
    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def plain(self) -> Sequence[str]: ...
    @property
    def problems(self) -> Sequence[str]: ...
    @property
    def transforms(self) -> Mapping[str, Sequence[Transform]]: ...
    @property
    def findings(self) -> Sequence[Finding]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.  Raises CheckpointError for an unknown name."""

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor.  Raises CheckpointError for an unknown name."""

    def tensor(self, name: str) -> Tensor:
        """A tensor of plain numbers, mapped if possible.  Raises CheckpointError."""

    def weights(self, layer: Layer) -> list[PackedWeight]:
        """A layer's weights, one per expert, mapped if possible.  Raises CheckpointError."""

    def stacked(self, layer: Layer) -> PackedWeight:
        """A layer's weight, the experts of a stack as one of E * N rows.  Raises CheckpointError and FormatError."""

    def group_weight(self, group: Group) -> PackedWeight:
        """The weight of a group, with all its numbers in rows of any size.  Raises CheckpointError."""

    def decoded(self, group: Group) -> dict[str, Tensor]:
        """The numbers of a group's weights, one row each, by name.  Raises CheckpointError."""

    def use_shapes(self, shapes: Shapes) -> None:
        """Use these shapes, (N, K) or (E, N, K) by module names, for layers that do not state their own."""

    def described(self) -> Source:
        """The same source for reports: it describes layers that may not be read, too."""

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""


class FolderSource:
    """A `Source`: a folder of safetensors files, a single file, or headers alone.  shapes: as `layers` takes them.

    is_described: settings that contradict tensors are problems; else CheckpointError is raised for the layers.
    """

    def __init__(self, folder: Folder, shapes: Shapes | None = None, is_described: bool = False) -> None:
        self.folder = folder
        self.is_described = is_described
        self.path = folder.path
        self.shapes = shapes

    @cached_property
    def _detected(self) -> Layers:
        return (detected_layers if self.is_described else layers)(self.folder, shapes=self.shapes)

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        return {layer.name: layer for layer in self._detected.layers}

    @property
    def groups(self) -> Sequence[Group]:
        return self._detected.groups

    @cached_property
    def plain(self) -> Sequence[str]:
        coded = {full for group in self.groups for full in group.tensors.values()}
        return [name for name in self._detected.plain if name not in coded]

    @property
    def problems(self) -> Sequence[str]:
        return [*self._detected.problems, *self._detected.contradictions]

    @property
    def transforms(self) -> Mapping[str, Sequence[Transform]]:
        return self._detected.transforms

    @property
    def findings(self) -> Sequence[Finding]:
        return self._detected.findings

    def shape(self, name: str) -> tuple[int, ...]:
        return self.folder.entry(name).shape

    def nbytes(self, name: str) -> int:
        return self.folder.entry(name).nbytes

    def tensor(self, name: str) -> Tensor:
        return self.folder.tensor(name)

    def weights(self, layer: Layer) -> list[PackedWeight]:
        return layer_weights.weights(self.folder, layer)

    def stacked(self, layer: Layer) -> PackedWeight:
        return layer_weights.stacked(self.folder, layer)

    def group_weight(self, group: Group) -> PackedWeight:
        return layer_weights.group_weight(self.folder, group)

    def decoded(self, group: Group) -> dict[str, Tensor]:
        return layer_weights.decoded(self.folder, group)

    def use_shapes(self, shapes: Shapes) -> None:
        self.shapes = {**(self.shapes or {}), **shapes}
        for name in ("_detected", "layers", "plain"):
            vars(self).pop(name, None)

    def described(self) -> FolderSource:
        return FolderSource(self.folder, self.shapes, is_described=True)

    def close(self) -> None:
        self.folder.close()


class GgufSource:
    """A `Source`: a GGUF file, or a set of split ones.  A layer is a tensor of blocks, named without its '.weight'."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.path = path
        self.groups: Sequence[Group] = ()
        self.transforms: Mapping[str, Sequence[Transform]] = {}
        self.problems: Sequence[str] = self.file.notes
        self.findings: Sequence[Finding] = ()

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        by_type = {type: (spec, storage) for spec in descriptions() if "gguf" in spec.detect
                   for type, storage in ((spec.detect["gguf"], ""), *spec.detect.get("repacked", {}).items())}
        recognised: dict[str, Layer] = {}
        for name, entry in self.file.tensors.items():
            if entry.type.name in TORCH or name in self._scales:
                continue
            module = name.removesuffix(".weight")
            format, repacked = by_type.get(entry.type.name, (None, ""))
            problem = entry.problem or ("" if format else f"{entry.type.name} is the type of no format")
            if problem or format is None:
                recognised[module] = Layer(module, others={"weight": name}, why=problem)
                continue
            shape = entry.logical_shape if len(entry.logical_shape) > 1 else (1, *entry.logical_shape)
            storages = next(iter(format.variants.values()))
            storage = repacked or next(iter(storages))
            params = {key: values[0] for key, values in format.params.items()}
            stack = len(shape) == 3
            n_k = (shape[-2], shape[-1]) if stack else (math.prod(shape[:-1]), shape[-1])
            recognised[module] = Layer(module, format.name, storage, params, n_k, shape[0] if stack else None,
                                       {next(iter(storages[storage])): name, **companions(self.file, entry)})
        return recognised

    @cached_property
    def _scales(self) -> set[str]:
        """Tensors that belong to another tensor's blocks, such as NVFP4's scales."""
        return {name for entry in self.file.tensors.values() if entry.type.name not in TORCH and entry.problem is None
                for name in companions(self.file, entry).values()}

    @property
    def plain(self) -> Sequence[str]:
        return [name for name, entry in self.file.tensors.items() if entry.type.name in TORCH and name not in self._scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.entry(name).logical_shape

    def is_reshaped(self, layer: Layer) -> bool:
        """Whether a layer's rows of blocks are not its rows in the model (ComfyUI's orig_shape)."""
        entries = [self.file.tensors[name] for name in layer.tensors.values()]
        return any(entry.orig_shape is not None and entry.orig_shape[-1] != entry.shape[-1] for entry in entries)

    def nbytes(self, name: str) -> int:
        return self.file.entry(name).nbytes

    def tensor(self, name: str) -> Tensor:
        return self.file.tensor(name)

    def weights(self, layer: Layer) -> list[PackedWeight]:
        name = self._blocks(layer)
        if layer.experts is None:
            return [packed_weight(self.file, name)]
        return [packed_weight(self.file, name, expert) for expert in range(layer.experts)]

    def stacked(self, layer: Layer) -> PackedWeight:
        if layer.experts is None or len(layer.tensors) == 1:
            return packed_weight(self.file, self._blocks(layer))
        return layer_weights.joined(layer, self.weights(layer))

    def group_weight(self, group: Group) -> NoReturn:
        """Raises CheckpointError: these files have no groups."""
        raise CheckpointError(f"{self.path}: a GGUF file has no group {shown(group.name)}")

    decoded = group_weight

    def use_shapes(self, shapes: Shapes) -> None:
        """Does nothing: blocks state their shapes."""

    def described(self) -> GgufSource:
        return self

    def close(self) -> None:
        self.file.close()

    def _blocks(self, layer: Layer) -> str:
        layer_weights.check_recognised(self.path, layer)
        return next(iter(layer.tensors.values()))
