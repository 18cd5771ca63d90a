"""Diffusion models in GGUF files: detects their architectures, and chooses a type for each tensor, by diffusion.toml."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.places import table_of
from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.mixes import Choice, Options, Tensor, is_kept, place_of

PREFIX = "model.diffusion_model."                                # of a file that holds other models too
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")     # as GGUF and safetensors call them
SMALL = 1024                                                     # so few elements are not worth a smaller type
RESHAPED = 512                                                   # elements from which rows of 256 are made


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture is detected, and which of its tensors are not quantized.

    keys: sets of names; a checkpoint has all names of one set.  not_with: names that it cannot have.
    kept: parts of names of tensors that are not quantized, whole: whole names.  exact: parts of names that stay in float32.
    reshaped: rows that no block divides are stored as rows of 256.
    """

    keys: Sequence[Sequence[str]]
    kept: Sequence[str]
    whole: Sequence[str] = ()
    exact: Sequence[str] = ()
    not_with: Sequence[str] = ()
    reshaped: bool = False


_TABLE = table_of(__file__)
ARCHITECTURES = {name: Architecture(**row) for name, row in _TABLE["architectures"].items()}
_FIRST_VALUES = {"Q3_K_M": 2, "Q4_K_S": 4}                       # so many of the first values get Q5_K


def detect(names: Collection[str]) -> str | None:
    """The architecture that matches the tensor names (without PREFIX); None where none or more than one matches."""
    plain = {name.removeprefix(PREFIX) for name in names}
    matches = [name for name, rules in ARCHITECTURES.items()
               if any(plain.issuperset(keys) for keys in rules.keys) and plain.isdisjoint(rules.not_with)]
    return matches[0] if len(matches) == 1 else None


def why_contradictory(chosen: str, detected: str | None, names: Collection[str]) -> str | None:
    """Why a model cannot have the architecture that the user chose; None where it can."""
    rules, plain = ARCHITECTURES[chosen], {name.removeprefix(PREFIX) for name in names}
    if wrong := [name for name in rules.not_with if name in plain]:
        return f"it has a tensor {shown(wrong[0])}, which readable files of {chosen} do not have"
    if detected is not None and detected != chosen:
        return f"its names are those of {detected}, not of {chosen}"
    if plain.isdisjoint(key for keys in rules.keys for key in keys):
        return f"it has no tensor {shown(rules.keys[0][0])}, nor another by which {chosen} is known"
    return None


def stored_shape(architecture: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is stored: its own, or rows of 256."""
    count = math.prod(shape)
    if ARCHITECTURES[architecture].reshaped and len(shape) > 1 and count >= RESHAPED and not count % 256 and shape[-1] % 256:
        return count // 256, 256
    return shape


def choose(architecture: str, tensors: Iterable[Tensor], options: Options, from_gguf: bool) -> dict[str, Choice]:
    """The type of every tensor by name, ordered by name.  tensors: with their stored shapes.

    from_gguf: tensors that are not quantized keep their type; those of a safetensors file become float32, or 16 bits.
    Raises QuantizeError for mixes that these models have none of.
    """
    mix = options.mix
    if mix.default and mix.name.startswith("IQ") and not options.pure:
        raise QuantizeError(f"diffusion models have no mix {mix.name}: with --pure every matrix gets the type {mix.default}")
    values: Counter[str] = Counter()
    rules = ARCHITECTURES[architecture]
    return {tensor.name: _choice(rules, tensor, options, values, from_gguf) for tensor in sorted(tensors, key=place_of)}


def _choice(architecture: Architecture, tensor: Tensor, options: Options, seen: Counter[str], from_gguf: bool) -> Choice:
    default = options.mix.default
    name = tensor.name.removeprefix(PREFIX)
    if default is None:
        return Choice(tensor.type, tensor.type)
    named = None if _is_float32(architecture, name, tensor) else options.override(tensor.name)
    if named is None and _stays(architecture, name, tensor):
        type = tensor.type if from_gguf else _plain(architecture, name, tensor)
        return Choice(type, type)
    wanted = named or default
    if named is None and not options.pure and default not in TORCH:
        role = _role(name)
        wanted = _TABLE["roles"].get(role, {"types": {}})["types"].get(options.mix.name, default)
        if role == "value" and seen[role] < _FIRST_VALUES.get(options.mix.name, 0):
            wanted = "Q5_K"
        seen[role] += 1
    return Choice("F16" if tensor.columns % BY_NAME[wanted].elements else wanted, wanted)


def _role(name: str) -> str:
    experts = "experts." in name and ".w2.weight" in name
    return next((role for role, row in _TABLE["roles"].items() if any(part in name for part in row["parts"])),
                "down" if experts else "other")


def _stays(architecture: Architecture, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is quantized only where the user says so: all but matrices, and the small layers at both ends of a model.
    """
    return _is_float32(architecture, name, tensor) or is_kept(tensor) or tensor.rank != 2 or name in architecture.whole \
        or any(part in name for part in architecture.kept)


def _is_float32(architecture: Architecture, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is stored in float32: vectors, convolutions over video, small tensors, and what readers expect so."""
    return tensor.rank < 2 or len(tensor.shape) > 4 or math.prod(tensor.shape) <= SMALL \
        or any(part in name for part in architecture.exact)


def _plain(architecture: Architecture, name: str, tensor: Tensor) -> str:
    """The type of a tensor that is not quantized."""
    if tensor.type not in FLOATS:
        return tensor.type
    return "F32" if _is_float32(architecture, name, tensor) else "BF16" if tensor.type == "BF16" else "F16"
