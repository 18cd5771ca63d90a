"""An open checkpoint: its layers, its weights one at a time, and a report of what is in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.sources import FolderSource, GgufSource, Shapes, Source
from qdsl.checkpoint.files import checksums, components
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.headers import Headers
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.text import Displayed, byte_text, counted, html_table, nearest_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qdsl.runtime.weight.packed import PackedWeight

SHOWN = 20                                                       # problems to print
FEW = 8                                                          # names to list in a message


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointReport(Displayed):
    """The contents of a checkpoint.

    packed: by 'format.storage parameters', the number of layers, weights and bytes.  groups: weights that are coded together, by
    group name.  plain: tensors of plain numbers and their bytes.  unrecognised: layers, and why.
    """

    path: Path
    packed: Mapping[str, tuple[int, int, int]]
    groups: Mapping[str, Sequence[str]]
    plain: Mapping[str, int]
    unrecognised: Mapping[str, str]
    problems: Sequence[str] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes for _, _, nbytes in self.packed.values()) + sum(self.plain.values())

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """What is in the checkpoint, by format, then its problems."""
        rows: list[tuple[object, ...]] = [(label, count, weights, byte_text(nbytes)) for label, (count, weights, nbytes)
                                          in self.packed.items()]
        rows += [("plain tensors", len(self.plain), "", byte_text(sum(self.plain.values())))] if self.plain else []
        rows += [(problem, "", "", "") for problem in self._wrong]
        return str(self.path), ("what", "layers", "weights", "size"), rows

    @property
    def _wrong(self) -> list[str]:
        return [*(f"{name}: {why}" for name, why in self.unrecognised.items()), *self.problems]

    def __str__(self) -> str:
        lines = [str(self.path), *(f"  {counted(count, 'layer')} {label}: {counted(weights, 'weight')} in {nbytes} bytes"
                                   for label, (count, weights, nbytes) in self.packed.items())]
        in_groups = sum(map(len, self.groups.values()))
        lines += [f"  {counted(len(self.groups), 'group')} of {counted(in_groups, 'weight')}"] if self.groups else []
        lines += [f"  {len(self.plain)} plain tensors in {sum(self.plain.values())} bytes"] if self.plain else []
        wrong = self._wrong
        lines += [f"  {problem}" for problem in wrong[:SHOWN]]
        return "\n".join([*lines, *([f"  and {len(wrong) - SHOWN} problems more"] if len(wrong) > SHOWN else [])])


class Checkpoint:
    """A checkpoint's weights by name, read on demand: `with qdsl.open(path) as checkpoint`.

    Layers have the names of their modules, 'model.layers.0.mlp.up_proj', and plain tensors their full names.  In a pipeline of
    several models each name begins with its model's folder, 'transformer/'.  Weights stay valid after `close`.
    """

    def __init__(self, path: Path, sources: Mapping[str, Source]) -> None:
        self.path = path
        self._sources = dict(sources)                            # by name prefix
        self._decoded: tuple[str, dict[str, Tensor]] = ("", {})  # the last decoded group

    def __repr__(self) -> str:
        try:
            layers, plain = self.layers, self.plain
        except CheckpointError as error:                         # of settings that contradict tensors
            return f"Checkpoint({error})"
        labels = Counter(f"{layer.format}.{layer.storage}" if layer.format else "unrecognised" for layer in layers.values())
        labels.update(f"{group.format} in groups" for group in self.groups.values())
        packed = ", ".join(f"{count} {label}" for label, count in labels.items()) or "none"
        return f"Checkpoint({self.path}: packed layers: {packed}; {counted(len(plain), 'plain tensor')})"

    def _repr_html_(self) -> str:
        try:
            return html_table(*self.report().table())
        except CheckpointError:                                  # of a file that is closed
            return html_table(repr(self), (), ())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files; tensors that were read stay valid."""
        for source in self._sources.values():
            source.close()

    def keys(self) -> list[str]:
        """The names of all weights and plain tensors; `checkpoint[name]` is `weight(name)`, and iteration gives the names."""
        return [*self.layers, *(part for group in self.groups.values() for part in self._parts(group)), *self.plain]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> PackedWeight | Tensor:
        return self.weight(name)

    @property
    def components(self) -> list[str]:
        """The folders of a pipeline's models; empty if the checkpoint is one model."""
        return [prefix.removesuffix("/") for prefix in self._sources if prefix]

    def component(self, name: str) -> Checkpoint:
        """One model of a pipeline.  Raises CheckpointError for a name that it does not have."""
        if f"{name}/" not in self._sources:
            raise CheckpointError(f"{self.path}: no model {shown(name)}; there are {', '.join(self.components) or 'none'}")
        return Checkpoint(self.path / name, {"": self._sources[f"{name}/"]})

    @property
    def source(self) -> Source:
        """The source of a single model's weights.  Raises CheckpointError for a pipeline of several."""
        if list(self._sources) != [""]:
            raise CheckpointError(f"{self.path}: a pipeline of {', '.join(self.components)}; choose one of these folders")
        return self._sources[""]

    def use_shapes(self, shapes: Shapes) -> None:
        """Use these shapes for layers of a single model that do not state their own.  Raises CheckpointError for a pipeline."""
        self.source.use_shapes(shapes)
        self.__dict__.pop("layers", None)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The quantized layers by name, including unknown formats, with the reason in `why`."""
        return {prefix + name: layer for prefix, source in self._sources.items() for name, layer in source.layers.items()}

    @cached_property
    def plain(self) -> list[str]:
        """The names of the tensors of plain numbers."""
        return [prefix + name for prefix, source in self._sources.items() for name in source.plain]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Groups of weights in one entropy code, as DFloat11's, by name."""
        return {prefix + group.name: group for prefix, source in self._sources.items() for group in source.groups}

    def layer(self, name: str) -> Layer:
        """A packed layer, by the name of its module or of its weight.  Raises CheckpointError for an unknown name."""
        for key in (name, name.removesuffix(".weight")):
            if key in self.layers:
                return self.layers[key]
        is_plain = not {name, f"{name}.weight"}.isdisjoint(self.plain)
        hint = "; it is a plain tensor, which `weight` reads" if is_plain else self._nearby(name, self.layers)
        raise CheckpointError(f"{self.path}: no packed layer {shown(name)}{hint}")

    def weight(self, name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
               expert: int | None = None) -> PackedWeight | Tensor:
        """A weight as the checkpoint stores it: a PackedWeight, or a plain tensor; dtype: decode it to [N, K] in that dtype.

        On a CPU it is mapped, not copied.  Experts of a stack are one PackedWeight of E * N rows; expert: only that one.  A
        weight of a DF11 group is decoded, and flat if no shape is known.  Raises CheckpointError, and FormatError if experts do
        not form one weight.
        """
        weight: Any = self._stored(name, expert)
        if device is not None:
            weight = weight.to(device)
        if dtype is None:
            stored: PackedWeight | Tensor = weight
            return stored
        dense: Tensor = weight.format.dequantize(weight, dtype) if hasattr(weight, "format") else weight.to(dtype)
        return dense

    def weights(self, device: torch.device | str | None = None) -> Iterator[tuple[str, PackedWeight | Tensor]]:
        """All weights and plain tensors with their names, one at a time.  Raises as `weight` does."""
        for name in self.keys():
            yield name, self.weight(name, device)

    def report(self) -> CheckpointReport:
        """The quantized layers by format, the plain tensors, and the problems."""
        packed: dict[str, Counter[str]] = {}
        sources = {prefix: source.described() for prefix, source in self._sources.items()}
        for source in sources.values():
            for layer in source.layers.values():
                if not layer.why:
                    params = (f"{key}={value}" for key, value in layer.params.items())
                    packed.setdefault(" ".join([f"{layer.format}.{layer.storage}", *params]), Counter()).update(
                        layers=1, weights=math.prod(layer.shape) * (layer.experts or 1),
                        nbytes=sum(map(source.nbytes, layer.tensors.values())))
            for group in source.groups:
                packed.setdefault(f"{group.format} in groups", Counter()).update(
                    layers=len(group.parts), weights=group.numbers, nbytes=sum(map(source.nbytes, group.tensors.values())))
        return CheckpointReport(
            self.path, {label: (counts["layers"], counts["weights"], counts["nbytes"]) for label, counts in packed.items()},
            {prefix + group.name: list(group.parts) for prefix, source in sources.items() for group in source.groups},
            {prefix + name: source.nbytes(name) for prefix, source in sources.items() for name in source.plain},
            {prefix + name: layer.why for prefix, source in sources.items()
             for name, layer in source.layers.items() if layer.why},
            [f"{prefix}{problem}" for prefix, source in sources.items() for problem in (
                *source.problems, *(f"{layer.name}: {text}" for layer in source.layers.values()
                                    for text in (*layer.contradictions, *layer.problems) if text != layer.why),
                *(f"{group.name}: {text}" for group in source.groups for text in group.problems))])

    def _stored(self, name: str, expert: int | None) -> Any:
        for prefix, source in self._sources.items():
            own = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            for key in (own, own.removesuffix(".weight")):
                if key in source.layers:
                    layer = source.layers[key]
                    return source.stacked(layer) if expert is None else source.weights(layer)[expert]
            for group in source.groups:
                if own in group.parts:
                    if self._decoded[0] != prefix + group.name:
                        self._decoded = prefix + group.name, source.decoded(group)
                    return self._decoded[1][own]
            if own in source.plain or any(own in layer.others.values() for layer in source.layers.values()):
                return source.tensor(own)                        # of a packed layer for example the bias
        raise CheckpointError(f"{self.path}: no weight {shown(name)}{self._nearby(name, (*self.layers, *self.plain))}")

    def _parts(self, group: Group) -> Iterator[str]:
        prefix = next(prefix for prefix, source in self._sources.items() if group in source.groups)
        return (prefix + part for part in group.parts)

    def _nearby(self, name: str, names: Iterable[str]) -> str:
        """Text for a message: what lies in a module of that name, or the names that are most alike."""
        inside = [candidate for candidate in names if candidate.startswith(f"{name}.")]
        if inside:
            more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
            return f"; it holds {', '.join(map(shown, inside[:3]))}{more}"
        plain = [candidate.removesuffix(".weight") for candidate in names]
        if alike := nearest_names(name.removesuffix(".weight"), plain):
            return f"; did you mean {' or '.join(map(shown, alike))}?"
        return f"; there are {', '.join(map(shown, plain))}" if 0 < len(plain) <= FEW else ""


def open_checkpoint(path: Path, shapes: Shapes | None = None, verify: bool = False) -> Checkpoint:
    """Opens a checkpoint: a folder of safetensors, a pipeline of such folders, a .safetensors file, or a GGUF file.

    verify: compare all files with the checksums that qdsl wrote with them.  Raises CheckpointError for invalid files, OSError if
    they cannot be read.
    """
    if verify:
        checksums.check(path)
    if (gguf := components.gguf(path)) is not None:
        return Checkpoint(path, {"": GgufSource(gguf)})
    sources: dict[str, Source] = {}
    try:
        for name in components.names(path):
            sources[f"{name}/" if name else ""] = FolderSource(Folder(path / name if name else path), shapes)
    except Exception:
        for source in sources.values():
            source.close()
        raise
    return Checkpoint(path, sources)


def open_headers(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
                 metadata: Mapping[str, str] | None = None, config: Mapping[str, Any] | None = None,
                 weight_shapes: Shapes | None = None) -> Checkpoint:
    """Opens a checkpoint of which only headers exist; its weights are on meta."""
    folder = Headers(names, dtypes, shapes, metadata, config)
    return Checkpoint(folder.path, {"": FolderSource(folder, weight_shapes)})
