"""LoRA layers of the peft package over packed weights, which peft creates once this module is imported.

Plain LoRA needs none of them.  For DoRA and MiCA these layers decode the base weight.  Options that change the base weight, and
merging in place, raise errors that name the remedy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import peft
from peft import LoraConfig
from peft.tuners.lora import Embedding, Linear, LoraLayer, LoraModel
from peft.tuners.lora.dora import DoraEmbeddingLayer, DoraLinearLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from qdsl.models.experts import Experts
from qdsl.models.grouped import HiddenWeight
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear
from qdsl.runtime.torch.module import PackedModule

# Values of init_lora_weights, or their beginnings, that take the adapter out of the base weight.
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(ValueError):
    """An adapter that a packed layer cannot have, or that cannot be merged; the message names the layer and the remedy."""


def is_packed(layer: Any) -> bool:
    """Whether a layer's weight is packed, alone or in a group of its block."""
    return isinstance(layer, PackedModule) or type(getattr(layer, "weight", None)) is HiddenWeight


def dense_copy(layer: Any) -> nn.Module:
    """An nn.Linear or nn.Embedding with the decoded weight of a packed layer, in the dtype of a dense model, and its bias."""
    if isinstance(layer, QuantizedLinear | QuantizedEmbedding):
        return layer.dense()
    dense = copy.copy(layer)
    dense._parameters = dict(layer._parameters)
    del dense.__dict__["weight"]
    dense.weight = nn.Parameter(decoded_layer(layer).weight, requires_grad=False)
    return dense  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DecodedLayer:
    """A layer's decoded weight and its bias, which DoRA reads."""

    weight: Tensor
    bias: Tensor | None


def decoded_layer(layer: Any) -> DecodedLayer:
    """The decoded weight of a layer in the dtype of a dense model, and its bias."""
    weight = layer.dequantize(layer.compute_dtype) if isinstance(layer, PackedModule) else layer.weight
    weight = weight.decoded() if isinstance(weight, HiddenWeight) else weight
    return DecodedLayer(weight, getattr(layer, "bias", None))


class PackedDoraLinear(DoraLinearLayer):
    """The magnitudes of a DoRA over a packed nn.Linear, whose weight is decoded at each use."""

    def forward(self, x: Tensor, *, base_layer: nn.Module, **kwargs: Any) -> Any:
        """DoRA's addition to the layer's output."""
        return super().forward(x, base_layer=decoded_layer(base_layer), **kwargs)  # type: ignore[no-untyped-call]


class PackedDoraEmbedding(DoraEmbeddingLayer):
    """The magnitudes of a DoRA over a packed nn.Embedding, whose weight is decoded at each use."""

    def forward(self, x: Tensor, *, base_layer: nn.Module, **kwargs: Any) -> Any:
        return super().forward(x, base_layer=decoded_layer(base_layer), **kwargs)  # type: ignore[no-untyped-call]


class PackedLoraLayer(nn.Module, LoraLayer):
    """LoRA over a packed layer, whose base weight is decoded for readers and never changed."""

    dora: type[DoraLinearLayer]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter, as peft does.  Raises AdapterError for options that change the base weight."""
        init = config.init_lora_weights
        changing = isinstance(init, str) and init.lower().startswith(CHANGING)
        if changing or getattr(config, "kasa_config", None) is not None:
            option = f"init_lora_weights={init!r}" if changing else "kasa_config"
            raise AdapterError(f"{option} changes the base weight, and weights of {self._format} stay as they are. Add the "
                               "adapter to the dense model and quantize its base afterwards, or leave the option out")
        reads = config.use_dora or init == "mica"
        with self._dense_base() if reads else nullcontext():
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if config.use_dora:
            magnitudes: Any = self.lora_magnitude_vector[adapter_name]
            decoding = self.dora(fan_in_fan_out=magnitudes.fan_in_fan_out)
            decoding.weight = magnitudes.weight
            self.lora_magnitude_vector[adapter_name] = decoding

    @property
    def _format(self) -> str:
        base: Any = self.get_base_layer()
        return str(base.format.name if isinstance(base, PackedModule) else base.weight.format)

    @contextmanager
    def _dense_base(self) -> Iterator[None]:
        """Puts a dense layer in place of the packed one while an adapter is initialised."""
        packed: Any = self.base_layer
        self.base_layer = dense_copy(packed)
        try:
            yield
        finally:
            self.base_layer = packed

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises AdapterError: the merged weight needs another layer."""
        remedy = (f"qdsl.models.peft.merge(model) puts dense layers there, and merge(model, into='same') quantizes to "
                  f"{self._format} again")
        if not isinstance(self.get_base_layer(), PackedModule):
            remedy = "they are coded together with others; run `qdsl decompress` on the checkpoint, and fuse into what it writes"
        raise AdapterError(f"layers of {self._format} do not take in an adapter in place: {remedy}")


