"""The decorator of functions that implement an encode scheme of qdsl/core/schemes.toml."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from qdsl.core.schemes import SCHEMES

_Function = TypeVar("_Function", bound=Callable[..., Any])


def scheme(function: _Function) -> _Function:
    """Returns the function, after checking that its arguments match the scheme of its name.

    Raises TypeError if they do not, KeyError if there is no such scheme.
    """
    needed, allowed = SCHEMES[function.__name__].argument_names
    arguments = set(inspect.signature(function).parameters) - {"weight"}
    if not needed <= arguments <= allowed:
        raise TypeError(f"{function.__name__} and its entry in core/schemes.toml differ: "
                        f"{', '.join(sorted((needed - arguments) | (arguments - allowed)))}")
    return function
