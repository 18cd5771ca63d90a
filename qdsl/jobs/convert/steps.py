"""Converts the weights of one layer and writes their tensors into a new file, in a worker process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import torch

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.rules import numbers, says_extents
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Chunks, bytes_of, shown
from qdsl.checkpoint.report import worker
from qdsl.host import progress
from qdsl.jobs.convert.change import LayerChange, small_tensors
from qdsl.jobs.convert.target import converted_weight, layer_format, weight_values
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.gguf.quality import Sums, quantization_error
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.transforms import fold_transforms

CHUNK = 1 << 19                                                  # weights that are decoded at a time to be compared


def write_change(step: LayerChange, out: BinaryIO) -> Sums | None:
    """Convert a layer and write its tensors; returns the sums of signal and noise, None where values are unchanged.

    Raises RewriteError where a storage cannot hold a layer after all, CheckpointError and OSError.
    """
    layer, cost = step.layer, Sums()
    own_bytes = step.nbytes / (layer.experts or 1)
    for expert, (before, packed) in enumerate(_converted(step, own_bytes)):
        own, small = _bytes(step, packed)
        assert own.keys() | small.keys() == step.to.keys(), layer.name
        for name, data in own.items():
            assert data.nbytes * (layer.experts or 1) == step.to[name].nbytes, (layer.name, name)
            _put(out, step.to[name].start + expert * data.nbytes, data)
        for name, data in small.items() if expert == 0 else ():
            assert data.nbytes == step.to[name].nbytes, (layer.name, name)
            _put(out, step.to[name].start, data)
        if before is not None:
            cost += _counted_error(step, before, packed, own_bytes)
    return None if step.aim.is_exact(layer) else cost


def converted_tensors(step: LayerChange) -> tuple[dict[str, Chunks], Sums | None]:
    """The tensors of a converted layer by their names in its storage, and what `write_change` returns.  Raises as it does."""
    nbytes = math.prod(step.layer.shape)
    [(before, packed)] = _converted(step, nbytes)
    own, small = _bytes(step, packed)
    shapes = {name: tuple(packed.tensors[name].shape) if name in own else entry.shape for name, entry in step.to.items()}
    parts = {name: Chunks(step.to[name].dtype, shapes[name], [data]) for name, data in (own | small).items()}
    return parts, None if before is None else _counted_error(step, before, packed.decode_streams(), nbytes)


def _time_share(step: LayerChange) -> float:
    """The share of a step's time that its weights take until they are converted; the rest is that of measuring the error."""
    if step.aim.is_exact(step.layer):
        return 1.0
    return 0.9 if any(variant.importance for variant in layer_format(step.layer, step.aim).variants.values()) else 0.5


def _counted_error(step: LayerChange, before: torch.Tensor, packed: PackedWeight, nbytes: float) -> Sums:
    with progress.step_share(nbytes * (1 - _time_share(step)), before.shape[0]):
        return error_of(before, packed)


def _converted(step: LayerChange, nbytes: float) -> Iterator[tuple[torch.Tensor | None, PackedWeight]]:
    """Every weight of a layer: the values that are quantized, None where they are kept, and the weight after the conversion.

    nbytes: those of a weight, as progress counts them.
    """
    folder, layer = worker.folder_of(step.source), step.layer
    shared, share = largest_magnitude(folder, step.sharing) if step.sharing else None, _time_share(step)
    for expert, weight in enumerate(weights(folder, layer)):
        try:
            before = None if step.aim.is_exact(layer) else weight_values(weight)
            if before is not None and step.is_folded:
                before = fold_transforms(before, layer.transforms, folder.tensor).float()
            with progress.step_share(nbytes * share, math.prod(layer.shape)):
                packed = converted_weight(weight, layer, step.aim, shared, before, expert)
        except FormatError as error:
            hint = f"; `--skip {layer.name}` leaves it plain" if step.aim.is_from_plain else ""
            raise RewriteError(f"{folder.path}: layer {shown(layer.name)}: {layer.format}.{layer.storage} cannot be "
                               f"{step.aim.storage}: {error}{hint}") from None
        yield before, packed


def largest_magnitude(folder: Folder, layers: Sequence[Layer]) -> float | None:
    """The largest magnitude of the weights of layers; None where all are zero or some are not finite."""
    largest = 0.0
    for layer in layers:
        [weight] = weights(folder, layer)
        if (whole := weight_values(weight)).numel():
            largest = max(largest, -float(whole.amin()), float(whole.amax()))
            if not math.isfinite(largest):
                return None
    return largest or None


def error_of(before: torch.Tensor, after: PackedWeight) -> Sums:
    """The error of quantizing values [N, K], decoded some rows at a time."""
    cost, least = Sums(), after.step("N")
    rows = max(1, CHUNK // max(1, before.shape[1]) // least) * least
    for start in range(0, before.shape[0], rows):
        part = after.cut("N", start, min(start + rows, before.shape[0]))
        cost += quantization_error(before[start:start + rows].float(), part.format.dequantize(part, torch.float32))
        progress.advance_units(part.shape[0])
    return cost


def _put(out: BinaryIO, place: int, data: memoryview) -> None:
    out.seek(place)
    out.write(data)


def _bytes(step: LayerChange, weight: PackedWeight) -> tuple[dict[str, memoryview], dict[str, memoryview]]:
    """The tensors of a weight, and the small ones that are stored once per layer."""
    layer, form = step.layer, description_of(weight.format.name)
    if layer.experts is not None and not says_extents(form):
        return {name: bytes_of(tensor.t().contiguous() if layer.transposed else tensor)
                for name, tensor in weight.tensors.items()}, {}
    single = {name: float(weight.tensors[name]) for name in numbers(form)}
    small = small_tensors(layer, weight.format, weight.params, step.settings, single)
    return ({name: bytes_of(tensor.t().contiguous() if step.is_transposed else tensor)
             for name, tensor in weight.tensors.items() if name not in single},
            {name: memoryview(data) for name, (_, _, data) in small.items()})
