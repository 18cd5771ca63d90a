"""Copies of weights that products on a CPU keep: made at the first call, and as long as the weight's memory lives.

QDSL_CPU_INTERLEAVE says which weights have copies: 'auto', the default, those of layers in models that loaders fill; 'always'
all; 'never' none.  Products with other weights read them as they are stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from qdsl.host.system import page_out
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.settings import EnvironmentSetting

INTERLEAVE = EnvironmentSetting("QDSL_CPU_INTERLEAVE", ("auto", "always", "never"))
Copy = TypeVar("Copy")

_entries: dict[tuple[int, ...], KeptCopy[Any] | None] = {}         # by addresses of tensors and the description
_descriptions: dict[tuple[Any, ...], int] = {}


@dataclass(frozen=True, slots=True)
class KeptCopy(Generic[Copy]):
    """A copy, and versions of the tensors that it was made of: of parameters, which modules check, and others.

    address: of what C reads of the copy.
    """

    copy: Copy
    address: int
    versions: dict[bool, tuple[int, ...]] = field(default_factory=dict)

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors have not changed since their copy was made."""
        versions = tuple([tensor._version for tensor in tensors])
        return self.versions.setdefault(isinstance(tensors[0], torch.nn.Parameter), versions) == versions


def get_copy(packed: PackedWeight, make: Callable[[], KeptCopy[Copy] | None], is_new: bool = False) -> KeptCopy[Copy] | None:
    """What `make` copied of a weight at the first call; None for a weight without a copy, for which `make` returns None.

    is_new: make another one.  A changed or replaced tensor gets a new copy; tensors of inference mode, which do not tell that
    they change, have none.  Memory that is written through `tensor.data` is not noticed: see `forget_copies`.
    """
    choice = INTERLEAVE.value()
    if choice == "never" or (choice == "auto" and not packed.keeps_copy):
        return None
    if packed.is_decoded or packed.has_branch or not packed.tensors:
        return None
    tensors = [packed.tensors[name] for name in packed.layout.coded if name in packed.tensors and name not in packed.in_order]
    if any(tensor.is_inference() for tensor in tensors):         # they count no changes, of which a copy must know
        return None
    key = (*[tensor.data_ptr() for tensor in tensors], description_number(packed))
    entry = _entries.get(key)
    if not is_new and key in _entries and (entry is None or entry.is_current(tensors)):
        return entry
    _entries[key] = entry = make()
    if entry is not None:
        entry.is_current(tensors)                                # notes their versions
        for tensor in tensors:                                   # products do not read them any more
            page_out(tensor.data_ptr(), tensor.nbytes)
    for tensor in tensors:                                       # its address may be another tensor's afterwards
        weakref.finalize(tensor.untyped_storage(), _entries.pop, key, None).atexit = False
    return entry


def find(tensors: Sequence[Tensor], described: int) -> KeptCopy[Any] | None:
    """The copy of a weight with these tensors and this `description_number`; None where it has none, or tensors have changed."""
    entry = _entries.get((*[tensor.data_ptr() for tensor in tensors], described))
    return entry if entry is not None and entry.is_current(tensors) else None


def replace_copies(copies: Sequence[Any], others: Sequence[KeptCopy[Any]]) -> None:
    """Keep other copies of the same weights in place of copies."""
    by_copy = dict(zip(map(id, copies), others, strict=True))
    for key, entry in list(_entries.items()):
        if entry is not None and id(entry.copy) in by_copy:
            other = by_copy[id(entry.copy)]
            _entries[key] = KeptCopy(other.copy, other.address, entry.versions)


def description_number(packed: PackedWeight) -> int:
    """A number that tells weights at one address apart."""
    described = (packed.format, packed.storage, packed.shape, packed.params_text,
                 *[tensor.stride() for tensor in packed.tensors.values()])
    return _descriptions.setdefault(described, len(_descriptions))


def forget_copies(tensors: Mapping[str, Tensor]) -> None:
    """Drop the copies of weights with these tensors, whose numbers have changed."""
    places = {tensor.data_ptr() for tensor in tensors.values()}
    for key in [key for key in list(_entries) if places & set(key[:-1])]:
        _entries.pop(key, None)
