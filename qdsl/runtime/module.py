"""A linear layer that holds a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qdsl.runtime.linear import check_bias
from qdsl.runtime.packed import FormatError, PackedWeight

if TYPE_CHECKING:
    from qdsl.runtime.format import Format


class QuantizedLinear(nn.Linear):
    """nn.Linear over a packed weight: the checkpoint's own tensors, under their own names, are its parameters.

    They keep their dtypes through `.to`, `.half()` and friends, and appear in `state_dict` as the checkpoint has them.
    """

    format: Format

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)                                 # not nn.Linear's, which would allocate a dense weight
        if packed.format is not self.format:
            raise FormatError(f"a {type(self).__name__} of {self.format.name} cannot hold a weight of {packed.format.name}")
        self.out_features, self.in_features = packed.shape
        check_bias(bias, packed)
        self._packed = packed.derive({})
        self._names = {name: self._attribute(packed.names.get(name, name)) for name in packed.tensors}
        for name, tensor in packed.tensors.items():
            self.register_parameter(self._names[name], nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def _attribute(self, name: str) -> str:
        """What a tensor is called in the module: as in the checkpoint, unless the module has something else of that name."""
        word = name.replace(".", "_")
        return f"{word}_" if word == "bias" or word in vars(self) or hasattr(type(self), word) else word

    @property
    def packed(self) -> PackedWeight:
        """The weight with the tensors that the module holds now."""
        return self._packed.derive({name: getattr(self, own).data for name, own in self._names.items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Look at the tensors before they are loaded: an index into groups may have another order, or none that exists."""
        held = self.packed.tensors
        new = {name: state_dict.get(prefix + self._names[name], tensor) for name, tensor in held.items()}
        if all(new[name].shape == tensor.shape and new[name].dtype == tensor.dtype for name, tensor in held.items()):
            self._packed = self.format.checked(self._packed.derive(new)).derive({})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        return self.format.linear(input, self.packed, self.bias)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K]."""
        return self.format.dequantize(self.packed, dtype)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"format={self.format.name}.{self._packed.storage}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move stored tensors, and give them no other dtype: a scale or a code that is cast is another weight."""
        stored = {name: getattr(self, name) for name in self._names.values()}

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not any(tensor is kept or tensor is kept.data for kept in stored.values()):
                return moved
            return tensor.to(moved.device)

        return super()._apply(guarded, recurse)  # type: ignore[no-untyped-call]


def linear_class(format: Format) -> type[QuantizedLinear]:
    """The Linear of a format."""
    return type("Linear", (QuantizedLinear,), {"format": format, "__module__": format.__module__,
                                               "__doc__": f"A linear layer with a {format.name} weight."})
