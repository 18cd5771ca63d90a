"""The target of a conversion, a format and a storage, and the conversion of one weight to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.descriptions import description_of, program_of
from qdsl.checkpoint.detect.ignored import is_skipped
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import module_of
from qdsl.checkpoint.detect.targets import format_target, producer_target, storage_target
from qdsl.core.options import FormatError, choose_options
from qdsl.core.places import UnknownSpec
from qdsl.core.program import is_entropy_code, program_description
from qdsl.jobs.engine import RewriteError

if TYPE_CHECKING:
    import torch

    from qdsl.runtime.format import Format
    from qdsl.runtime.weight.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Conversion:
    """The target of a conversion: layers of `format` ('' for any) get another storage, or with `requantize`, all layers get the
    format.

    params: of the format to requantize to; others have their defaults.  ignore: patterns of plain layers that stay plain; None
    where quantized layers are converted.  only: the models of a pipeline to quantize, () for all.  skip: patterns of quantized
    layers that stay unchanged.  keep_misfits: leave quantized layers unchanged that the storage cannot represent.
    producer: whose settings the config gets; '' for the storage's first.  allow_unknown: convert folders with settings or tensors
    that change the model, and that qdsl does not compute or does not know.  calibration: what moments of inputs depend on; empty
    without calibration.  moments: the folder that has them (encode/calibrated/store.py).  transposed: layers whose plain weights
    are [K, N] in the model, as of GPT-2's Conv1D.
    """

    format: str
    storage: str
    requantize: bool = False
    params: Mapping[str, int | str] = field(default_factory=dict)
    ignore: Sequence[str] | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    keep_misfits: bool = False
    producer: str = ""
    allow_unknown: bool = False
    calibration: Mapping[str, int | str | bool] = field(default_factory=dict)
    moments: str = ""
    transposed: Sequence[str] = ()

    @property
    def is_from_plain(self) -> bool:
        """Whether plain layers are quantized."""
        return self.ignore is not None

    @property
    def label(self) -> str:
        """The target storage, as FORMAT.STORAGE where the format is part of the target."""
        return f"{self.format}.{self.storage}".removeprefix(".")

    def data(self) -> dict[str, Any]:
        """The fields for JSON; options of plain layers only if plain layers are quantized."""
        unset = (name for name in ("producer", "allow_unknown", "calibration", "transposed") if not getattr(self, name))
        further = ("ignore", "only", "skip", "keep_misfits", "moments", *unset)
        fields = {name: value for name, value in asdict(self).items() if name not in further}
        if self.ignore is not None:
            return {**fields, "ignore": list(self.ignore), "only": list(self.only)}
        return fields | ({"skip": list(self.skip)} if self.skip else {}) | ({"keep_misfits": True} if self.keep_misfits else {})

    @property
    def options(self) -> dict[str, int | str]:
        """Options for `quantize`: the parameters, and settings that readers of the storage need, such as symmetric codes."""
        rules = [rule for rule in description_of(self.format).detect.get("config", []) if rule.get("storage") == self.storage]
        return {**next((rule["quantize"] for rule in rules if "quantize" in rule), {}), **self.params}

    def includes(self, layer: Layer) -> bool:
        return (self.requantize or self.format in ("", layer.format)) and not is_skipped(layer.name, self.skip)

    def is_exact(self, layer: Layer) -> bool:
        """Whether the conversion of a layer keeps its values."""
        return not self.requantize or (layer.format == self.format and self.params.items() <= layer.params.items())

    def is_reached(self, layer: Layer) -> bool:
        """Whether a layer already has the target storage and format."""
        return self.is_exact(layer) and layer.storage == self.storage and not self.producer


def parse_conversion(to: str, requantize: bool = False, params: Mapping[str, int | str] | None = None,
                     ignore: Sequence[str] | None = None, only: Sequence[str] = (), skip: Sequence[str] = (),
                     keep_misfits: bool = False, producer: str = "", allow_unknown: bool = False) -> Conversion:
    """Parses a target: 'STORAGE', or 'FORMAT.STORAGE' for layers of that format only; to requantize, 'FORMAT' is enough.

    to: also in other letters, or a name that has one meaning (targets.py).

    ignore, only, producer, allow_unknown: as of Conversion, the first two for plain layers that are quantized.  skip,
    keep_misfits: for layers that are quantized already.

    Raises RewriteError for an unknown format, storage, producer or parameter, and for entropy codes of plain numbers.
    """
    producer = _read_target(producer_target, producer)
    if not requantize:
        format, _, storage = _read_target(storage_target, to).rpartition(".")
        return Conversion(format, storage, skip=skip, keep_misfits=keep_misfits, producer=producer, allow_unknown=allow_unknown)
    name, _, storage = _read_target(format_target, to).partition(".")
    program = program_of(name)
    try:
        chosen, options, storage = choose_options(
            program_description(program), {**(params or {}), **({"storage": storage} if storage else {})})
    except FormatError as error:
        raise RewriteError(str(error)) from None
    if is_entropy_code(program, storage):
        raise RewriteError(f"{name}.{storage} is an entropy code of bfloat16, of variable length: "
                           f"`qdsl compress --format {name}` compresses plain matrices without loss")
    if ignore is not None and "safetensors" in description_of(name).detect:
        raise RewriteError(f"{name} is a format of plain numbers, which quantizes nothing")
    return Conversion(name, storage, True, {**chosen, **options}, ignore, only, skip, keep_misfits, producer, allow_unknown)


def _read_target(meaning: Callable[[str], str], word: str) -> str:
    try:
        return meaning(word)
    except UnknownSpec as error:
        raise RewriteError(str(error)) from None


def layer_format(layer: Layer, aim: Conversion) -> Format:
    format: Format = module_of(layer).FORMAT if aim.is_exact(layer) else target_format(aim)
    return format


def target_format(aim: Conversion) -> Format:
    format: Format = import_module(f"qdsl.generated.{aim.format}").FORMAT
    return format


def layer_params(layer: Layer, aim: Conversion) -> Mapping[str, int | str]:
    """The parameters that a layer gets in its target format."""
    format = layer_format(layer, aim)
    return layer.params if aim.is_exact(layer) else format.complete(
        {name: value for name, value in aim.params.items() if name in format.params})


def converted_weight(weight: PackedWeight, layer: Layer, aim: Conversion, amax: float | None = None,
                     floats: torch.Tensor | None = None, expert: int = 0) -> PackedWeight:
    """Converts or quantizes a weight of a layer.  Raises FormatError where it cannot.

    amax: the largest magnitude of all weights that share its super-scale.  floats: `weight_values` of the weight.  expert: its
    number in a layer of experts.
    """
    from qdsl.runtime.weight.convert import with_indices, with_scales

    if aim.is_exact(layer):
        return with_indices(weight.format.convert(weight, aim.storage))
    options: dict[str, Any] = {**aim.options, **({} if amax is None else {"amax": amax})}
    floats = weight_values(weight) if floats is None else floats
    if aim.moments:
        from qdsl.encode.calibrated import solve, store

        moments = store.Moments(Path(aim.moments))
        name = layer.name if layer.experts is None else f"{layer.name}.{expert}"
        if name in moments:
            return with_scales(solve.quantize(layer_format(layer, aim), floats, moments[name], str(aim.calibration["method"]),
                                              storage=aim.storage, **options))
    return with_scales(layer_format(layer, aim).quantize(floats, aim.storage, **options))


def weight_values(weight: PackedWeight) -> torch.Tensor:
    """The values [N, K] of a weight: the tensor itself of a plain one, else float32."""
    import torch

    [tensor, *_] = weight.tensors.values()
    return tensor if weight.variant.copies else weight.format.dequantize(weight, torch.float32)


def shares_scale(layer: Layer, aim: Conversion) -> bool:
    """Whether the target format stores a super-scale, which fused weights must share."""
    if aim.is_exact(layer) or "amax" in aim.params:
        return False
    variant = next(iter(layer_format(layer, aim).variants.values()))
    return "amax" in variant.options and "amax" not in variant.storages[aim.storage].options


def becomes_transposed(layer: Layer, aim: Conversion) -> bool:
    """Whether a layer becomes a plain weight [K, N]."""
    return layer.name in aim.transposed and layer.experts is None and is_plain_target(layer, aim)


def is_plain_target(layer: Layer, aim: Conversion) -> bool:
    """Whether a layer becomes plain numbers."""
    return not aim.is_exact(layer) and "safetensors" in description_of(layer_format(layer, aim).name).detect
