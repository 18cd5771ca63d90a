"""Groups of weights that are encoded together in DF11, as patterns of module names: the user's, or derived from a model's names.

A pattern is a regular expression for whole module names, and a list of submodules whose weights form the group; an empty list
means the weight of the module itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from qdsl.checkpoint.detect.groups import group_rules
from qdsl.checkpoint.files.folder import CONFIG_LIMIT
from qdsl.checkpoint.files.safetensors import CheckpointError, open_regular, shown, strict_json
from qdsl.jobs.compress.model import WEIGHT, Model
from qdsl.jobs.engine import RewriteError

MOST = (1 << 31) - 1                                             # numbers of a group: DF11 counts them in 31 bits
COLUMNS = 64                                                     # of a stack's matrices, at least
_EMBEDDING = re.compile("embed|bias")                            # T5's blocks have one called relative_attention_bias
Patterns = Mapping[str, Sequence[str]]


def matrices(model: Model) -> dict[str, int]:
    """Modules whose weights are bfloat16 matrices, such as Linear and Embedding, in the order of the files, with their number of
    weights.
    """
    return {name.removesuffix(WEIGHT): model.entry(name).nbytes // 2 for name in model.names() if is_matrix(model, name)}


def is_matrix(model: Model, name: str) -> bool:
    """Whether a tensor is the bfloat16 matrix of a module."""
    entry = model.entry(name)
    return name.endswith(WEIGHT) and entry.dtype == "BF16" and len(entry.shape) == 2 and entry.nbytes > 0


def is_stack(model: Model, name: str) -> bool:
    """Whether a tensor is a stack of experts' matrices: a weight, or a parameter of a module 'experts'.

    A tensor with fewer than COLUMNS columns is a convolution's kernel, which would grow.
    """
    entry = model.entry(name)
    return entry.dtype == "BF16" and len(entry.shape) == 3 and entry.nbytes > 0 and entry.shape[2] >= COLUMNS and (
        name.endswith(WEIGHT) or name.split(".")[-2:-1] == ["experts"])


def modules(model: Model) -> list[str]:
    """Names of all modules, from the names of their tensors."""
    return list(dict.fromkeys(name[:place] for name in model.names() for place in range(1, len(name)) if name[place] == "."))


def default_patterns(sizes: Mapping[str, int], every: Iterable[str] = ()) -> dict[str, list[str]]:
    """Patterns that group modules by block, such as 'layers.0', with one pattern for all blocks of the same modules.

    Modules outside of blocks, and those named like embeddings, form groups of their own: dfloat11 expects only Linear layers in
    a block's group.  A block of more than MOST weights is divided at its second number, such as 'layers.0.experts.0', and if
    that is still too large, into single modules.  sizes: weights of each module.  every: all modules, none of which may match
    another's pattern.
    """
    linear = [module for module in sizes if not _EMBEDDING.search(module.rpartition(".")[2])]
    blocks: dict[str, list[str]] = {}
    _group_by_block(linear, blocks, 1)
    for block, inside in list(blocks.items()):
        if sum(sizes[module] for module in inside) > MOST:
            del blocks[block]
            _group_by_block(inside, blocks, 2)
            if block in blocks and sum(sizes[module] for module in blocks[block]) > MOST:
                del blocks[block]
    alike: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for block, inside in blocks.items():
        below = tuple(sorted(module[len(block) + 1:] for module in inside))
        alike.setdefault(_without_numbers(block), {}).setdefault(below, []).append(block)
    others = [module for module in every if module not in blocks]
    patterns = {masked if len(kinds) == 1 and not any(map(re.compile(masked).fullmatch, others)) else _any_of(some): list(below)
                for masked, kinds in alike.items() for below, some in kinds.items()}
    grouped = {module for inside in blocks.values() for module in inside}
    return patterns | {re.escape(module): [] for module in sizes if module not in grouped}


def _group_by_block(modules: Iterable[str], blocks: dict[str, list[str]], depth: int) -> None:
    """Add modules to `blocks` by their name up to their number at `depth`, or up to the last number before it."""
    for module in modules:
        parts = module.split(".")
        places = [place for place, part in enumerate(parts[:-1]) if place and part.isdecimal()][:depth]
        if places:
            blocks.setdefault(".".join(parts[:places[-1] + 1]), []).append(module)


def _without_numbers(block: str) -> str:
    """A pattern for a block's name with any numbers in it."""
    return r"\.".join(r"\d+" if part.isdecimal() and place else re.escape(part) for place, part in enumerate(block.split(".")))


def _any_of(blocks: Sequence[str]) -> str:
    """A pattern for exactly these blocks."""
    stems = {block.rpartition(".")[0] for block in blocks}
    if len(stems) > 1:
        return f"(?:{'|'.join(map(re.escape, blocks))})"
    return rf"{re.escape(stems.pop())}\.(?:{'|'.join(block.rpartition('.')[2] for block in blocks)})"


def read(text: str) -> dict[str, list[str]]:
    """Reads patterns: JSON text, a path of a JSON file, or a config.json of dfloat11.  Raises RewriteError for anything else."""
    if not text.lstrip().startswith("{"):
        with open_regular(Path(text)) as file:
            data, where = file.read(CONFIG_LIMIT), text
    else:
        data, where = text.encode(), "--patterns"
    try:
        patterns = strict_json(data, where, depth=64, constants=True)
    except CheckpointError as error:
        raise RewriteError(str(error)) from None
    for key in [rule[key] for rule in group_rules().values() for key in ("settings", "names")]:
        patterns = patterns.get(key, patterns) if isinstance(patterns, dict) else patterns
    if not isinstance(patterns, dict) or not all(isinstance(names, list) and all(isinstance(one, str) for one in names)
                                                 for names in patterns.values()):
        raise RewriteError(f"{where}: patterns are a mapping of regular expressions to lists of names")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise RewriteError(f"{where}: {shown(pattern)} is not a regular expression: {error}") from None
    return patterns


def matching_modules(model: Model, patterns: Patterns) -> dict[str, list[str]]:
    """The weights of each module that a pattern matches, in the pattern's order.

    Raises RewriteError for a weight that is missing, that is no bfloat16 matrix, or that is in two groups.
    """
    names = modules(model)
    groups: dict[str, list[str]] = {}
    group_of: dict[str, str] = {}
    for pattern, attributes in patterns.items():
        for module in filter(re.compile(pattern).fullmatch, names):
            where = f"{model.path}: {shown(module)}, which {shown(pattern)} names"
            own = f"{module}{WEIGHT}"
            weights = [own] if own in model else [f"{module}.{attribute}{WEIGHT}" for attribute in attributes]
            if module in groups or not weights:
                why = "is named twice" if module in groups else "has no weight, and the pattern lists none"
                raise RewriteError(f"{where}, {why}")
            for weight in weights:
                if weight not in model:
                    raise RewriteError(f"{where}, has no {shown(weight)}")
                if not is_matrix(model, weight):
                    entry = model.entry(weight)
                    raise RewriteError(f"{where}: {shown(weight)} is {entry.dtype} {list(entry.shape)}, and no bfloat16 matrix")
                if weight in group_of:
                    raise RewriteError(f"{where}: {shown(weight)} is in {shown(group_of[weight])} already")
                group_of[weight] = module
            groups[module] = weights
    return groups
