"""Layers of torch's kinds over packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qdsl.runtime import eight
from qdsl.runtime.linear import check_bias
from qdsl.runtime.module import PackedModule
from qdsl.runtime.ops import is_plain
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.scratch import scratch

if TYPE_CHECKING:
    from qdsl.runtime.format import Format


class QuantizedLinear(PackedModule, nn.Linear):
    """nn.Linear over a packed weight [N, K].  What is computed, x decides, not compute_dtype."""

    quantize_x: bool = False                                     # these two as in `linear`; may be set at any time
    batch_invariant: bool = False

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None,
                 quantize_x: bool = False) -> None:
        nn.Module.__init__(self)                                 # not nn.Linear's, which would allocate a dense weight
        self.out_features, self.in_features = packed.shape
        check_bias(bias, packed.shape)
        if quantize_x:
            eight.check(packed)
            self.quantize_x = True
        self.compute_dtype = dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        self._hold(packed)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    @classmethod
    def empty(cls, shape: tuple[int, int], storage: str | None = None, bias: bool = False, device: torch.device | str = "meta",
              dtype: torch.dtype | None = None, optional: Sequence[str] = (), **params: int | str) -> QuantizedLinear:
        """A layer for a weight [N, K] that is yet to be loaded: on meta, by load_state_dict with assign=True.

        dtype: compute_dtype, and the bias's.  optional: which of the tensors that may be missing there are.  Raises FormatError.
        """
        packed = cls.format.empty(shape, storage, device, optional, **params)
        return cls(packed, torch.empty(shape[0], dtype=dtype, device=device) if bias else None, dtype)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """An nn.Linear with the decoded weight and the same bias, into which a LoRA can be merged; compute_dtype by default."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.dequantize(dtype or self.compute_dtype), requires_grad=False)
        dense.bias = self.bias
        return dense

    def forward(self, input: Tensor) -> Tensor:
        return self.format.linear(input, self.packed, self.bias, self.quantize_x, self.batch_invariant)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"format={self.format.name}.{self._packed.storage}{', quantize_x=True' if self.quantize_x else ''}")


class QuantizedEmbedding(PackedModule, nn.Embedding):
    """nn.Embedding over a packed weight [num_embeddings, embedding_dim]; gives compute_dtype.

    Where every row is stored by itself, only the rows that are asked for are decoded.
    """

    def __init__(self, packed: PackedWeight, padding_idx: int | None = None, dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.padding_idx = padding_idx                           # what it is in dense(); here nothing is trained
        self.compute_dtype = dtype or torch.get_default_dtype()
        self._hold(packed)

    @classmethod
    def empty(cls, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              dtype: torch.dtype | None = None, optional: Sequence[str] = (), **params: int | str) -> QuantizedEmbedding:
        """A layer for a weight [num_embeddings, embedding_dim] that is yet to be loaded.  As Linear.empty."""
        return cls(cls.format.empty(shape, storage, device, optional, **params), dtype=dtype)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An nn.Embedding with the decoded weight; compute_dtype by default."""
        dense = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        dense.weight = nn.Parameter(self.dequantize(dtype or self.compute_dtype), requires_grad=False)
        return dense

    def forward(self, input: Tensor) -> Tensor:
        packed = self.packed
        if packed.has_separate_rows:
            rows = packed.rows(input.flatten())
            return self.format.dequantize(rows, self.compute_dtype).view(*input.shape, self.embedding_dim)
        plain = is_plain(input, *packed.tensors.values())
        room = scratch("weight", packed.shape, self.compute_dtype, packed.device) if plain else None
        return nn.functional.embedding(input, self.format.dequantize(packed, self.compute_dtype, room))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}.{self._packed.storage}"


def linear_class(format: Format) -> type[QuantizedLinear]:
    """The Linear of a format."""
    return type("Linear", (QuantizedLinear,), {"format": format, "__module__": format.__module__,
                                               "__doc__": f"A linear layer with a {format.name} weight."})


def embedding_class(format: Format) -> type[QuantizedEmbedding]:
    """The Embedding of a format."""
    return type("Embedding", (QuantizedEmbedding,), {"format": format, "__module__": format.__module__,
                                                     "__doc__": f"An embedding with a {format.name} weight."})
