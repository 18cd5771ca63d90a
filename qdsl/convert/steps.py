"""What a process does to a layer: weights out of the old files, into their places in a new one as another storage has them."""

from __future__ import annotations

from typing import BinaryIO

import torch

from qdsl.checkpoint.detect import numbers, says_extents
from qdsl.checkpoint.layer_weights import weights
from qdsl.checkpoint.safetensors import bytes_of, shown
from qdsl.checkpoint.worker import there
from qdsl.convert.plan import Change, become, beside, description
from qdsl.quantize.quality import Sums, measured
from qdsl.rewrite import RewriteError
from qdsl.runtime.packed import FormatError, PackedWeight


def change(step: Change, out: BinaryIO) -> Sums | None:
    """What that cost, signal and noise; None where it is exact.

    Raises RewriteError where a storage cannot hold a layer after all, CheckpointError and OSError.
    """
    folder = there[0]
    cost = Sums()
    for expert, weight in enumerate(weights(folder, step.layer)):
        try:
            found = become(weight, step.layer, step.aim)
        except FormatError as error:
            layer = step.layer
            raise RewriteError(f"{folder.path}: layer {shown(layer.name)}: {layer.format}.{layer.storage} cannot be "
                               f"{step.aim.storage}: {error}") from None
        own, small = _bytes(step, found)
        assert own.keys() | small.keys() == step.to.keys(), step.layer.name
        for name, data in own.items():
            assert data.nbytes * (step.layer.experts or 1) == step.to[name].nbytes, (step.layer.name, name)
            _put(out, step.to[name].start + expert * data.nbytes, data)
        for name, data in small.items() if expert == 0 else ():
            assert data.nbytes == step.to[name].nbytes, (step.layer.name, name)
            _put(out, step.to[name].start, data)
        if not step.aim.exact(step.layer):
            before, after = (each.format.dequantize(each, torch.float32) for each in (weight, found))
            cost += measured(before, after)
    return None if step.aim.exact(step.layer) else cost


def _put(out: BinaryIO, place: int, data: memoryview) -> None:
    out.seek(place)
    out.write(data)


def _bytes(step: Change, weight: PackedWeight) -> tuple[dict[str, memoryview], dict[str, memoryview]]:
    """The tensors of a weight, and the small ones beside it, or beside all experts."""
    layer, known = step.layer, description(weight.format.name)
    if layer.experts is not None and not says_extents(known):
        return {name: bytes_of(tensor.t().contiguous() if layer.turned else tensor)
                for name, tensor in weight.tensors.items()}, {}
    told = {name: float(weight.tensors[name]) for name in numbers(known)}
    small = beside(layer, weight.format, weight.params, step.settings, told)
    return ({name: bytes_of(tensor) for name, tensor in weight.tensors.items() if name not in told},
            {name: memoryview(data) for name, (_, _, data) in small.items()})
