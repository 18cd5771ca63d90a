"""A layer to convert, as plain data that processes are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.rules import EXPERTS, numbers, small_tensors_for
from qdsl.checkpoint.files.components import within
from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.safetensors import Entry, torch_dtypes
from qdsl.host.progress import COPY
from qdsl.jobs.convert.target import Conversion, becomes_transposed, is_plain_target

if TYPE_CHECKING:
    import torch

    from qdsl.runtime.weight.packed import WeightFormat

LONGEST = -1.1754943508222875e-38                                # a float32 with the longest text


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer to convert, and the places of its new tensors in the new file.

    names: of its tensors in the new file.  settings: values for small tensors next to it, as in the config.  source: the folder
    of the layer.  model: of a pipeline, or ''.  sharing: layers that share a super-scale with it, itself included; empty if it
    has its own.  has_streams: whether some tensors are entropy codes.  Their extents are 0 until `encoded`, a file of
    qdsl/jobs/convert/encoded.py, holds them.
    reads: the ranges of input files that hold the layer and those that share with it.
    """

    layer: Layer
    aim: Conversion
    to: Mapping[str, Entry]
    names: Mapping[str, str]
    settings: Mapping[str, Any]
    source: Path
    model: str = ""
    sharing: tuple[Layer, ...] = ()
    has_streams: bool = False
    encoded: Path | None = None
    reads: tuple[Range, ...] = ()

    @property
    def label(self) -> str:
        """The layer's name relative to the folder of all models."""
        return within(self.model, self.layer.name)

    @property
    def kind(self) -> str:
        """Layers that are converted, but those whose entropy codes are complete and copied."""
        return "convert" if self.encoded is None else COPY

    @property
    def is_folded(self) -> bool:
        """Whether the new weight contains the layer's transforms, which plain numbers cannot state."""
        return bool(self.layer.transforms) and is_plain_target(self.layer, self.aim)

    @property
    def is_transposed(self) -> bool:
        """Whether the new weight is plain and [K, N], as the model has it."""
        return becomes_transposed(self.layer, self.aim)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.to.values())

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        return [(entry.start, entry.nbytes) for entry in self.to.values()]


def small_tensors(layer: Layer, format: WeightFormat, params: Mapping[str, int | str], settings: Mapping[str, Any],
                  single_numbers: Mapping[str, float] | None = None) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """The small tensors that a producer puts next to a weight, or next to stacked experts: dtype, shape, bytes.

    single_numbers: the one-number tensors that JSON states; without them the text gets its maximal length.
    """
    spec = description_of(format.name)
    values = {"N": layer.shape[0], "K": layer.shape[1], **params, **({} if layer.experts is None else {EXPERTS: layer.experts})}
    longest = small_tensors_for(spec, {**values, **dict.fromkeys(numbers(spec), LONGEST)}, settings)
    small = longest if single_numbers is None else small_tensors_for(spec, {**values, **single_numbers}, settings)
    dtypes = {str(dtype)[6:]: dtype for dtype in torch_dtypes().values()}
    return {name: (dtypes[dtype], shape, small[name][2].ljust(len(data))) for name, (dtype, shape, data) in longest.items()}
