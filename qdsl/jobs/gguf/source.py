"""Sources of a quantization: a GGUF file, or the safetensors files of a diffusion model, as tensors that are read by rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qdsl.checkpoint.detect.groups import refuse_groups
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.files.components import PIPELINE
from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.checkpoint.files.gguf import ORIG_SHAPE, SPLIT, GgufFile
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import DIFFUSION
from qdsl.checkpoint.files.safetensors import shown
from qdsl.jobs.gguf import QuantizeError, diffusion
from qdsl.jobs.gguf.author_names import CLASSES, author_parts
from qdsl.jobs.gguf.mixes import Choice, Model, Options, Tensor, choose

if TYPE_CHECKING:
    import torch

# Names by which a checkpoint of a language model is known, of which a GGUF file needs the config and the tokenizer.
_LANGUAGE = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "transformer.wte.weight",
             "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")


class Weights(Protocol):
    """Tensors whose numbers can be read by rows."""

    path: Path
    tensors: dict[str, Tensor]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor as numbers [stop - start, columns], of its own dtype, or float32 where it is in blocks."""


class Source(Weights, Protocol):
    """The tensors of one or several files.  It can be pickled to other processes.  metadata: of the new file."""

    paths: list[Path]
    metadata: dict[str, Value]

    def choices(self, options: Options) -> dict[str, Choice]:
        """The type of every tensor, in the order in which they are written.  Raises QuantizeError."""

    def stored(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Stored rows of a tensor that keeps its type."""

    def ranges(self, name: str) -> list[Range]:
        """The ranges of files that a tensor is read from."""


def open_source(path: Path, architecture: str | None = None, allow_unknown: bool = False) -> Source:
    """Opens a GGUF file or the first of a split one, or a diffusion model: a .safetensors file, a folder of them, a pipeline.

    architecture: of a diffusion model, where its names do not tell.  allow_unknown: go on where its settings or
    tensors change a model and are not computed.  Raises QuantizeError, CheckpointError and OSError.
    """
    if (path / PIPELINE).is_file():
        path = next((path / name for name in ("transformer", "unet") if (path / name).is_dir()), path)
    if path.is_dir() or path.suffix == ".safetensors":
        return Safetensors(path, architecture, allow_unknown)
    if architecture is not None:
        raise QuantizeError(f"{path}: a GGUF file says its architecture itself; --arch is for safetensors")
    return Gguf(path)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Reads counts from a language model's metadata."""

    metadata: dict[str, Value]
    path: Path

    def first(self, key: str, default: int | None = None) -> int:
        """An integer, or the first of a list with one per layer."""
        value = self.metadata.get(key)
        count: Any = default if value is None else value.decoded(1)
        count = count[0] if isinstance(count, list) and count else count
        if type(count) is not int or not 0 <= count < 1 << 31:
            raise QuantizeError(f"{self.path}: metadata {shown(key)} is {'missing' if value is None else 'no count'}")
        return count


def architecture_of(metadata: dict[str, Value], path: Path) -> str:
    """The value of general.architecture.  Raises QuantizeError where it is missing."""
    value = metadata.get("general.architecture")
    if value is None or value.type != "string":
        raise QuantizeError(f"{path}: metadata 'general.architecture' is missing")
    return str(value.decoded())


def model_of(metadata: dict[str, Value], path: Path) -> Model:
    """The metadata that the rules of mixes use.  Raises QuantizeError where they are missing."""
    numbers, name = _Numbers(metadata, path), architecture_of(metadata, path)
    if name == "clip":                                           # llama-quantize reads no counts of it
        return Model(name, 0, 0, 0)
    heads = numbers.first(f"{name}.attention.head_count", 0)
    layers = numbers.first(f"{name}.block_count", 0) * (numbers.first(f"{name}.num_loops", 1) if name == "nanbeige" else 1)
    return Model(name, layers + (name == "graniteswitch"), heads,
                 numbers.first(f"{name}.attention.head_count_kv", heads), numbers.first(f"{name}.expert_count", 0))


NO_MODELS = ("adapter", "imatrix", "controlvector")              # types of files whose numbers stay as they are


class Gguf:
    """A GGUF file whose rows are read on access."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path, copies=True)
        self.path = path
        self.paths = self.file.paths
        self.metadata = {key: value for key, value in self.file.metadata.stored().items() if key not in SPLIT}
        self.tensors = {name: Tensor(name, self.file.entry(name).shape, self.file.entry(name).type.name)
                        for name in self.file.tensors}

    def __reduce__(self) -> tuple[Any, ...]:
        return Gguf, (self.path,)

    def choices(self, options: Options) -> dict[str, Choice]:
        kind = str(self.metadata["general.type"].decoded()) if "general.type" in self.metadata else "model"
        if kind in NO_MODELS or (not self.tensors and "tokenizer.ggml.model" in self.metadata):
            what = f"general.type is {kind!r}" if self.tensors else "a vocabulary alone, without weights"
            raise QuantizeError(f"{self.path}: {what}: there is nothing to quantize")
        architecture = architecture_of(self.metadata, self.path)
        if architecture in DIFFUSION:
            return diffusion.choose(architecture, self.tensors.values(), options, from_gguf=True)
        return choose(model_of(self.metadata, self.path), self.tensors.values(), options)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        import torch

        from qdsl.checkpoint.detect.gguf_weights import companions, packed_weight

        if self.tensors[name].type in TORCH:
            return self.file.rows(name, start, stop)
        if others := companions(self.file, self.file.entry(name)):
            scale = shown(next(iter(others.values())))
            raise QuantizeError(f"{self.path}: tensor {shown(name)}: its scale is in {scale}; such tensors are not quantized "
                                "again")
        packed = packed_weight(self.file, name, None, start, stop)
        return packed.format.dequantize(packed, torch.float32)

    def stored(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.file.rows(name, start, stop)

    def ranges(self, name: str) -> list[Range]:
        return [self.file.range(name)]


class Safetensors:
    """A diffusion model in the files of its authors, or in a folder of diffusers, with the authors' names."""

    def __init__(self, path: Path, architecture: str | None, allow_unknown: bool = False) -> None:
        from qdsl.checkpoint.files.folder import Folder

        self.path = path
        self._arguments = path, architecture, allow_unknown
        self.folder = Folder(path, copies=True)
        self.paths = self.folder.shards
        detected = layers(self.folder)
        refuse_changes(path, detected.findings, allow_unknown)
        refuse_groups(self.folder, detected.groups)
        shapes = {name: self.folder.entry(name).shape for name in self.folder.names()}
        wrapped = {name: shape for name, shape in shapes.items() if name.startswith(diffusion.PREFIX)}
        own, table = CLASSES.get(str(self.folder.config.get("_class_name")), (None, ()))
        self.parts = author_parts(table, wrapped or shapes)
        self.architecture = self._architecture(own, architecture)
        self.tensors, self.metadata = {}, {"general.architecture": Value.of("string", self.architecture)}
        for name, parts in self.parts.items():
            if len(dtypes := {self.folder.entry(part.name).dtype for part in parts}) > 1:
                raise QuantizeError(f"{path}: {', '.join(part.name for part in parts)} become one tensor, and have the dtypes "
                                    f"{', '.join(sorted(dtypes))}")
            shape = shapes[parts[0].name] and (sum(part.stop - part.start for part in parts), *shapes[parts[0].name][1:])
            stored = diffusion.stored_shape(self.architecture, shape)
            self.tensors[name] = Tensor(name, stored, dtypes.pop())
            if stored != shape:
                self.metadata[ORIG_SHAPE + name] = Value.of("i32[]", shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return Safetensors, self._arguments

    def _architecture(self, own: str | None, chosen: str | None) -> str:
        """The architecture: of the folder's class, of its tensor names, or the one that the user chose."""
        if any(name in self.parts for name in _LANGUAGE):
            raise QuantizeError(f"{self.path}: a language model; give the folder of all its files, with config.json and the "
                                "tokenizer")
        if chosen is not None and chosen not in diffusion.ARCHITECTURES:
            raise QuantizeError(f"no architecture '{chosen}' of diffusion models: expected one of "
                                f"{', '.join(diffusion.ARCHITECTURES)}")
        detected = own or diffusion.detect(self.parts)
        if detected is None and isinstance(kind := self.folder.config.get("_class_name"), str):
            raise QuantizeError(f"{self.path}: a folder of diffusers ({shown(kind)[1:-1]}), whose names readers of GGUF files do "
                                f"not know; of {', '.join(CLASSES)} the authors' names are known; of others give the file that "
                                "the authors publish")
        if detected is None and chosen is None:
            raise QuantizeError(f"{self.path}: its names do not tell the architecture; say with --arch which of "
                                f"{', '.join(diffusion.ARCHITECTURES)} it is")
        if chosen is not None and (problem := diffusion.why_contradictory(chosen, detected, self.parts)):
            raise QuantizeError(f"{self.path}: {problem}")
        return str(chosen or detected)

    def choices(self, options: Options) -> dict[str, Choice]:
        if options.mix.default is None:
            raise QuantizeError(f"{self.path}: only GGUF files are copied; give BF16 or F16 as the type")
        choices = diffusion.choose(self.architecture, self.tensors.values(), options, from_gguf=False)
        for name, choice in choices.items():
            type = self.tensors[name].type
            if choice.type not in BY_NAME or type not in (choice.type, *diffusion.FLOATS):
                raise QuantizeError(f"{self.path}: tensor {shown(name)}: {type} cannot be stored"
                                    + (f" as {choice.type}" if choice.type in BY_NAME else " in a GGUF file"))
        return choices

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        import torch

        tensor, parts, place = self.tensors[name], [], 0
        if tensor.rank < 2:
            parts = [self.folder.tensor(part.name).reshape(-1) for part in self.parts[name]]
            if len(parts) > 1:
                parts = [values[part.start:part.stop] for values, part in zip(parts, self.parts[name], strict=True)]
            return torch.cat(parts).view(tensor.rows, tensor.columns)[start:stop]
        for part in self.parts[name]:
            unit = math.prod(self.folder.entry(part.name).shape[1:])
            first, count = part.start * unit, (part.stop - part.start) * unit // tensor.columns
            own = [first + tensor.columns * min(max(0, row - place), count) for row in (start, stop)]
            parts.append(self.folder.numbers(part.name, own[0], own[1]).view(-1, tensor.columns))
            place += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stored(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The same as `rows`."""
        return self.rows(name, start, stop)

    def ranges(self, name: str) -> list[Range]:
        return [self.folder.range(part.name) for part in self.parts[name]]
