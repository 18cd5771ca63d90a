"""The `quantization_config` with which transformers and diffusers hand a folder to qdsl."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.detect.targets import with_storage


@dataclass(eq=False)
class Weights:
    """Weights that qdsl reads, and in `state` the plain tensors among them, which transformers loads after packed layers.

    open(model, names): the files as a checkpoint.  names(model, rules): a model's names for those of the files, None where they
    are the same.
    """

    open: Callable[[Any, Any], Checkpoint]
    names: Callable[[Any, list[Any]], Any] = lambda model, rules: None
    state: dict[str, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Weights:
        """Itself: transformers copies configs, and `state` is filled once."""
        return self


class Method(StrEnum):
    """The `quant_method` of a config: a string that also has the `value` that diffusers reads."""

    QDSL = OWN


class QdslConfig(QuantizationConfigMixin):
    """How `from_pretrained` loads a folder: with its packed weights, or quantized on the way.

    format, storage, params: in which plain Linear layers are quantized, as `qdsl.load_weights_` takes them; none for a folder
    whose layers are packed, of any producer.  skip: patterns of modules that become dense or stay so, such as "lm_head"; and
    of parameters that transformers may initialise, such as the "score" of a new classifier.  settings: what the folder's config
    states, which is also what `to_dict` gives then.  weights: those of a GGUF file, or of all files of a folder, in place of
    those that transformers reads.
    verify: compare files with the checksums that qdsl wrote with them, and decode every stream, before layers are placed.
    allow_unknown: load files with settings or tensors that change the model, and that qdsl does not compute or does not know.
    match_dense: products have the bits of the dequantized model, as `qdsl.match_dense_` sets it.
    """

    def __init__(self, format: str | None = None, storage: str | None = None, skip: Sequence[str] = (), *,
                 settings: Mapping[str, Any] | None = None, weights: Weights | None = None, verify: bool = False,
                 match_dense: bool = False, allow_unknown: bool = False, **params: Any) -> None:
        if (method := params.pop("quant_method", OWN)) != OWN:
            raise ValueError(f"quant_method of a QdslConfig is {OWN!r}, not {method!r}")
        self.quant_method = Method.QDSL
        if format is None and (storage is not None or params):
            raise ValueError(f"QdslConfig: {', '.join([*(['storage'] if storage else []), *params])} needs a format")
        if isinstance(skip, str):
            raise ValueError(f"QdslConfig: skip is a list of patterns: give [{skip!r}]")
        if format is not None:
            format, options = with_storage(format, {} if storage is None else {"storage": storage})
            storage = options.get("storage")
        self.format, self.storage, self.skip, self.params = format, storage, list(skip), params
        self.weights, self.verify, self.match_dense, self.allow_unknown = weights, verify, match_dense, allow_unknown
        self.settings = None if settings is None else copy.deepcopy(dict(settings))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the format's quantizer."""
        return {**({} if self.storage is None else {"storage": self.storage}), **self.params}

    def with_settings(self, settings: Mapping[str, Any]) -> QdslConfig:
        return self._with(settings, self.weights)

    def with_weights(self, weights: Weights) -> QdslConfig:
        return self._with(self.settings, weights)

    def _with(self, settings: Mapping[str, Any] | None, weights: Weights | None) -> QdslConfig:
        return QdslConfig(self.format, self.storage, self.skip, settings=settings, weights=weights, verify=self.verify,
                          match_dense=self.match_dense, allow_unknown=self.allow_unknown, **self.params)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a folder with these settings."""
        config = cls(settings=config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The folder's own settings where it has some, so that saving keeps the format of another producer."""
        if self.settings is not None:
            return copy.deepcopy(self.settings)
        named = {"format": self.format, "storage": self.storage, "skip": self.skip or None}
        return {"quant_method": OWN, **{key: value for key, value in named.items() if value is not None}, **self.params}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()
