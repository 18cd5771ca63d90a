"""What a process does to a layer: weights out of the old files, into their places in a new one as another storage has them."""

from __future__ import annotations

from typing import BinaryIO

import torch

from qdsl.checkpoint.layer_weights import weights
from qdsl.checkpoint.safetensors import bytes_of, shown
from qdsl.checkpoint.worker import there
from qdsl.convert.plan import Change, become
from qdsl.quantize.quality import Sums, measured
from qdsl.rewrite import RewriteError
from qdsl.runtime.packed import FormatError


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
            raise RewriteError(f"{folder.path}: layer {shown(step.layer.name)} cannot be {step.aim.storage}: {error}") from None
        assert found.tensors.keys() == step.to.keys(), step.layer.name
        for name, entry in step.to.items():
            data = bytes_of(found.tensors[name])
            assert data.nbytes * (step.layer.experts or 1) == entry.nbytes, (step.layer.name, name)
            out.seek(entry.start + expert * data.nbytes)
            out.write(data)
        if not step.aim.exact(step.layer):
            before, after = (each.format.dequantize(each, torch.float32) for each in (weight, found))
            cost += measured(before, after)
    return None if step.aim.exact(step.layer) else cost
