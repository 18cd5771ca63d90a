"""Derives rules from a library's converter of checkpoints, by running it on row numbers instead of weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

from qdsl.checkpoint.files.safetensors import shown
from qdsl.host.private import private_folder, read_private, write_private
from qdsl.models.gguf_maps import TensorRule
from qdsl.models.plan import LoadError

Shapes = Mapping[str, Sequence[int]]
Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]    # tensors by name -> those of a model
VERSION = 1                                                      # of rules that are kept in files


def trace(convert: Convert, shapes: Shapes) -> dict[str, TensorRule]:
    """By the names that a converter gives, the rows of the tensors that it takes.

    shapes: of a checkpoint's tensors.  The converter gets int64 tensors [N, 1, ...] of row numbers, which all tensors count
    together; it may rename, cut, join and reorder rows, as names and shapes tell it.  Raises LoadError where it computes with
    numbers or with columns, and where it fails.
    """
    rows: dict[str, Tensor] = {}
    starts: list[int] = []
    count = 0
    for name, shape in shapes.items():
        n = shape[0] if shape else 1
        rows[name] = torch.arange(count, count + n, device="cpu").view([n, *[1] * (len(shape) - 1)] if shape else [])
        starts.append(count)
        count += n
    try:
        converted = convert(dict(rows))
    except Exception as error:
        raise LoadError(f"the library's converter fails on the names and shapes of this file: {type(error).__name__}: {error}"
                        ) from error
    names, ends = list(shapes), torch.tensor([*starts[1:], count], dtype=torch.int64, device="cpu")
    return {target: _rule(target, tensor, names, starts, ends, shapes) for target, tensor in converted.items()}


def _rule(target: str, tensor: Tensor, names: Sequence[str], starts: Sequence[int], ends: Tensor, shapes: Shapes) -> TensorRule:
    """The rule of a target with these rows."""
    rows = tensor.flatten()
    if tensor.dtype != torch.int64 or not len(rows):
        raise LoadError(f"the library's converter computes {shown(target)}, which no rows of the file are")
    first, last = int(torch.searchsorted(ends, rows[0], right=True)), int(torch.searchsorted(ends, rows[-1], right=True))
    owners = [first] if first == last and int(rows.min()) >= starts[first] and int(rows.max()) < int(ends[first]) else \
        list(dict.fromkeys(torch.searchsorted(ends, rows, right=True).tolist()))
    sources = [names[owner] for owner in owners]
    if math.prod(tensor.shape[1:]) > 1 and any(len(shapes[source]) > 1 for source in sources):
        raise LoadError(f"the library's converter changes the columns of {shown(target)}")
    if not all(shapes[source] for source in sources) or (len(owners) == 1 and len(rows) == int(ends[first]) - starts[first]
                                                         and bool((rows.diff() == 1).all())):
        return TensorRule(tuple(sources))
    local, base = torch.empty_like(rows), 0
    for owner in owners:
        inside = (rows >= starts[owner]) & (rows < ends[owner])
        local[inside] = rows[inside] - starts[owner] + base
        base += int(ends[owner]) - starts[owner]
    inner = math.prod(shapes[sources[0]][1:-1])                  # rows of the last axis in one of the first
    local = (local[:, None] * inner + torch.arange(inner, device="cpu")).flatten()
    is_whole = len(local) == base * inner and bool((local.diff() == 1).all())
    return TensorRule(tuple(sources), "" if is_whole else row_spans(local))


def row_spans(rows: Tensor) -> str:
    """Row numbers in the notation of rules: 'start:stop' for consecutive ones, 'start:stop:step' for equal distances."""
    values, texts, start = rows.tolist(), [], 0
    edges = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(values)]
    if len(edges) <= 64:
        return " ".join(f"{values[a]}:{values[b - 1] + 1}" for a, b in pairwise(edges))
    while start < len(values):
        step = max(values[start + 1] - values[start], 1) if start + 1 < len(values) else 1
        stop = start + 1
        while stop < len(values) and values[stop] - values[stop - 1] == step:
            stop += 1
        texts.append(f"{values[start]}:{values[stop - 1] + 1}" + (f":{step}" if step > 1 else ""))
        start = stop
    return " ".join(texts)


def kept_trace(convert: Convert, shapes: Shapes, *key: str) -> dict[str, TensorRule]:
    """`trace`, cached in qdsl's cache folder for these shapes and this key.

    key: what the result depends on besides, such as the library's release, the converter's name and the model's config.
    """
    described = json.dumps([VERSION, key, [(name, list(shape)) for name, shape in shapes.items()]])
    name = f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"
    try:
        text = read_private(private_folder("traces") / name) or b""
        return {target: TensorRule.of(record) for target, record in json.loads(text).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        rules = trace(convert, shapes)
    with suppress(OSError):                                      # a cache that cannot be written, or not be trusted, is none
        write_private(private_folder("traces") / name, json.dumps({key: rule.record() for key, rule in rules.items()}).encode())
    return rules
