"""The module of every tensor of a checkpoint, and the tensor's name within it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from qdsl.checkpoint.detect.header_claims import PREFIX, HeaderClaims
from qdsl.core.stored import Description

WEIGHT = "weight"                                                # the default name of a module's weight
BIAS = "_bias"                                                   # of a layer, although a storage has a 'weight_bias'


class TensorNames:
    """Assigns tensors to modules by the last parts of their names, such as 'weight_scale' or 'weight.absmax'.

    names: all of them.  whole: those of storages, without producers' own.  heads: the first parts of names with several parts.
    tails: names that begin with '_', as endings of a last part.  Those of a weight called 'weight' also serve for names in
    headers.

    A stack of experts is a weight with its own name, which begins the names of its other tensors: 'down_proj_scale_inv' belongs
    to 'down_proj' as 'weight_scale_inv' to 'weight', and 'down_proj_weight_scale' is its 'weight_scale'.  firsts, ends: what
    follows the weight's name in the names of its main tensor, and of its other tensors.
    """

    def __init__(self, formats: Iterable[Description], claims: HeaderClaims) -> None:
        self.claims = claims
        layouts = [layout for format in formats for layout in format.layouts]
        self.names = {name for layout in layouts for key, stored in layout.items() for name in (key, *stored.aliases)}
        self.names |= {name for format in formats for name in format.detect.get("tensors", {})}
        self.whole = {key for layout in layouts for key in layout}
        self.heads = {name.partition(".")[0] for name in self.names if "." in name}
        tails = (name for name in self.names if name.startswith("_") and not name.startswith(PREFIX))
        self.tails = tuple(sorted(tails, key=len, reverse=True))
        self.firsts = {first.removeprefix(WEIGHT) for layout in layouts for first in [next(iter(layout))]
                       if first.startswith(WEIGHT)}
        own = [name for name in self.names if name.startswith(WEIGHT) and name.removeprefix(WEIGHT) not in self.firsts]
        self.ends = tuple(end for name in own for end in (name.removeprefix(WEIGHT), f"_{name}"))

    def modules(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Tensors by module: modules(...)['model.layers.0.mlp.up_proj']['weight_scale'] is the full name.

        A weight with its own name is a module with this name.
        """
        every = dict.fromkeys(names)
        stacks = self._stacks(every)
        by_module: dict[str, dict[str, str]] = {}
        for name in every:
            module, leaf = self._stacked(name, stacks) or self._cut(name)
            by_module.setdefault(module, {})[leaf] = name
        return by_module

    def _stacks(self, names: Collection[str]) -> set[str]:
        """The weights with their own names: other tensors' names are derived from theirs."""
        stems = {name.removesuffix(end) for name in names if name.endswith(self.ends) for end in self.ends if name.endswith(end)}
        return {name for name in stems if name.rpartition(".")[2] not in self.names
                and any(name + first in names for first in self.firsts)}

    def _stacked(self, name: str, stacks: Collection[str]) -> tuple[str, str] | None:
        """The weight that a tensor is or belongs to, and its name as if that were called 'weight'; None if there is none."""
        if name in stacks:
            return name, WEIGHT
        for place in [place for place, letter in enumerate(name) if letter in "._"][::-1] if stacks else ():
            if name[:place] in stacks:
                ending = name[place:]
                is_own = WEIGHT + ending in self.names and ending != BIAS
                return name[:place], WEIGHT + ending if is_own else ending[1:]
        return None

    def _cut(self, name: str) -> tuple[str, str]:
        parts = name.split(".")
        for place in range(1, len(parts) - 1):
            if parts[place] in self.heads:
                return ".".join(parts[:place]), ".".join(parts[place:])
        module, _, leaf = name.rpartition(".")
        if (cut := self.claims.cut(module, leaf)) is not None:
            return cut
        # 'weight_scales' is not the tail '_scales' of 'weight', nor are a storage's 'code_scales' the scales of 'code'.
        is_own = leaf in self.whole or (leaf in self.names and leaf.startswith(WEIGHT))
        if leaf.endswith(self.tails) and leaf not in self.tails and not is_own:
            tail = next(ending for ending in self.tails if leaf.endswith(ending))
            return name[:-len(tail)], tail
        return module, leaf
