"""Measures how much errors of weights change what a language model predicts, by one run back through it.

The divergence that an error e of a weight makes in the predictions for a sample is half of the sum of (G * e)^2, to second order:
G is the gradient of the loss for tokens that are drawn from the predictions themselves (Fisher's information).  Rows count as if
independent, and errors of a row as if G were as large for all that matter by H, the moments of inputs:

    half of the sum over rows of |G[n]|^2 / trace(H) * (e[n] H e[n]^T)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.host import progress
from qdsl.models.calibrate import block_list, counting_products, linear_layers, token_bytes

PASSES = 3                                                       # of a run there and back, in runs there


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What errors of a weight cost, in nats per token.  rows: the factor of each row, [N].

    columns: the mean square of each input, [K]; None where the moments of the layer's inputs are known.
    """

    rows: Tensor
    columns: Tensor | None = None


def sensitivities(model: nn.Module, samples: Sequence[Tensor]) -> dict[str, list[Sensitivity]]:
    """The sensitivities of a language model's weights, by names as `calibrate` has them; an embedding that is the head has two.

    samples: tokens [1, length].  Progress: PASSES for each byte of them.
    """
    measured = _SquareSums(model)
    with measured.counting():
        for sample in samples:
            with progress.step(progress.SAMPLES, PASSES * token_bytes(sample)):
                measured.run(sample)
    return measured.all(sum(sample.numel() for sample in samples))


class _SquareSums:
    """A model, and sums of squares: of gradients by rows, and of inputs or gradients by columns."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.table: Any = model.get_input_embeddings()
        self.table_name = next(name for name, module in model.named_modules() if module is self.table)
        inside = set(linear_layers(block_list(model)[1]).values())
        self.outside = {name: layer for name, layer in linear_layers(model).items() if layer not in inside}
        self.rows: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.draw = torch.Generator(self.table.weight.device).manual_seed(0)

    def run(self, tokens: Tensor) -> None:
        """Count a sample."""
        with torch.enable_grad():
            scores = self.model(tokens, use_cache=False).logits[0].float()
            drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=self.draw)[:, 0]
            torch.autograd.backward(nn.functional.cross_entropy(scores, drawn, reduction="sum"))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what runs through the model; its weights get no gradients."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.model.requires_grad_(False)
        handle = self.table.register_forward_hook(self._looked_up)
        try:
            with counting_products("", self.model, self._multiplied):
                yield
        finally:
            handle.remove()
            for parameter in trained:
                parameter.requires_grad_()

    def _looked_up(self, table: Any, inputs: tuple[Tensor, ...], vectors: Any) -> Any:
        """Rows of an embedding are the columns of a product with x = 1 at the token."""
        scale = float(getattr(table, "embed_scale", 1))
        counts = inputs[0].flatten().bincount(minlength=len(table.weight)).float()
        self.rows[self.table_name] = self.rows.get(self.table_name, 0) + counts
        vectors = vectors.detach().requires_grad_()
        vectors.register_hook(lambda gradient: _add(self.columns, self.table_name, gradient * scale))
        return vectors

    def _multiplied(self, name: str, x: Tensor, product: Any) -> None:
        x = x.detach().flatten(0, -2)
        _add(self.columns, name, x)
        self.counts[name] = self.counts.get(name, 0) + len(x)
        if product.requires_grad:
            product.register_hook(lambda gradient: _add(self.rows, name, x.T @ gradient.flatten(0, -2)))

    def all(self, tokens: int) -> dict[str, list[Sensitivity]]:
        """The sensitivities, from sums over so many tokens."""
        terms: dict[str, list[Sensitivity]] = {}
        for name, rows in self.rows.items():
            if name == self.table_name:
                terms.setdefault(name, []).append(Sensitivity(rows / tokens, self.columns[name] / tokens))
                continue
            mean = self.columns[name] / self.counts[name]
            own = Sensitivity(rows / tokens / mean.sum(), mean if name in self.outside else None)
            is_tied = name in self.outside and self.outside[name].weight is self.table.weight
            terms.setdefault(self.table_name if is_tied else name, []).append(own)
        return terms


def _add(sums: dict[str, Tensor], name: str, values: Tensor) -> None:
    """Add the squares of values [..., columns] to sums of columns."""
    squares = values.reshape(-1, values.shape[-1]).float().square().sum(0)
    sums[name] = sums[name] + squares if name in sums else squares
