"""Finds the storage and parameters that a checkpoint's tensors fit, and wraps them as a weight with notes for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from qdsl.core.overflowed_zeros import OVERFLOWED_ZEROS, has_overflowed_zeros
from qdsl.core.stored import OF_X, resolve_default
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.weight import order
from qdsl.runtime.weight.assemble import assemble, checked_shape
from qdsl.runtime.weight.branch_tensors import check_names
from qdsl.runtime.weight.match import Match, matches
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat


@without_autocast
def wrap(format: WeightFormat, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None, storage: str | None, verify: bool,
         params: Mapping[str, int | str]) -> PackedWeight:
    """The weight that a checkpoint's tensors hold, by their names; nothing is copied.

    shape: (N, K), needed only if the tensors do not determine it.  verify: also decode every stream.  params: the caller's;
    dtypes and shapes determine the others.  Raises FormatError that names the tensor, its value, and the requirement.
    """
    format.complete(params)
    if not isinstance(tensors, Mapping):
        name = next(iter(next(iter(next(iter(format.variants.values())).storages.values())).tensors))
        shown = type(tensors).__name__
        raise FormatError(f"{format.name}: tensors are a mapping of their names, {{'{name}': ...}}, not a {shown}")
    for name in OF_X:
        if name in tensors:
            raise FormatError(f"{format.name}: '{name}' multiplies the columns of x before the weight does, and linear knows "
                              "nothing of that: multiply x by it, or what comes before, and give the other tensors alone")
    if storage is not None and storage not in format.storages:
        raise FormatError(f"{format.name} has no storage '{storage}'; it has {', '.join(format.storages)}")
    fitting = matches(format.description, tensors, None if shape is None else checked_shape(format, shape), storage, params)
    match = _choose_match(format, fitting)
    variant = format.variant(match.params)
    described = format.description.layout(match.storage, match.params)
    check_names(format.name, variant.plus, [*match.tensors])
    keys_of = {name: [key for key in (name, *described[name].aliases) if key in tensors] for name in match.tensors}
    used = {keys[0] for keys in keys_of.values()}
    notes = [f"tensor '{name}' is not part of {format.name}.{match.storage}" for name in tensors if name not in used]
    for key, value in match.params.items():
        others = list(dict.fromkeys(str(other.params[key]) for other in fitting if other.params[key] != value))
        notes += [f"{key} = {value} by default; the tensors fit {' and '.join(others)} too"] if others else []
    notes += [f"tensor '{name}': {OVERFLOWED_ZEROS}" for name in _overflowed_zeros(format, match)]
    names = {name: keys[0] for name, keys in keys_of.items() if keys[0] != name}
    empty = unfilled_indices(format, match)
    notes += [f"tensor '{name}' has one value for all columns and tells no groups apart: taken for missing" for name in empty]
    present = {name: tensor for name, tensor in match.tensors.items() if name not in empty}
    packed = assemble(format, match.storage, present, match.shape, match.params, notes, names)
    if verify:
        packed.decode_streams()
    return packed


def unfilled_indices(format: WeightFormat, packed: Match | PackedWeight) -> dict[str, Tensor]:
    """Indices of several groups that the producer never filled, all 0 (auto-gptq) or -1 (compressed-tensors).

    Returns each with the index of columns in order, which a missing one stands for.
    """
    variant = format.variant(packed.params)
    stored = format.description.layout(packed.storage, packed.params)
    indices = {name: tensor for name, tensor in packed.tensors.items()
               if stored[name].dtype == "index" and stored[name].optional and not tensor.is_meta}
    if not indices:
        return {}
    sizes, groups = format.sizes(packed.params, packed.shape), variant.index_groups
    assert groups is not None
    several = (groups.extent(*packed.shape, sizes) or 0) > 1
    return {name: order.in_order(tensor, groups.by(sizes)) for name, tensor in indices.items()
            if several and tensor.numel() and int(tensor.max()) == int(tensor.min()) in (0, -1)}


def _overflowed_zeros(format: WeightFormat, match: Match) -> list[str]:
    """Notes on tensors whose producer lost fields."""
    widths = {name: rule[name] for rule in format.spec.detect.get("spills", []) if rule.get("storage") == match.storage
             for name in rule if name in match.tensors and not match.tensors[name].is_meta}
    return [name for name, bits in widths.items()
            if has_overflowed_zeros(match.tensors[name].cpu().contiguous().numpy().tobytes(), int(match.params[bits]))]


def _choose_match(format: WeightFormat, fitting: Sequence[Match]) -> Match:
    """The only match; among several of one storage and shape the one whose undetermined parameters have defaults."""
    claimed = format.description.claimed
    fitting = [match for match in fitting if match.storage not in claimed] or fitting
    storages = list(dict.fromkeys(match.storage for match in fitting))
    if len(storages) > 1:
        shown_params = {match.storage: "".join(f" {key}={match.params[key]}" for key in format.by) for match in fitting}
        differ = len(set(shown_params.values())) > 1
        listed = " and ".join(f"{storage}{shown_params[storage] if differ else ''}" for storage in storages)
        raise FormatError(f"{format.name}: the tensors fit the storages {listed}; say which with storage=")
    shapes = {match.shape: ", ".join(f"{key}={value}" for key, value in match.params.items()) for match in reversed(fitting)}
    if len(shapes) > 1:
        listed = " or ".join(f"{list(shape)} with {params}" for shape, params in reversed(shapes.items()))
        raise FormatError(f"{format.name}: the tensors fit {listed}; give parameters or shape=(N, K)")
    fits = {name: list(dict.fromkeys(match.params[name] for match in fitting)) for name in format.params}
    wanted = {name: resolve_default(fit, format.params[name][0]) for name, fit in fits.items()}
    for match in fitting:
        if match.params == wanted:
            return match
    shown = " or ".join(", ".join(f"{key}={value}" for key, value in match.params.items()) for match in fitting)
    raise FormatError(f"{format.name}: the tensors fit {shown}; say which")
