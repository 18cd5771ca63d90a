"""The second moments of a layer's inputs, and the factor by which rounding errors are carried to other columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qdsl.runtime.weight.errors import FormatError

DAMPING = 0.01                                                   # of the mean diagonal, added to it before it is inverted
STRIP = 192                                                      # columns of moments that are computed at a time
ATTEMPTS = 12                                                    # each doubles the damping


@dataclass(slots=True)
class Hessian:
    """The mean of x x^T over the rows of x that a layer was called with: float32 [K, K], and the number of rows.

    lower: that half of it, and the other one where `is_whole`.  factors: those of `factor` that were computed, which layers with
    the same input share.
    """

    lower: Tensor
    rows: int = 0
    factors: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    is_whole: bool = True

    @classmethod
    def empty(cls, columns: int, device: torch.device | str = "cpu") -> Hessian:
        """The moments of no rows."""
        return cls(torch.zeros(columns, columns, dtype=torch.float32, device=device))

    @property
    def matrix(self) -> Tensor:
        if not self.is_whole:
            for start in range(0, len(self.lower), STRIP):
                self.lower[start:start + STRIP, start + STRIP:] = self.lower[start + STRIP:, start:start + STRIP].T
            self.is_whole = True
        return self.lower

    def add(self, x: Tensor) -> None:
        """Count the rows of x [..., K]."""
        flat = x.reshape(-1, x.shape[-1]).to(self.lower.device, torch.float32)
        rows = self.rows + len(flat)
        for start in range(0, len(self.lower), STRIP) if len(flat) else ():
            stop = start + STRIP
            self.lower[start:, start:stop].addmm_(flat[:, start:].T, flat[:, start:stop], beta=self.rows / rows, alpha=1 / rows)
        self.rows, self.is_whole = rows, False
        self.factors.clear()

    @property
    def order(self) -> Tensor:
        """The columns, those with the largest mean squares first."""
        return self.matrix.diagonal().argsort(dim=0, descending=True, stable=True)

    def factor(self, is_sorted: bool) -> tuple[Tensor, Tensor]:
        """`factor` of the matrix, its columns sorted by `order`, or as they are."""
        if is_sorted not in self.factors:
            order = self.order
            self.factors[is_sorted] = factor(self.matrix[order][:, order] if is_sorted else self.matrix)
        return self.factors[is_sorted]

    @property
    def importance(self) -> Tensor:
        """The mean square of each column, [K], as `quantize` takes it."""
        return self.matrix.diagonal().clone()

    def loss(self, error: Tensor) -> float:
        """The mean squared error of the outputs, summed over them, that an error of the weight [N, K] makes."""
        total = torch.zeros((), dtype=torch.float64, device=error.device)
        for start in range(0, len(self.matrix), STRIP):          # the half below the diagonal counts twice
            own, below = error[:, start:start + STRIP], error[:, start + STRIP:]
            products = own @ self.matrix[start:start + STRIP, start:start + STRIP]
            products.addmm_(below, self.matrix[start + STRIP:, start:start + STRIP], alpha=2)
            total += products.mul_(own).sum(dtype=torch.float64)
        return float(total)


def inverting(columns: int) -> int:
    """Bytes of memory that the moments of this many columns take while they are factored."""
    return (4 + 3 * 8) * columns ** 2


def factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """R, D: upper triangular float32 [K, K] with ones on its diagonal, and [K], with R diag(D) R^T = the damped Hessian.

    An error e of a row of the weight so costs the sum of squares of e R, by D: that of column k is none where e[k] is minus what
    the columns before it add, e[:k] R[:k, k].  The damping doubles until Cholesky's decomposition exists.  A column without
    inputs counts as if alone.  Raises FormatError for a Hessian that is not finite.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise FormatError("the inputs that a layer was calibrated with are not finite")
    matrix = hessian.flip(0, 1).to(torch.float64)                # its lower factor, turned again, is the upper one
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
            return (lower / lower.diagonal()).float().flip(0, 1), lower.diagonal().square().float().flip(0)
    raise FormatError(f"the Hessian of a layer has no factor, even with {added / mean:g} of its mean diagonal added")
