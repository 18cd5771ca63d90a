"""Strict JSON for untrusted files, and how messages quote untrusted strings."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# A string (to the end of the text if nothing closes it, so that no character is scanned twice) or a bracket.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class CheckpointError(ValueError):
    """Something in a file is wrong; the message names the file and the place in it."""


def strict_json(data: bytes, where: str, *, depth: int, constants: bool = False) -> object:
    """Parses JSON: no duplicate keys, at most `depth` nested brackets, valid Unicode only.

    `constants` lets NaN and Infinity pass, which JSON does not have.
    Raises CheckpointError, its message beginning with `where`.
    """
    try:
        text = data.decode()
        _check_depth(text, depth)
        value: object = json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_float=_float,
                                   parse_constant=float if constants else _no_constant)
        if "\\u" in text:                                        # the one way to write half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: half of a surrogate pair in a string") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON at character {error.pos}: {error.msg}") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return value


def strict_object(data: bytes, where: str, *, depth: int, constants: bool = False) -> dict[str, Any]:
    """The JSON object in a text, as `strict_json` parses it.  Raises CheckpointError for anything else."""
    value = strict_json(data, where, depth=depth, constants=constants)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: not a JSON object")
    return value


def _check_depth(text: str, limit: int) -> None:
    """Count nested brackets before the parser recurses on them."""
    depth = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > limit:
            raise ValueError(f"nested deeper than {limit} at character {token.start()}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        left = set(result)
        for key, _ in pairs:
            if key not in left:
                raise ValueError(f"key {shown(key)} occurs twice")
            left.remove(key)
    return result


def _integer(digits: str) -> int | float:
    if len(digits) > 64:
        raise ValueError(f"a number of {len(digits)} digits")
    return -0.0 if digits == "-0" else int(digits)               # as the library's parser has it


def _float(digits: str) -> float:
    if len(digits) > 64 or math.isinf(float(digits)):
        raise ValueError(f"number {shown(digits)} out of range")
    return float(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def shown(text: str) -> str:
    """An untrusted string for a message: quoted, escaped, cut to 80 characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
