"""Which weights are held together: by patterns of modules' names as dfloat11 has them, given or made of the names that there are.

A pattern is a regular expression for whole names of modules, and the weights below each such module, by their modules' names from
there; none for a module that is a weight's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from qdsl.checkpoint.folder import CONFIG_LIMIT, Folder
from qdsl.checkpoint.groups import CONFIG
from qdsl.checkpoint.safetensors import CheckpointError, open_regular, shown, strict_json
from qdsl.rewrite import RewriteError

WEIGHT = ".weight"
Patterns = Mapping[str, Sequence[str]]


def matrices(folder: Folder) -> list[str]:
    """The modules whose weights are bfloat16 matrices, as those of Linear and Embedding are, in the order of the files."""
    return [name.removesuffix(WEIGHT) for name in folder.names() if name.endswith(WEIGHT) and is_matrix(folder, name)]


def is_matrix(folder: Folder, name: str) -> bool:
    entry = folder.entry(name)
    return entry.dtype == "BF16" and len(entry.shape) == 2 and entry.nbytes > 0


def found(modules: Iterable[str]) -> dict[str, list[str]]:
    """Patterns for modules: those below a number, such as 'layers.0', together, one pattern for numbers with the same ones below.

    Others are for themselves.
    """
    below: dict[str, list[str]] = {}
    alone = []
    for module in modules:
        parts = module.split(".")
        place = next((place for place, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if place:
            below.setdefault(".".join(parts[:place + 1]), []).append(".".join(parts[place + 1:]))
        else:
            alone.append(module)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for block, attributes in below.items():
        stem, _, number = block.rpartition(".")
        alike.setdefault((stem, tuple(sorted(attributes))), []).append(number)
    patterns: dict[str, list[str]] = {}
    for (stem, below_it), numbers in alike.items():
        only = sum(other == stem for other, _ in alike) == 1
        patterns[re.escape(stem) + r"\." + (r"\d+" if only else f"(?:{'|'.join(numbers)})")] = list(below_it)
    return patterns | {re.escape(module): [] for module in alone}


def read(text: str) -> dict[str, list[str]]:
    """Patterns as JSON, as a file that holds that, or as a config.json of dfloat11's.  Raises RewriteError for anything else."""
    if not text.lstrip().startswith("{"):
        with open_regular(Path(text)) as file:
            data, where = file.read(CONFIG_LIMIT), text
    else:
        data, where = text.encode(), "--patterns"
    try:
        said = strict_json(data, where, depth=64, constants=True)
    except CheckpointError as error:
        raise RewriteError(str(error)) from None
    said = said.get(CONFIG, said) if isinstance(said, dict) else said
    said = said.get("pattern_dict", said) if isinstance(said, dict) else said
    if not isinstance(said, dict) or not all(isinstance(each, list) and all(isinstance(one, str) for one in each)
                                             for each in said.values()):
        raise RewriteError(f"{where}: patterns are a mapping of regular expressions to lists of names")
    for pattern in said:
        try:
            re.compile(pattern)
        except re.error as error:
            raise RewriteError(f"{where}: {shown(pattern)} is not a regular expression: {error}") from None
    return said


def matched(folder: Folder, patterns: Patterns) -> dict[str, list[str]]:
    """The weights of each module that a pattern names, in the pattern's order.

    Raises RewriteError for a weight that is not there, that is no bfloat16 matrix, or that is held twice.
    """
    names = {name[:place]: None for name in folder.names() for place in range(1, len(name)) if name[place] == "."}
    groups: dict[str, list[str]] = {}
    held: dict[str, str] = {}
    for pattern, attributes in patterns.items():
        for module in filter(re.compile(pattern).fullmatch, names):
            where = f"{folder.path}: {shown(module)}, which {shown(pattern)} names"
            own = f"{module}{WEIGHT}"
            weights = [own] if own in folder else [f"{module}.{each}{WEIGHT}" for each in attributes]
            if module in groups or not weights:
                why = "is named twice" if module in groups else "has no weight, and the pattern lists none"
                raise RewriteError(f"{where}, {why}")
            for weight in weights:
                if weight not in folder:
                    raise RewriteError(f"{where}, has no {shown(weight)}")
                if not is_matrix(folder, weight):
                    entry = folder.entry(weight)
                    raise RewriteError(f"{where}: {shown(weight)} is {entry.dtype} {list(entry.shape)}, and no bfloat16 matrix")
                if weight in held:
                    raise RewriteError(f"{where}: {shown(weight)} is in {shown(held[weight])} already")
                held[weight] = module
            groups[module] = weights
    return groups
