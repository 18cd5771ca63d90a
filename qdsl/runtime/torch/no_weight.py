"""The stand-in `layer.weight` of a packed layer: shape, dtype and device of a dense weight, without numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qdsl.runtime.weight.packed import PackedWeight, WeightFormat

# Methods by which initialisers overwrite a whole tensor, and methods that then modify the result.
OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "trunc_normal_"})
CHANGES = frozenset({"add_", "clamp_", "div_", "erfinv_", "mul_", "sub_"})
# Attributes of a parameter that offloading reads; they come from the stored tensor of that name.
OF_STORED = frozenset({"data_ptr", "element_size", "is_contiguous", "nbytes", "storage_offset", "stride", "untyped_storage"})


class PackedLayer(Protocol):
    """What a stand-in reads of its layer (module.py)."""

    format: WeightFormat
    compute_dtype: torch.dtype
    _packed: PackedWeight
    _parameters: dict[str, nn.Parameter | None]

    @property
    def device(self) -> torch.device: ...


class NoWeight:
    """The `weight` attribute of a packed layer: shape, device, and the dtype to which models cast activations.

    Initialisers (`nn.init.normal_(layer.weight)`, `layer.weight.data[0].zero_()`) have no effect: the weight has been loaded.
    Reading numbers raises an AttributeError or TypeError that says where they are.
    """

    requires_grad = False
    grad = None
    grad_fn = None
    is_leaf = True
    is_meta = True                                               # torch's initialisers return at once for meta tensors
    _is_hf_initialized = True                                    # the same for transformers

    def __init__(self, layer: PackedLayer, shape: torch.Size | None = None) -> None:
        self._layer = layer
        self._part = shape                                       # a slice of rows, for initialisers only
        self._is_overwritten = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._layer._packed.shape) if self._part is None else self._part

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's products."""
        return self._layer.compute_dtype

    @property
    def device(self) -> torch.device:
        return self._layer.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def data(self) -> NoWeight:
        """Itself: it has no numbers."""
        return self

    def __repr__(self) -> str:
        return f"NoWeight({list(self.shape)}, {self.dtype}, {self.device})"

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return self.ndim

    ndimension = dim

    def is_floating_point(self) -> bool:
        """True: weights are floats."""
        return True

    def requires_grad_(self, requires_grad: bool = True) -> NoWeight:
        """Itself.  Raises TypeError if requires_grad is true: a packed weight has no gradient."""
        if requires_grad:
            raise TypeError(f"a packed weight is not trained: {self._advice}")
        return self

    def detach(self) -> NoWeight:
        """Itself: a packed weight has no gradient."""
        return self

    def __getitem__(self, index: Any) -> NoWeight:
        return NoWeight(self._layer, torch.empty(self.shape, dtype=torch.uint8, device="meta")[index].shape)

    def _no_numbers(self, *args: Any) -> Any:
        raise TypeError(f"no arithmetic: {self._advice}")

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __neg__ = __abs__ = _no_numbers
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = __pow__ = __matmul__ = __rmatmul__ = _no_numbers
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __array__ = __iter__ = __setitem__ = __reduce_ex__ = _no_numbers

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif (name, value) != ("requires_grad", False):
            raise AttributeError(f"cannot set '{name}' of a weight: {self._advice}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in OVERWRITES or (name in CHANGES and self._is_overwritten):
            return self._skip_initialiser
        raise AttributeError(f"no '{name}' of a weight: {self._advice}")

    def _skip_initialiser(self, *args: Any, **kwargs: Any) -> NoWeight:
        self._is_overwritten = True
        return self

    @property
    def _advice(self) -> str:
        return (f"a {self._layer.format.name} layer holds no dense weight: dequantize() gives it, dense() a layer that does. If "
                "a model computes with the weight itself, load that layer dense: name it in skip= of qdsl.load_weights_, or in "
                "skip= of QdslConfig. To merge adapters, call qdsl.models.peft.merge(model). For DoRA, import qdsl.models.peft "
                "before adding it. PiSSA, OLoRA and CorDA change the weight: use them on the dense model and quantize it "
                "afterwards")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        every = [arg for value in values for arg in (value if isinstance(value, (list, tuple)) else (value,))]
        weight = next((arg for arg in every if issubclass(type(arg), NoWeight)), None)
        if weight is not None and getattr(function, "__module__", None) == nn.init.__name__:
            return weight
        name = getattr(function, "__name__", "this")
        raise TypeError(f"{name}: {'no dense weight' if weight is None else weight._advice}")


class StoredWeight(NoWeight):
    """The `weight` attribute if the checkpoint calls a stored tensor `weight`: that tensor is the parameter `weight`.

    isinstance takes it for an nn.Parameter, so that `get_parameter` finds it.  It has the stored tensor's shape, address and
    `to`, which offloading reads before it replaces the parameter.
    """

    __class__ = nn.Parameter  # type: ignore[assignment]

    @property
    def stored(self) -> nn.Parameter:
        """The tensor as files store it."""
        parameter = self._layer._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stored tensor on another device.  Raises TypeError for another dtype."""
        moved = self.stored.detach().to(*args, **kwargs)
        if moved.dtype != self.stored.dtype:
            raise TypeError(f"to {str(moved.dtype)[6:]}: {self._advice}")
        return moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name) if name in OF_STORED else super().__getattr__(name)
