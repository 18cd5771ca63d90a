"""Errors of a quantized weight against the weight that it was quantized from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.core.text import Displayed
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.packed import PackedWeight


@dataclass(frozen=True, slots=True, repr=False)
class Report(Displayed):
    """Errors of a requantized weight.

    largest, rms: in units of the weight.  weight: the root mean square of the old weight.
    """

    largest: float
    rms: float
    weight: float

    @property
    def exact(self) -> bool:
        """Whether no number changed."""
        return self.largest == 0

    @property
    def relative(self) -> float:
        """The errors' root mean square divided by the old weight's: 0 for equal weights."""
        return 0.0 if self.rms == 0 else math.inf if self.weight == 0 else self.rms / self.weight

    @property
    def decibels(self) -> float:
        """Signal-to-noise ratio, 20 log10 of the weight's root mean square over the errors'; infinite if nothing changed."""
        if self.rms == 0 or self.weight == 0:
            return math.inf if self.rms == 0 else -math.inf
        return 20 * math.log10(self.weight / self.rms)

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        return "errors of a requantized weight", ("largest", "root mean square", "signal to noise"), [
            (f"{self.largest:.4g}", f"{self.rms:.4g}", f"{self.decibels:.2f} dB")]

    def __str__(self) -> str:
        if self.exact:
            return "the same weight"
        return f"largest error {self.largest:.4g}, root mean square {self.rms:.4g}, signal to noise {self.decibels:.2f} dB"


def weight_error(weight: Tensor, stored: PackedWeight | Tensor) -> Report:
    """The errors of a packed or rounded weight [N, K] against its source floats [N, K], by tiles of rows."""
    largest = noise = signal = 0.0
    for start, stop in [(0, len(weight))] if isinstance(stored, Tensor) else tiles.row_tiles(stored):
        part = weight[start:stop].float()
        decoded = stored.float() if isinstance(stored, Tensor) else stored.format.dequantize(stored.cut("N", start, stop),
                                                                                             torch.float32)
        error = (decoded - part).abs_()
        largest = max(largest, float(error.max()) if error.numel() else 0.0)
        noise += float(error.double().square_().sum())
        signal += float(part.double().square_().sum())
    count = max(1, weight.numel())
    return Report(largest, math.sqrt(noise / count), math.sqrt(signal / count))
