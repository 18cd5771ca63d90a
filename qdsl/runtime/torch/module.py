"""A module that holds a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from qdsl.runtime.cpu import kept
from qdsl.runtime.libraries.private_apis import is_fsdp_shard
from qdsl.runtime.torch.no_weight import NoWeight, StoredWeight
from qdsl.runtime.torch.ops import is_plain
from qdsl.runtime.torch.specialized import SpecializedModule
from qdsl.runtime.weight.device_dtypes import as_bytes_like, as_stored, dtype_on, is_float8, move_tensor
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat
from qdsl.runtime.weight.pickling import picklable, unpickled
from qdsl.runtime.weight.wrap import unfilled_indices

# Dtypes that may be loaded into a tensor of another dtype: decoding converts the scale to float32 anyway.
WIDENED = {torch.float32: (torch.float16, torch.bfloat16)}
# Floats that hold every number of a stored dtype, so that a cast to one of them can be undone.
WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8),
                    (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.float8_e8m0fnu: (torch.bfloat16, torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.int16: (torch.float32, torch.float64),
    torch.int32: (torch.float64,),
    torch.float32: (torch.float64,),
}


class PackedModule(SpecializedModule):
    """A module over a packed weight: the checkpoint's tensors are its parameters, under their own names.

    `.to`, `.half()` and similar calls keep their dtypes, and `state_dict` has them as the checkpoint does.  `weight` is a
    NoWeight; a stored tensor of that name is in `named_parameters()` and `_parameters`.  compute_dtype is the dtype that a dense
    layer's weight would have: the last one that the layer was cast to.  keeps_copy: whether products on a CPU may keep a
    copy of the weight (runtime/cpu/kept.py); loaders set it.

    A tensor is validated once, when the layer gets it: its dtype, its shape, and that the groups of an index exist.  Validation
    also records on the tensor whether columns are in order.  A tensor that was replaced without loading has no record and is
    validated at the next use.  So is a tensor that was changed in place, or cast, as by `p.data = p.data.to(dtype)`: a lossless
    cast is undone, and any other raises an error at use.

    A stored parameter may have a dtype such as float8: `next(model.parameters()).dtype` is that of the first.  Use
    `layer.weight.dtype` or `compute_dtype` instead.  For DDP and FSDP2 see qdsl.ignore_packed_.
    """

    format: WeightFormat
    compute_dtype: torch.dtype
    _has_branch: bool = False
    keeps_copy: bool = False

    def _hold(self, packed: PackedWeight) -> None:
        """Make the weight's tensors parameters."""
        self._packed, self._has_branch = packed.derive({}), packed.has_branch
        names = {name: self._attribute(packed.names.get(name, name)) for name in packed.tensors}
        self._dtypes = {name: tensor.dtype for name, tensor in packed.tensors.items()}
        for name, tensor in packed.tensors.items():
            self.register_parameter(names[name], nn.Parameter(tensor, requires_grad=False))
        self._names = names
        if is_plain(*self._stored_tensors().values()):
            _note(self._stored_tensors(), packed.in_order)
        self._specialize()

    def _description(self) -> Hashable:
        packed = self._packed
        return (self.format.key, packed.storage, packed.params_text, packed.shape_text, packed.stream_info,
                *((name, tensor.dtype, tensor.shape) for name, tensor in self._stored_tensors().items()))

    def _attribute(self, name: str) -> str:
        """A tensor's attribute name in the module: as in the checkpoint, unless the module has another attribute of that name."""
        word = name.replace(".", "_")
        return f"{word}_" if word == "bias" or word in vars(self) or hasattr(type(self), word) else word

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def packed(self) -> PackedWeight:
        """The weight with the tensors that the module has now.  Raises FormatError if they were changed to invalid ones."""
        tensors, dtypes = self._stored_tensors(), self._dtypes
        if torch.compiler.is_compiling():
            if any(tensor.dtype != dtypes[name] for name, tensor in tensors.items()):
                raise FormatError(f"tensors of a {self.format.name} layer were cast: read layer.packed before compiling")
            return self._packed.derive(tensors, in_order=_ordered(tensors))
        is_new = any(tensor.dtype != dtypes[name] or getattr(tensor, "_noted", None) != _version(tensor)
                     for name, tensor in tensors.items())
        if is_new and is_plain(*tensors.values()):
            self._undo_casts(tensors)
            kept.forget_copies(tensors)
            tensors = self._note(tensors)
        packed = self._packed.derive({name: tensor.data for name, tensor in tensors.items()}, in_order=_ordered(tensors))
        packed.plan, packed.dense, packed.keeps_copy = self._packed.plan, self._packed.dense, self.keeps_copy
        return packed

    def keep_plan(self, packed: PackedWeight) -> None:
        """Keep what a product with `packed` prepared, for the next one."""
        if not torch.compiler.is_compiling() and packed.plan is not None:
            self._packed.plan, self._packed.dense = packed.plan, packed.dense

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """The stored tensors, by their names in `named_parameters()`."""
        stored = ((name, self._parameters.get(name)) for name in self._names.values())
        return {name: parameter for name, parameter in stored if parameter is not None}

    def _stored_tensors(self) -> dict[str, Tensor]:
        own: Mapping[str, Any] = self._parameters                # asking nn.Module costs more
        return {name: own[word] if word in own else getattr(self, word) for name, word in self._names.items()}

    def _unchanged(self, names: Sequence[str]) -> list[Tensor] | None:
        """Stored tensors by name; None if one was replaced, cast or changed since it was recorded."""
        attributes = self.__dict__
        own, words, dtypes = attributes["_parameters"], attributes["_names"], attributes["_dtypes"]
        tensors: list[Tensor] = []
        for name in names:
            tensor = own.get(words[name])
            if type(tensor) is not Parameter or tensor.dtype is not dtypes[name]:
                return None
            try:
                if tensor._noted != tensor._version:             # type: ignore[attr-defined]
                    return None
            except (AttributeError, RuntimeError):               # no record, or inference mode, which counts no changes
                if getattr(tensor, "_noted", None) != _version(tensor):
                    return None
            tensors.append(tensor)
        return tensors

    @property
    def device(self) -> torch.device:
        return next(iter(self._stored_tensors().values())).device

    def __getattr__(self, name: str) -> Any:
        return self._weight_stand_in() if name == "weight" and "_names" in self.__dict__ else super().__getattr__(name)

    def _weight_stand_in(self) -> Any:
        """The stand-in for the dense weight, or the `weight` that FSDP2 has sharded: it compares weights by identity."""
        stored = self._parameters.get("weight")
        if stored is None or torch.compiler.is_compiling():      # dynamo confuses it with the class that StoredWeight claims
            return NoWeight(self, None if stored is None else stored.shape)
        return stored if is_fsdp_shard(stored) else StoredWeight(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module; assigning another packed layer's `weight`, to tie weights, assigns its stored tensor."""
        shown: Any = param
        super().register_parameter(name, shown.stored if type(shown) is StoredWeight else param)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K]."""
        return self.format.dequantize(self.packed, dtype)

    def checkpoint_weight(self) -> PackedWeight:
        """The weight as the checkpoint stores it, even if the layer stores it differently to run it."""
        return self.packed

    def reset_parameters(self) -> None:
        """Raises FormatError: a packed weight cannot be initialised."""
        raise FormatError(f"a {self.format.name} weight is loaded or quantized, not initialised")

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        """Load all tensors of state_dict, or none if one does not fit; error_msgs then says which.

        torch would silently cast when it copies, and take any dtype when it assigns.  Here raw bytes are accepted for 8-bit
        floats, as in `wrap`, and 16-bit floats for float32, which holds the same numbers.  No other dtype is converted.
        """
        loaded: dict[str, Tensor] = {}
        wrong: list[str] = self._partial_stream_errors(state_dict, prefix)
        present = {name: state_dict.get(prefix + own) for name, own in self._names.items()}
        tensors = {name: tensor for name, tensor in present.items() if isinstance(tensor, Tensor)}
        wanted = self.format.stored(self._packed.derive(tensors))
        for name, own in self._names.items():
            if prefix + own in state_dict:
                tensor = _fitted(state_dict[prefix + own], *wanted[name])
                if isinstance(tensor, str):
                    wrong.append(tensor.format(prefix + own))
                else:
                    loaded[name] = tensor
        try:
            if loaded and not wrong and is_plain(*loaded.values()):
                loaded |= unfilled_indices(self.format, self._packed.derive(loaded))
                self.format.checked(self._packed.derive({**self._own_shape(loaded), **loaded}))
        except FormatError as error:
            wrong.append(f"{prefix[:-1] or type(self).__name__}: {error}")
        if wrong:
            error_msgs += wrong
            return
        for name, tensor in loaded.items():
            if tensor.shape != self._stored_tensors()[name].shape:         # the size depends on the numbers
                room = torch.empty_like(tensor, device=self._stored_tensors()[name].device)
                self.register_parameter(self._names[name], nn.Parameter(room, requires_grad=False))
        if not local_metadata.get("assign_to_params_buffers"):
            loaded = {name: as_bytes_like(tensor, self._stored_tensors()[name]) for name, tensor in loaded.items()}
        fitted = {**state_dict, **{prefix + self._names[name]: tensor for name, tensor in loaded.items()}}
        super()._load_from_state_dict(fitted, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._validate()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save as nn.Module does, in the checkpoint's dtypes, even if tensors were cast or the device lacks a dtype."""
        tensors = self._stored_tensors()
        if is_plain(*tensors.values()):
            self._undo_casts(tensors)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        dtypes = self._packed.dtypes
        for name, own in self._names.items():
            destination[prefix + own] = as_stored(destination[prefix + own], dtypes[name])

    def _partial_stream_errors(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Errors for a state_dict that has some tensors of an entropy-coded weight but not all."""
        keys = [prefix + own for own in self._names.values()]
        missing = [key for key in keys if key not in state_dict]
        if not self._packed.layout.streams or len(missing) in (0, len(keys)):
            return []
        return [f"{prefix[:-1] or type(self).__name__}: tensors of an entropy-coded weight are loaded together, and the "
                f"state_dict lacks {', '.join(missing)}"]

    def _own_shape(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's own shape tensor, if a state_dict does not have one."""
        name = self._packed.layout.shape
        return {name: self._stored_tensors()[name]} if name and name not in loaded else {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move stored tensors without changing dtypes: casting a scale or code would change the weight."""
        stored = {id(tensor): tensor.dtype for tensor in self._uncast_tensors()}
        dtypes = self._packed.dtypes
        stored |= {id(tensor): dtypes[name] for name, tensor in self._stored_tensors().items()}

        def guarded(tensor: Tensor) -> Tensor:
            if id(tensor) not in stored:
                return fn(tensor)
            result = move_tensor(tensor, stored[id(tensor)], fn)
            return result if result.dtype == dtype_on(result.device, stored[id(tensor)]) else tensor.to(result.device)

        super()._apply(guarded, recurse)  # type: ignore[no-untyped-call]
        shown = fn(torch.empty(0, dtype=self.compute_dtype, device="cpu")).dtype
        self.compute_dtype = shown if shown.is_floating_point else self.compute_dtype
        self._validate()
        return self

    def _uncast_tensors(self) -> list[Tensor]:
        """The tensors that keep their dtypes when the layer is cast."""
        return list(self._stored_tensors().values())

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name != "siblings"}     # which stay with the model
        return {**own, "_parameters": picklable(self._parameters)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_parameters": unpickled(state["_parameters"])})
        self._validate()                                         # a copied tensor has no record

    def _validate(self) -> None:
        """Validate the tensors again.  Errors are raised when the layer is used, because tensors may not be filled yet."""
        tensors, dtypes = self._stored_tensors(), self._packed.dtypes
        is_same = is_plain(*tensors.values()) and all(getattr(tensor, "_noted", None) == _version(tensor)
                                                      for tensor in tensors.values())
        for name, tensor in tensors.items():
            vars(tensor).pop("_noted", None)
            if is_float8(dtypes[name]):
                self._dtypes[name] = dtype_on(tensor.device, dtypes[name])
        self._specialize()
        if is_plain(*tensors.values()):
            if not is_same:
                kept.forget_copies(tensors)
            try:
                self._note(tensors)
            except FormatError:
                return

    def _note(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Validate the tensors, record what they imply (order, finiteness, streams), and return them.  Raises FormatError.

        An index that no one filled is dropped, as in `wrap`; it may be filled later, and is validated at every use.
        """
        absent = unfilled_indices(self.format, self._packed.derive(tensors))
        checked = self.format.checked(self._packed.derive({**tensors, **absent}))
        on_gpu = checked.device.type not in ("cpu", "meta")      # kernels for matrix units need it at every product
        self._packed.known_finite = checked.finite if on_gpu else None
        self._packed.stream_info = checked.stream_info
        self._packed.plan = self._packed.dense = None
        filled = {name: tensor for name, tensor in tensors.items() if name not in absent}
        _note(filled, checked.in_order)
        return filled

    def _undo_casts(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo casts to a wider float, in place, if every number survives both casts.

        Other tensors stay as they are, and `_note` raises FormatError for them.
        """
        for name, tensor in tensors.items():
            if tensor.dtype in WIDER.get(self._dtypes[name], ()):
                stored = tensor.detach().to(self._dtypes[name])
                wide = stored.to(tensor.dtype)
                if bool(((wide == tensor) | (wide.isnan() & tensor.isnan())).all()):
                    tensor.data = stored


def _note(tensors: Mapping[str, Tensor], in_order: frozenset[str]) -> None:
    for name, tensor in tensors.items():
        tensor._in_order, tensor._noted = name in in_order, _version(tensor)  # type: ignore[attr-defined]


def _version(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor; 0 in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _ordered(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset([name for name, tensor in tensors.items() if getattr(tensor, "_in_order", False)])


def _fitted(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | str:
    """A tensor of a state_dict as the layer stores it, or an error text with a placeholder for its key."""
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
