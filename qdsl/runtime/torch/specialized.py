"""Modules whose class, and the code of its `forward`, belongs to one description of a packed weight.

torch.compile keeps compiled programs with the code object that it traced, and by default makes at most 8 for each.  Layers that
are compiled one by one would share the code of `forward`, and a ninth format or shape would exceed that limit.  Here layers share
it only where they share a program: their weights have one format, storage and shape.  A whole model traces into `forward`, and
needs a program for each description anyway.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, update_wrapper
from types import FunctionType
from typing import Any

from torch import nn

GENERAL = "_general"                                             # in a specialized class: the class that it was made of


class SpecializedModule(nn.Module):
    """A module that changes its class to a subclass of the same name, shared by modules whose weights have one description.

    Pickled and copied modules name the general class, because only that one can be imported.
    """

    def _description(self) -> Hashable:
        """What compiled programs depend on in the weight: equal for modules that can share them."""
        raise NotImplementedError

    def _specialize(self) -> None:
        """Set the class for the current description; a class that others made of a specialized one stays, as that of FSDP2."""
        own = type(self)
        if GENERAL in vars(own) or not hasattr(own, GENERAL):
            general: Any = vars(own).get(GENERAL, own)
            self.__class__ = _specialized_class(general, general.forward, self._description())

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (vars(type(self)).get(GENERAL, type(self)),), *reduced[2:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._specialize()


@lru_cache(maxsize=4096)
def _specialized_class(general: type, forward: Any, description: Hashable) -> type:
    """A subclass for modules of one description, with a copy of the class's `forward`."""
    names = ("__module__", "__qualname__", "__doc__")
    return type(general.__name__, (general,), {**{name: getattr(general, name) for name in names}, GENERAL: general,
                                               "forward": _copied(forward)})


def _copied(forward: Any) -> Any:
    """A function with a code object of its own; other callables as they are."""
    if not isinstance(forward, FunctionType):
        return forward
    copied = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    copied.__defaults__, copied.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    update_wrapper(copied, forward)
    del copied.__wrapped__                                       # type: ignore[attr-defined]
    return copied
