"""JSON that parsers stumble over: whole files, and values in place of those of a good file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = 100_000
FILES = [b"", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"null", b"[]", b"3", b'"x"', b"[" * DEEP, b"[" * DEEP + b"]" * DEEP,
         b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"model_type": "llama", "model_type": "qwen3"}', b'{"a": 1e999}', b'{"a": NaN}',
         b'{"a": ' + b"9" * DEEP + b"}", b'{"a": "' + b"x" * 1_000_000 + b'"}', b'{"a": "\\ud800"}', b"{}x", bytes(64)]
VALUES = ["null", "-1", "0", "true", "0.5", "1e999", "1e308", "NaN", "-Infinity", "9" * 60, "9" * 5000, "1" + "0" * 18, "[]",
          "{}", '""', '"x"', '"1"', f'"{"y" * DEEP}"', '"\\ud800"', '"../../etc/passwd"', '"\\u001b[31m\\n"', "[" * 60 + "]" * 60,
          "[" * 5000 + "]" * 5000, "[null]", '{"a": 1, "a": 2}', '{"": null}']
_PLACE = "the value that is replaced"


def drawn_json(text: bytes, draw: random.Random) -> bytes:
    """A bomb in place of a file, or of one of its values."""
    value: Any = json.loads(text)
    owners = [node for node in _nodes(value) if isinstance(node, (dict, list)) and node]
    if not owners or draw.randrange(3) == 0:
        return draw.choice(FILES)
    owner = draw.choice(owners)
    owner[draw.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))] = _PLACE
    return json.dumps(value).replace(json.dumps(_PLACE), draw.choice(VALUES)).encode()


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(inner)
