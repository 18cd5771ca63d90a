"""A module that holds a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qdsl.runtime.ops import is_plain
from qdsl.runtime.packed import FormatError, PackedWeight

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

# What may be loaded into a tensor of another dtype: decoding widens a scale to float32 in any case, before it computes.
WIDENED = {torch.float32: (torch.float16, torch.bfloat16)}


class PackedModule(nn.Module):
    """A module over a packed weight: the checkpoint's own tensors, under their own names, are its parameters.

    They keep their dtypes through `.to`, `.half()` and friends, and appear in `state_dict` as the checkpoint has them.
    `weight` is the checkpoint's tensor of that name where it has one, else a NoWeight.  compute_dtype is what the weight of
    a dense layer would have for its dtype: the one that the layer was last cast to.

    A tensor is looked at once, when it comes into the layer: its dtype, its shape, and of an index whether the groups exist
    and whether the columns lie in order, which is noted on the tensor itself.  One that was put in place of it by other means
    than loading has no note, and is looked at when the layer is next used.
    """

    format: Format
    compute_dtype: torch.dtype

    def _hold(self, packed: PackedWeight) -> None:
        """Make the weight's tensors parameters.  Raises FormatError for one of another format."""
        if packed.format is not self.format:
            raise FormatError(f"a {type(self).__name__} of {self.format.name} cannot hold a weight of {packed.format.name}")
        self._packed = packed.derive({})
        self._names = {name: self._attribute(packed.names.get(name, name)) for name in packed.tensors}
        for name, tensor in packed.tensors.items():
            self.register_parameter(self._names[name], nn.Parameter(tensor, requires_grad=False))
        if is_plain(*self._held().values()):
            _note(self._held(), packed.in_order)

    def _attribute(self, name: str) -> str:
        """What a tensor is called in the module: as in the checkpoint, unless the module has something else of that name."""
        word = name.replace(".", "_")
        return f"{word}_" if word == "bias" or word in vars(self) or hasattr(type(self), word) else word

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def packed(self) -> PackedWeight:
        """The weight with the tensors that the module holds now.  Raises FormatError where something made them others."""
        held = self._held()
        if torch.compiler.is_compiling():
            return self._packed.derive(held, in_order=_ordered(held))
        if any(not hasattr(tensor, "_in_order") for tensor in held.values()) and is_plain(*held.values()):
            held = self._note(held)
        return self._packed.derive({name: tensor.data for name, tensor in held.items()}, in_order=_ordered(held))

    def _held(self) -> dict[str, Tensor]:
        own: Mapping[str, Any] = self._parameters                # first, because asking nn.Module costs more
        return {name: own[word] if word in own else getattr(self, word) for name, word in self._names.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" not in self.__dict__.get("_names", {"": name}).values():
            return NoWeight(self)
        return super().__getattr__(name)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K]."""
        return self.format.dequantize(self.packed, dtype)

    def checkpoint_weight(self) -> PackedWeight:
        """The weight as the checkpoint stores it: `packed`, unless the layer stores it otherwise to run it."""
        return self.packed

    def reset_parameters(self) -> None:
        raise FormatError(f"a {self.format.name} weight is loaded or quantized, not initialised")

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        """Load all that is given, or where a tensor does not fit say so and load nothing.

        torch would cast silently when it copies, and take any dtype when it assigns.  Raw bytes are 8-bit floats here, as in
        `wrap`, and 16-bit floats go into float32, where they mean the same numbers; no other dtype is converted.
        """
        given: dict[str, Tensor] = {}
        wrong: list[str] = []
        there = {name: state_dict.get(prefix + own) for name, own in self._names.items()}
        wanted = self.format.stored(self._packed.derive({name: each for name, each in there.items() if isinstance(each, Tensor)}))
        for name, own in self._names.items():
            if prefix + own in state_dict:
                tensor = _fitted(state_dict[prefix + own], *wanted[name])
                if isinstance(tensor, str):
                    wrong.append(tensor.format(prefix + own))
                else:
                    given[name] = tensor
        try:
            if is_plain(*given.values()):
                given |= self.format.unfilled(self._packed.derive(given))
                self.format.checked(self._packed.derive(given))
        except FormatError as error:
            wrong.append(f"{prefix[:-1] or type(self).__name__}: {error}")
        if wrong:
            error_msgs += wrong
            return
        for name, tensor in given.items():
            if tensor.shape != self._held()[name].shape:         # its size depends on the weights
                room = torch.empty_like(tensor, device=self._held()[name].device)
                self.register_parameter(self._names[name], nn.Parameter(room, requires_grad=False))
        fitted = {**state_dict, **{prefix + self._names[name]: tensor for name, tensor in given.items()}}
        super()._load_from_state_dict(fitted, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._look()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move stored tensors, and give them no other dtype: a scale or a code that is cast is another weight."""
        stored = list(self._held().values())

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not any(tensor is kept for kept in stored):
                return moved
            return tensor.to(moved.device)

        super()._apply(guarded, recurse)  # type: ignore[no-untyped-call]
        shown = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        self.compute_dtype = shown if shown.is_floating_point else self.compute_dtype
        self._look()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._look()                                             # a copied tensor has lost its note

    def _look(self) -> None:
        """Look at the tensors anew.  What is wrong with them is said when the layer is used: they may be yet to be filled."""
        held = self._held()
        for tensor in held.values():
            vars(tensor).pop("_in_order", None)
        if is_plain(*held.values()):
            try:
                self._note(held)
            except FormatError:
                return

    def _note(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, of which is kept what they say once they are looked at.  Raises FormatError for those that do not fit.

        Without an index that nobody filled, as in `wrap`; it may be yet to be filled, and is looked at whenever it is used.
        """
        unfilled = self.format.unfilled(self._packed.derive(held))
        found = self.format.checked(self._packed.derive({**held, **unfilled}))
        self._packed.finite, self._packed.facts = found.finite, found.facts
        filled = {name: tensor for name, tensor in held.items() if name not in unfilled}
        _note(filled, found.in_order)
        return filled


def _note(held: Mapping[str, Tensor], in_order: frozenset[str]) -> None:
    for name, tensor in held.items():
        tensor._in_order = name in in_order  # type: ignore[attr-defined]


def _ordered(held: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset([name for name, tensor in held.items() if getattr(tensor, "_in_order", False)])


def _fitted(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | str:
    """A tensor of a state_dict as the layer stores it, or what is wrong, with a place for its key."""
    if not isinstance(tensor, Tensor):
        return f"{{}} is a {type(tensor).__name__} in the state_dict, not a tensor"
    if tensor.dtype == torch.uint8 and dtype.is_floating_point and dtype.itemsize == 1:
        tensor = tensor.view(dtype)
    if tensor.dtype in WIDENED.get(dtype, ()):
        tensor = tensor.to(dtype)
    if tensor.dtype != dtype:
        return (f"dtype mismatch for {{}}: the state_dict has {str(tensor.dtype)[6:]}, the layer stores {str(dtype)[6:]}, and "
                "no cast between them is exact")
    if [extent for extent in tensor.shape if extent != 1] != [extent for extent in shape if extent != 1]:
        return f"size mismatch for {{}}: the state_dict has {list(tensor.shape)}, the layer stores {list(shape)}"
    return tensor.reshape(shape)


class NoWeight:
    """What stands for the dense weight that a layer does not hold, for those who ask for its shape, dtype or device.

    Whoever wants its numbers gets an AttributeError or TypeError that says where they are.
    """

    requires_grad = False

    def __init__(self, layer: PackedModule) -> None:
        self.shape = torch.Size(layer._packed.shape)
        self.dtype, self.ndim = layer.compute_dtype, 2
        self.device = next(iter(layer._held().values())).device
        kind = "an nn.Linear that a LoRA can be merged into" if isinstance(layer, nn.Linear) else "a layer that does"
        self._missing = (f"a {layer.format.name} layer holds no dense weight: dequantize() gives it, "
                         f"dense() {kind}")

    def __repr__(self) -> str:
        return f"NoWeight({list(self.shape)}, {self.dtype}, {self.device})"

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return self.ndim

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no '{name}' of a weight: {self.__dict__.get('_missing', '')}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        held = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, NoWeight)]
        raise TypeError(f"{function.__name__}: {held[0]._missing if held else 'no dense weight'}")