class PackedLoraLinear(PackedLoraLayer, Linear):
    dora = PackedDoraLinear


class PackedLoraEmbedding(PackedLoraLayer, Embedding):
    dora = PackedDoraEmbedding


def register() -> None:
    """Make peft create these layers for packed ones, and refuse what packed weights do not support; once per process."""
    create: Any = LoraModel._create_new_module
    place: Any = LoraModel._create_and_replace
    start: Any = AuxiliaryTrainingWrapper.__init__
    if hasattr(create, "__wrapped__"):
        return
    if "config" not in inspect.signature(Linear.update_layer).parameters:
        raise ImportError(f"qdsl.models.peft needs peft 0.19 or newer, and this is {peft.__version__}")

    setattr(LoraModel, "_create_and_replace", _checking_experts(place))  # noqa: B010
    setattr(LoraModel, "_create_new_module", staticmethod(_creating_packed(create)))  # noqa: B010
    setattr(AuxiliaryTrainingWrapper, "__init__", _refusing_packed(start))  # noqa: B010


def _creating_packed(create: Any) -> Any:
    """peft's maker of LoRA layers, which for packed layers makes those of this module."""
    @wraps(create)
    def create_new_module(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        kind = PackedLoraLinear if isinstance(base, nn.Linear) else PackedLoraEmbedding
        if not isinstance(base, nn.Linear | nn.Embedding) or not is_packed(base):
            return create(lora_config, adapter_name, target, **kwargs)
        if kwargs.get("parameter_name") is not None:
            raise AdapterError(f"target_parameters adds to {kwargs['parameter_name']!r}, which is packed: name the layer in "
                               "target_modules")
        lora_config.fan_in_fan_out = False                       # as peft does for nn.Linear
        return kind(target, adapter_name, config=lora_config, **kwargs)

    return create_new_module


def _checking_experts(place: Any) -> Any:
    """peft's function that adds an adapter to a layer, with an AdapterError for an expert of a stack."""
    @wraps(place)
    def create_and_replace(self: LoraModel, lora_config: LoraConfig, adapter_name: str, target: nn.Module, target_name: str,
                           parent: nn.Module, current_key: str, **kwargs: Any) -> None:
        stack = current_key.rpartition(".parts.")[0]
        if stack and isinstance(self.model.get_submodule(stack), Experts):
            raise AdapterError(f"{stack}: experts of a stack are multiplied together, and an adapter of one would not be used: "
                               "leave them out, with exclude_modules=r'.*\\.parts\\.\\d+'")
        place(self, lora_config, adapter_name, target, target_name, parent, current_key, **kwargs)

    return create_and_replace


def _refusing_packed(start: Any) -> Any:
    """The constructor of peft's trained copies of modules, with an AdapterError for packed ones."""
    @wraps(start)
    def init(self: AuxiliaryTrainingWrapper, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for part in module.modules():
            if isinstance(part, PackedModule):
                raise AdapterError("modules_to_save and trainable_token_indices train a weight, and weights of "
                                   f"{part.format.name} are not trained: put `layer.dense()` in the place of that layer, or "
                                   "target it with LoRA")
        start(self, module, *args, **kwargs)

    return init
