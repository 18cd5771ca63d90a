"""What layers are to become: a format and a storage, and a weight in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.ignored import is_skipped
from qdsl.checkpoint.detect.layer_weights import module_of
from qdsl.checkpoint.detect.layers import Layer
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.stored import Description
from qdsl.jobs.engine import RewriteError

if TYPE_CHECKING:
    import torch

    from qdsl.runtime.weight.format import Format
    from qdsl.runtime.weight.packed import PackedWeight

PACKED = "pack-quantized"                                        # compressed-tensors, whose readers want no zero points


@dataclass(frozen=True, slots=True)
class Aim:
    """What layers are to become: a storage, of the format that they have ('' if of any), or, requantized, of that one.

    params: of the format that weights are requantized in; others have their defaults.  ignore: where plain layers are quantized,
    patterns of those that stay plain; None where quantized layers are converted.  only: the models of a pipeline that are
    quantized, none for all.  skip: patterns of quantized layers that stay as they are.  keep_misfits: whether quantized layers
    that the storage cannot hold stay as they are.
    """

    format: str
    storage: str
    requantize: bool = False
    params: Mapping[str, int | str] = field(default_factory=dict)
    ignore: Sequence[str] | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    keep_misfits: bool = False

    @property
    def is_from_plain(self) -> bool:
        """Whether plain layers are quantized."""
        return self.ignore is not None

    @property
    def label(self) -> str:
        """The storage that layers are to have, and the format where one is meant."""
        return f"{self.format}.{self.storage}".removeprefix(".")

    def data(self) -> dict[str, Any]:
        """The fields as JSON gives them back, those of plain layers where it is of them."""
        found = {name: value for name, value in asdict(self).items() if name not in ("ignore", "only", "skip", "keep_misfits")}
        if self.ignore is not None:
            return {**found, "ignore": list(self.ignore), "only": list(self.only)}
        return found | ({"skip": list(self.skip)} if self.skip else {}) | ({"keep_misfits": True} if self.keep_misfits else {})

    @property
    def options(self) -> dict[str, int | str]:
        """What weights are quantized with: the parameters, and symmetric codes where readers of the storage take those alone."""
        rules = description(self.format).detect.get("config", [])
        is_packed = any(rule.get("format") == PACKED and rule.get("storage") == self.storage and rule.get("symmetric")
                        for rule in (rules if isinstance(rules, list) else [rules]))
        return {**({"symmetric": True} if is_packed else {}), **self.params}

    def meant(self, layer: Layer) -> bool:
        return (self.requantize or self.format in ("", layer.format)) and not is_skipped(layer.name, self.skip)

    def exact(self, layer: Layer) -> bool:
        """Whether numbers stay what they are."""
        return not self.requantize or (layer.format == self.format and self.params.items() <= layer.params.items())

    def reached(self, layer: Layer) -> bool:
        return self.exact(layer) and layer.storage == self.storage


def aimed(to: str, requantize: bool = False, params: Mapping[str, int | str] | None = None, ignore: Sequence[str] | None = None,
          only: Sequence[str] = (), skip: Sequence[str] = (), keep_misfits: bool = False) -> Aim:
    """What 'STORAGE', or 'FORMAT.STORAGE' for the layers of that format alone, means; to requantize 'FORMAT' is enough.

    ignore, only: as of Aim, for plain layers that are quantized.  skip, keep_misfits: for layers that are quantized already.

    Raises RewriteError for a format or parameters that there are not, and for plain numbers in entropy codes.
    """
    if not requantize:
        format, _, storage = to.rpartition(".")
        return Aim(format, storage, skip=skip, keep_misfits=keep_misfits)
    from qdsl.runtime.weight.packed import FormatError

    name, _, storage = to.partition(".")
    if name not in [each.name for each in descriptions()]:
        raise RewriteError(f"no format {shown(name)}")
    format = import_module(f"qdsl.generated.{name}").FORMAT
    try:
        chosen, rest, storage = format.chosen({**(params or {}), **({"storage": storage} if storage else {})})
    except FormatError as error:
        raise RewriteError(str(error)) from None
    if format.storage(storage, chosen)[1].streams and format.variant(chosen).copies:
        raise RewriteError(f"{name}.{storage} holds bfloat16 in an entropy code, as long as the numbers want it: "
                           f"`qdsl compress --format {name}` writes plain matrices so, without loss")
    if ignore is not None and "safetensors" in description(name).detect:
        raise RewriteError(f"{name} is a format of plain numbers, which quantizes nothing")
    return Aim(name, storage, True, {**chosen, **rest}, ignore, only, skip, keep_misfits)


def description(name: str) -> Description:
    """A format, as readers of checkpoints know it."""
    return next(each for each in descriptions() if each.name == name)


def target(layer: Layer, aim: Aim) -> Format:
    """The format that a layer will have."""
    found: Format = (module_of(layer) if aim.exact(layer) else import_module(f"qdsl.generated.{aim.format}")).FORMAT
    return found


def params_in(layer: Layer, aim: Aim) -> Mapping[str, int | str]:
    """The parameters of that format that it will have."""
    format = target(layer, aim)
    return layer.params if aim.exact(layer) else format.complete(
        {name: value for name, value in aim.params.items() if name in format.params})


def become(weight: PackedWeight, layer: Layer, aim: Aim, amax: float | None = None) -> PackedWeight:
    """A weight of a layer as it will be; of a plain one as `quantize` makes it.  Raises FormatError where it cannot.

    amax: the largest magnitude of all weights that share its super-scale.
    """
    if aim.exact(layer):
        from qdsl.runtime.weight.convert import with_indices

        return with_indices(weight.format.convert(weight, aim.storage))
    options: dict[str, Any] = {**aim.options, **({} if amax is None else {"amax": amax})}
    return target(layer, aim).quantize(values(weight), aim.storage, **options)


def values(weight: PackedWeight) -> torch.Tensor:
    """The numbers [N, K] of a weight: the tensor itself of a plain one, else float32."""
    import torch

    [tensor, *_] = weight.tensors.values()
    return tensor if weight.variant.copies else weight.format.dequantize(weight, torch.float32)


def shares_scale(layer: Layer, aim: Aim) -> bool:
    """Whether the format that a layer will have stores a super-scale, which weights that are fused share."""
    if aim.exact(layer) or "amax" in aim.params:
        return False
    variant = next(iter(target(layer, aim).variants.values()))
    return "amax" in variant.options and "amax" not in variant.storages[aim.storage].options
