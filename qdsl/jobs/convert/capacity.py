"""Predicts the GPU memory that the models of a checkpoint need in several formats, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path

from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.folder import CONFIG_LIMIT, Folder, read_object
from qdsl.jobs.convert.plain import plain_layers
from qdsl.jobs.engine import RewriteError

AS_STORED = "as stored"
MODELS = ("transformer", "unet", "text_encoder", "vae", "controlnet")  # how names of components with weights begin
LOSSLESS = {"hlane": 10.8, "fix4": 12.0, "fix3": 11.3}            # bits per weight, of normal weights and those of trained models
# The formats that a plan chooses from: those that keep more of the numbers first, of lossless ones the faster.
CHOICES = (AS_STORED, "fix4", "fix3", "hlane", "q8_0", "fp8_channel", "q4_k", "nvfp4_ct")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a model in a format: weights in memory, and the largest weight or block that is decoded at a time, in bfloat16.
    """

    resident: int
    scratch: int

    @property
    def peak(self) -> int:
        """Bytes at most."""
        return self.resident + self.scratch


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a checkpoint.  weights: the number of elements of all tensors.  needs: by possible format."""

    name: str
    weights: int
    needs: Mapping[str, Need]


@dataclass(frozen=True, slots=True)
class Combination:
    """A format for each model by name.  peak: the most bytes that their weights take, without activations."""

    formats: Mapping[str, str]
    peak: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Which formats of a checkpoint's models fit into memory.

    together: the best combination with all models in memory; in_turn: with one at a time and the resident ones; None where
    nothing fits, or where there is only one model.
    """

    models: tuple[Model, ...]
    vram: int
    resident: tuple[str, ...]
    together: Combination | None = None
    in_turn: Combination | None = None
    commands: tuple[str, ...] = ()


def formats_that_fit(path: Path, vram: int, resident: Collection[str] = (), ref: str = "") -> Capacity:
    """The memory needs of a checkpoint, the best combinations of formats that fit, and the commands that write one.

    ref: the name of the checkpoint in commands, by default its path.
    resident: models that stay in memory while others run.  Sizes of lossless formats are predicted: they depend on the weights.
    Raises CheckpointError, RewriteError for a name that no model has, and OSError.
    """
    with components.open_models(path) as folders:
        if missing := _missing_models(path, folders):
            raise RewriteError(f"{path}: no weights in {missing[0]}, which {components.PIPELINE} names")
        if unknown := [name for name in resident if name not in folders]:
            raise RewriteError(f"{path}: no model {unknown[0]!r}: there are {', '.join(filter(None, folders)) or 'not several'}")
        selected = components.selected_models(folders) or tuple(folders)
        models = tuple(_model(name, folder, name in selected) for name, folder in folders.items())
    together = _best_combination(models, vram, [model.name for model in models])
    in_turn = _best_combination(models, vram, resident) if len(models) > 1 else None
    best = together or in_turn
    return Capacity(models, vram, tuple(resident), together, in_turn, _commands(ref or str(path), best.formats if best else {}))


def _missing_models(path: Path, folders: Collection[str]) -> list[str]:
    """Models that a pipeline's index names and that have no folder with weights."""
    index = path / components.PIPELINE
    if not index.is_file():
        return []
    return [name for name, entry in read_object(index, CONFIG_LIMIT).items() if name.startswith(MODELS) and name not in folders
            and isinstance(entry, list) and all(isinstance(part, str) for part in entry)]


def _commands(ref: str, formats: Mapping[str, str]) -> tuple[str, ...]:
    """The commands that write a checkpoint with its models in these formats; each reads the output of the one before."""
    commands = []
    for model, format in formats.items():
        if format != AS_STORED:
            out = f"{ref.rstrip('/').rpartition('/')[2]}{f'-{model}' if model else ''}-{format}"
            verb = "compress" if format in LOSSLESS else "quantize"
            commands.append(f"qdsl {verb} {ref} --format {format}{f' --component {model}' if model else ''} --out {out}")
            ref = out
    return tuple(commands)


