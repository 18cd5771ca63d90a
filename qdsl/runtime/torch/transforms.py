"""Transforms of a layer's input and output as modules: factors, RMS norms, and rotations of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.core.transforms import Transform
from qdsl.runtime.weight.transforms import factors_of, scale_of

PARTS = ("whole", "signs", "left", "right")                      # of a rotation's matrix, as it is multiplied


class LayerTransform(nn.Module):
    """A transform of a layer's input or output.  Its tensors keep their dtypes when the layer is cast."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def stored(self) -> dict[str, Tensor]:
        """Its tensors under their names in the checkpoint."""
        tensor = self._buffers.get("tensor")
        return {} if tensor is None else {self.transform.tensor: tensor}

    @property
    def description(self) -> Transform:
        """The transform without names: what compiled programs depend on."""
        return replace(self.transform, tensor="", perm="")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The transform, for the printed module."""
        return self.transform.label


class Factor(LayerTransform):
    """x times, or divided by, a tensor [K]: one operation, rounded once to the dtype of x."""

    tensor: Tensor

    def __init__(self, transform: Transform, tensor: Tensor) -> None:
        super().__init__(transform)
        self.register_buffer("tensor", tensor.flatten())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] with the factors."""
        return (x / self.tensor if self.transform.kind == "divide" else x * self.tensor).to(x.dtype)


class RmsNorm(LayerTransform):
    """x divided by its root mean square, in float32, times a weight [K]."""

    tensor: Tensor | None

    def __init__(self, transform: Transform, tensor: Tensor | None) -> None:
        super().__init__(transform)
        self.register_buffer("tensor", None if tensor is None else tensor.flatten())

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., K]."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.transform.eps)).to(x.dtype)
        return normed if self.tensor is None else (self.tensor * normed).to(x.dtype)


class Rotation(LayerTransform):
    """Blocks of x [..., K] times a matrix, whole or as factors, in float32 or in the dtype of the transform.

    The tensors of the checkpoint stay where they lie, for saving.
    """

    whole: Tensor | None
    signs: Tensor | None
    left: Tensor | None
    right: Tensor | None

    def __init__(self, transform: Transform, tensor: Tensor | None = None, perm: Tensor | None = None) -> None:
        super().__init__(transform)
        named = ((transform.tensor, tensor), (transform.perm, perm))
        self._stored = {name: own for name, own in named if own is not None}
        self.dtype: torch.dtype | None = getattr(torch, transform.dtype) if transform.dtype else None
        self.scale = scale_of(transform)
        for name, matrix in zip(PARTS, factors_of(transform, tensor, perm), strict=True):
            self.register_buffer(name, None if matrix is None else matrix.to(self.dtype or torch.float32).contiguous())

    def stored(self) -> dict[str, Tensor]:
        """Its tensors under their names in the checkpoint."""
        return self._stored

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] with its blocks rotated."""
        dtype = self.dtype or x.dtype
        blocks = x.to(dtype).reshape(*x.shape[:-1], -1, self.transform.size)
        if self.whole is not None:
            out = blocks @ self._scaled(self.whole, dtype)
        else:
            assert self.left is not None and self.right is not None
            blocks = blocks if self.signs is None else blocks * self.signs.to(dtype)
            grid = blocks.reshape(*blocks.shape[:-1], self.left.shape[0], self.right.shape[0])
            out = (self._scaled(self.left, dtype).t() @ (grid @ self.right.to(dtype))).flatten(-2)
        out = out if self.dtype is None or self.scale == 1 else out * self.scale
        return out.reshape(x.shape).to(x.dtype)

    def _scaled(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """A matrix in a dtype; with the scale where that is the dtype of x, as its producer rounds it."""
        return (matrix * self.scale if self.dtype is None else matrix).to(dtype)


def layer_transforms(transforms: Iterable[Transform], tensors: Callable[[str], Tensor]) -> list[LayerTransform]:
    """The modules of transforms.  tensors: returns a tensor by its name in the checkpoint."""
    modules: list[LayerTransform] = []
    for transform in transforms:
        tensor = tensors(transform.tensor) if transform.tensor else None
        if transform.kind == "rotate":
            modules.append(Rotation(transform, tensor, tensors(transform.perm) if transform.perm else None))
        elif transform.kind == "rms_norm":
            modules.append(RmsNorm(transform, tensor))
        else:
            assert tensor is not None
            modules.append(Factor(transform, tensor))
    return modules


def transformed(modules: Iterable[Any], x: Tensor, side: str) -> Tensor:
    """x with all transforms of one side, in order."""
    for own in modules:
        if own.transform.side == side:
            x = own(x)
    return x


def with_tensors(modules: Iterable[LayerTransform]) -> tuple[list[Transform], Callable[[str], Tensor]]:
    """The transforms of modules, and the function that returns their tensors by name."""
    every = [*modules]
    stored = {name: tensor for own in every for name, tensor in own.stored().items()}
    return [own.transform for own in every], stored.__getitem__
