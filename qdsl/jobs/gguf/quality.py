"""Measures the error of quantization as a signal-to-noise ratio, as numbers and as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from qdsl.core.drawing import drawing, text

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 256                                                      # columns over which ggml takes the mean square
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of squares of weights and of their errors, plain and weighted by importance."""

    signal: float = 0.0
    noise: float = 0.0
    weighted_signal: float = 0.0
    weighted_noise: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def data(self) -> dict[str, float | None]:
        """Ratios in decibels, None for exact; weighted ones, and ggml's weighted_error, where there is an importance matrix."""
        ratios = {"snr_db": decibels(self.signal, self.noise)}
        if self.weighted_signal:
            ratios["weighted_snr_db"] = decibels(self.weighted_signal, self.weighted_noise)
            ratios["weighted_error"] = self.weighted_noise
        return ratios


def decibels(signal: float, noise: float) -> float | None:
    """Signal to noise in decibels, None without noise: JSON has no infinity."""
    return None if noise == 0.0 else 10 * math.log10(max(signal, 5e-324) / noise)


def quantization_error(weight: Tensor, stored: Tensor, importance: Tensor | None = None) -> Sums:
    """The sums of squares of a weight and of its error.  weight, stored: float32 [N, K]; importance: float32 [K].

    The importance of a weight x in a group of mean square s is importance * sqrt(s + x^2), as in ggml's search for scales.
    """
    import torch

    error = stored - weight
    squares = (_squared(weight), _squared(error))
    if importance is None or not weight.numel():
        return Sums(*squares)
    columns = weight.shape[1]
    groups = weight.square().view(weight.shape[0], -1, GROUP if columns % GROUP == 0 else columns)
    matter = (importance * torch.sqrt(groups.mean(2, keepdim=True) + groups).view_as(weight)).sqrt_()
    return Sums(*squares, _squared(matter * weight), _squared(matter * error))


def _squared(values: Tensor) -> float:
    """The sum of the squares of float32 [N, K], summed over rows in float32 where no square leaves its range."""
    import torch

    rows = torch.linalg.vector_norm(values, dim=1)
    total = float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
    return total if 1e-20 < total < 1e35 else float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def svg(title: str, tensors: Sequence[Mapping[str, Any]]) -> str:
    """An SVG picture with a bar for each quantized tensor: name, type, decibels.  The same input gives the same bytes."""
    drawn = [row for row in tensors if row.get("snr_db") is not None]
    colours = {type: COLOURS[i % len(COLOURS)] for i, type in enumerate(dict.fromkeys(row["type"] for row in drawn))}
    most = max([row["snr_db"] for row in drawn] + [10.0])
    body = []
    for i, (type, fill) in enumerate(colours.items()):
        body += [f'<rect x="{20 + 100 * i}" y="40" width="12" height="12" fill="{fill}"/>', text(36 + 100 * i, 50, type)]
    for i, row in enumerate(drawn):
        y = 66 + 14 * i
        width = max(0.0, 400 * row["snr_db"] / most)
        body += [text(350, y + 10, row["name"], "end"),
                 f'<rect x="356" y="{y}" width="{width:.1f}" height="11" fill="{colours[row["type"]]}"/>',
                 text(360 + round(width), y + 10, f"{row['snr_db']:.1f} dB")]
    width, height = max(840, 40 + 100 * len(colours)), 80 + 14 * len(drawn)
    return drawing(title, width, height, body)