def _model(name: str, folder: Folder, is_selected: bool) -> Model:
    entries = {full: folder.entry(full) for full in folder.names()}
    stored = sum(entry.nbytes for entry in entries.values())
    detected = layers(folder)
    # Of models that are packed already, the weights that their tensors stand for.
    packed = [(layer.experts or 1, math.prod(layer.shape)) for layer in detected.layers]
    owned = {own for layer in detected.layers for own in layer.tensors.values()}
    owned |= {own for group in detected.groups for own in group.tensors.values()}
    weights = sum(math.prod(entry.shape) for full, entry in entries.items() if full not in owned)
    weights += sum(experts * numbers for experts, numbers in packed) + sum(group.numbers for group in detected.groups)
    if not is_selected or detected.layers or detected.groups:             # an autoencoder, or quantized already
        decoded = [numbers for _, numbers in packed] + [group.numbers for group in detected.groups]
        return Model(name, weights, {AS_STORED: Need(stored, 2 * max(decoded, default=0))})
    matrix_layers = {layer.name: layer for layer in plain_layers(folder)[0]}
    sizes = {layer.name: (layer.experts or 1, *layer.shape) for layer in matrix_layers.values()}
    plain = {layer.name: sum(entries[full].nbytes for full in layer.tensors.values()) for layer in matrix_layers.values()}
    largest = max((2 * n * k for _, n, k in sizes.values()), default=0)
    needs = {AS_STORED: Need(stored, 0)}
    for format, bits in LOSSLESS.items():
        matrices = [entry for entry in entries.values() if len(entry.shape) in (2, 3) and entry.dtype == "BF16"]
        saved = sum(entry.nbytes - int(math.prod(entry.shape) * bits / 8) for entry in matrices)
        if matrices:
            needs[format] = Need(stored - saved, largest)
    for format in (choice for choice in CHOICES if choice not in needs):
        nbytes_of = {layer: experts * nbytes for layer, (experts, n, k) in sizes.items() if (nbytes := _nbytes(format, n, k))}
        if nbytes_of:
            needs[format] = Need(stored + sum(nbytes - plain[layer] for layer, nbytes in nbytes_of.items()), largest)
    return Model(name, weights, needs)


@cache
def _nbytes(format: str, n: int, k: int) -> int | None:
    """Bytes of a weight [N, K] in a format, None where it cannot be represented."""
    from qdsl.runtime.weight.errors import FormatError

    try:
        weight = import_module(f"qdsl.generated.{format}").FORMAT.empty((n, k))
    except FormatError:
        return None
    return sum(int(tensor.nbytes) for tensor in weight.tensors.values())


def _best_combination(models: Sequence[Model], vram: int, resident: Collection[str]) -> Combination | None:
    """The combination that fits and loses least: by its worst format, then the sum of all, then memory."""
    fitting = (one for one in _combinations(models, resident) if one.peak <= vram)
    ranks = {format: rank for rank, format in enumerate(CHOICES)}

    def loss(combination: Combination) -> tuple[int, int, int]:
        chosen = [ranks[format] for format in combination.formats.values()]
        return max(chosen), sum(chosen), combination.peak

    return min(fitting, key=loss, default=None)


def _combinations(models: Sequence[Model], resident: Collection[str]) -> Iterator[Combination]:
    """All choices of formats; models that are not resident are in memory one at a time."""
    for formats in product(*(model.needs for model in models)):
        needs = {model.name: model.needs[format] for model, format in zip(models, formats, strict=True)}
        stays = sum(needs[name].resident for name in resident)
        turns = [need.scratch if name in resident else need.peak for name, need in needs.items()]
        yield Combination({model.name: format for model, format in zip(models, formats, strict=True)}, stays + max(turns))
