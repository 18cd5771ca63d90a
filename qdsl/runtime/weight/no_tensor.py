"""What a packed weight answers where methods and operators of tensors are expected: what to call in place of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

ADVICE = ("`packed.format.linear(x, packed)` multiplies, `packed.format.Linear(packed)` is a layer, `packed.dequantize()` is the "
          "Tensor")


class NoTensor:
    """Raises, with advice, for methods and operators of tensors.  It has no length, so that it is always true.

    Without __torch_function__: its class would then take part in tracing of each of its products.
    """

    def __getattr__(self, name: str) -> Any:
        advice = f", as tensors have: {ADVICE}" if hasattr(Tensor, name) else ""
        raise AttributeError(f"a PackedWeight has no attribute '{name}'{advice}", name=name, obj=self)

    def _refuse(self, *others: Any) -> Any:
        raise TypeError(f"a PackedWeight has no operators: {ADVICE}")

    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __truediv__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"a PackedWeight has no elements: `packed.rows(index)` has some of its rows; {ADVICE}")
