"""Rows of x sorted by the expert that a router chose for them: as offsets of experts' rows, or with what a GPU needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of token and expert sorted by expert, on a GPU; its length is that of the offsets, E + 1.

    offsets: int32 [E + 1].  tokens: int32 [M], the token of each row.  places: int32 [M], the row of each pair, by token.  tiles:
    as tile_map of runtime/torch/experts.py returns them for `height` rows; both products of a layer share them.
    """

    offsets: Tensor
    tokens: Tensor
    places: Tensor
    tiles: Tensor
    height: int

    def __len__(self) -> int:
        return len(self.offsets)


Offsets = Tensor | Sequence[int] | Routing
