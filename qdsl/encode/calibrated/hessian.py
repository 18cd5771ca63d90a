"""The second moments of a layer's inputs, and the factor by which rounding errors are carried to other columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qdsl.runtime.weight.errors import FormatError

DAMPING = 0.01                                                   # of the mean diagonal, added to it before it is inverted
STRIP = 384                                                      # columns of moments that are computed at a time
ATTEMPTS = 12                                                    # each doubles the damping


@dataclass(slots=True)
class Hessian:
    """The mean of x x^T over the rows of x that a layer was called with: float32 [K, K], and the number of rows.

    factors: those of `inverse_factor` that were computed, which layers with the same input share.
    """

    matrix: Tensor
    rows: int = 0
    factors: dict[bool, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(cls, columns: int, device: torch.device | str = "cpu") -> Hessian:
        """The moments of no rows."""
        return cls(torch.zeros(columns, columns, dtype=torch.float32, device=device))

    def add(self, x: Tensor) -> None:
        """Count the rows of x [..., K]."""
        flat = x.reshape(-1, x.shape[-1]).to(self.matrix.device, torch.float32)
        rows = self.rows + len(flat)
        for start in range(0, len(self.matrix), STRIP) if len(flat) else ():     # the upper half is that below, mirrored
            stop = start + STRIP
            self.matrix[start:, start:stop].addmm_(flat[:, start:].T, flat[:, start:stop], beta=self.rows / rows, alpha=1 / rows)
            self.matrix[start:stop, stop:] = self.matrix[stop:, start:stop].T
        self.rows = rows
        self.factors.clear()

    @property
    def order(self) -> Tensor:
        """The columns, those with the largest mean squares first."""
        return self.matrix.diagonal().argsort(dim=0, descending=True, stable=True)

    def inverse_factor(self, is_sorted: bool) -> Tensor:
        """`inverse_factor` of the matrix, its columns sorted by `order`, or as they are."""
        if is_sorted not in self.factors:
            order = self.order
            self.factors[is_sorted] = inverse_factor(self.matrix[order][:, order] if is_sorted else self.matrix)
        return self.factors[is_sorted]

    @property
    def importance(self) -> Tensor:
        """The mean square of each column, [K], as `quantize` takes it."""
        return self.matrix.diagonal().clone()

    def loss(self, error: Tensor) -> float:
        """The mean squared error of the outputs, summed over them, that an error of the weight [N, K] makes."""
        return float(((error @ self.matrix) * error).sum(dtype=torch.float64))


def inverting(columns: int) -> int:
    """Bytes of memory that the moments of this many columns take while they are inverted."""
    return (4 + 3 * 8) * columns ** 2


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular float32 [K, K], with U^T U = the inverse of the damped Hessian.

    The damping doubles until Cholesky's decomposition exists.  A column without inputs counts as if alone.  Raises FormatError
    for a Hessian that is not finite.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise FormatError("the inputs that a layer was calibrated with are not finite")
    matrix = hessian.to(torch.float64, copy=True)
    diagonal = matrix.diagonal()
    diagonal[diagonal == 0] = 1
    mean = float(diagonal.mean())
    added = 0.0
    for attempt in range(ATTEMPTS):
        wanted = DAMPING * mean * 2 ** attempt
        diagonal += wanted - added
        added = wanted
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                factor: Tensor = upper.float()
                return factor
    raise FormatError(f"the Hessian of a layer has no inverse, even with {added / mean:g} of its mean diagonal added")
