"""Detects groups of weights in one entropy code, such as DFloat11's, by their tensors; the config names the weights.

Does not import torch.  Reads only the tables and positions of streams, which are small.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.ignored import COMPILED, Budget, expression
from qdsl.checkpoint.detect.ledger import Finding, Kind, effect, is_nothing, value_text
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, Entry, shown, torch_name
from qdsl.core.codecs import StreamError, implementation
from qdsl.core.producer import CONFIG_FILE
from qdsl.core.stored import Description, element_dtype

CODING = "huffman_windows"                                       # of DF11
WINDOW = 8                                                       # bytes in which a thread of its kernel reads codes
SHARED_MEMORY = 48 << 10                                         # the limit of CUDA kernels without opt-in


@dataclass(frozen=True, slots=True)
class Group:
    """Weights in one entropy code, concatenated.

    tensors: the format's names -> names in the checkpoint.  parts: the weights by name, with their number of elements.  If the
    config does not name them, parts are named after the group and numbered, and `unnamed` is the reason.  threads: from the
    config, or None.  problems: of the tensors.
    """

    name: str
    format: str
    tensors: Mapping[str, str]
    parts: Mapping[str, int]
    threads: int | None
    problems: tuple[str, ...] = ()
    unnamed: str = ""

    def __repr__(self) -> str:
        return f"Group({self.name}: {len(self.parts)} weights of {self.numbers} numbers in {self.format})"

    @property
    def numbers(self) -> int:
        """How many weights the group has."""
        return sum(self.parts.values())

    @property
    def errors(self) -> list[str]:
        """Why its weights cannot be read by their names: problems of tensors, and what lacks names."""
        return [*self.problems, *([self.unnamed] if self.unnamed else [])]


@dataclass(frozen=True, slots=True)
class DecodingMemory:
    """Bytes of shared memory that the format's own kernel needs; fits: the most threads within a limit."""

    threads: int
    nbytes: int
    fits: int | None


def group_rules() -> dict[str, Mapping[str, str]]:
    """The rules `begins`, `settings`, `names`, `threads` and `alone` of formats whose weights are coded together."""
    return {format.name: format.detect["parts"] for format in descriptions() if "parts" in format.detect}


def groups(folder: Folder) -> list[Group]:
    """The groups of a checkpoint, in the order of its tensors."""
    grouping = [format for format in descriptions() if "parts" in format.detect]
    modules = folder.layers()
    recognised, budget = [], Budget(len(modules))
    with budget:
        for name, tensors_of_module in modules.items():
            for format in grouping:
                tensors = _tensors(format, tensors_of_module)
                if tensors is not None and all(map(folder.__contains__, tensors.values())):
                    recognised.append(_group(folder, format, name, tensors, budget))
    return recognised


def group_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Settings of groups in a config that nobody declares."""
    rules = [(rule["settings"], config.get(rule["settings"]), rule) for rule in group_rules().values()]
    return [Finding(Kind.UNKNOWN, f"{CONFIG_FILE}: {place}", key, value_text(value), effect(key))
            for place, settings, rule in rules if isinstance(settings, Mapping) for key, value in settings.items()
            if key not in [rule[name] for name in ("names", "threads", "window", "inert")] and not is_nothing(value)]


def refuse_groups(folder: Folder, recognised: Sequence[Group] | None = None) -> None:
    """Raises CheckpointError with a remedy for a folder whose weights are coded together.  recognised: its groups."""
    coded = groups(folder) if recognised is None else recognised
    if coded:
        raise CheckpointError(f"{folder.path}: weights are coded together, as {coded[0].format}; run `qdsl decompress FOLDER "
                              "--out PLAIN` and use PLAIN")


def _tensors(format: Description, names: Mapping[str, str]) -> dict[str, str] | None:
    """The tensors of the format's storage and the one with the starts of weights; None if one is missing."""
    wanted = [*_storage(format), str(format.detect["parts"]["begins"])]
    return {leaf: names[leaf] for leaf in wanted} if all(leaf in names for leaf in wanted) else None


def _storage(format: Description) -> Mapping[str, Any]:
    return next(iter(next(iter(format.variants.values())).values()))


def _group(folder: Folder, format: Description, name: str, tensors: Mapping[str, str], budget: Budget) -> Group:
    storage, problems, rule = _storage(format), [], format.detect["parts"]
    settings = folder.config.get(rule["settings"])
    settings = settings if isinstance(settings, Mapping) else {}
    for leaf, stored in storage.items():
        entry = folder.entry(tensors[leaf])
        if torch_name(entry.dtype) != element_dtype(stored.dtype) or len(entry.shape) != len(stored.axes):
            problems.append(f"'{leaf}' is {_text(entry)}; the format needs {element_dtype(stored.dtype)} [{stored.text}]")
    flat = next(leaf for leaf, stored in storage.items() if any(axis.dim == "N*K" for axis in stored.axes))
    count = math.prod(folder.entry(tensors[flat]).shape)
    try:
        splits = _splits(folder, tensors[rule["begins"]], count)
    except CheckpointError as error:
        splits = []
        problems.append(str(error))
    sizes = [stop - start for start, stop in zip([0, *splits], [*splits, count], strict=True)]
    unnamed = ""
    try:
        names = _weight_names(name, len(sizes), settings.get(rule["names"]), budget)
    except CheckpointError as error:
        names = []
        unnamed = str(error)
    if len(names) != len(sizes):
        unnamed = unnamed or f"{rule['settings']} says {len(names)} weights, and there are {len(sizes)}"
        names = [f"{name}[{number}]" for number in range(len(sizes))]
    threads = settings.get(rule["threads"])
    problems += _block_problems(folder, rule, settings, tensors)
    first = threads[0] if isinstance(threads, list) and threads else None
    threads_of_blocks = first if type(first) is int and first in [1 << power for power in range(3, 11)] else None
    return Group(name, format.name, tensors, dict(zip(names, sizes, strict=True)), threads_of_blocks, tuple(problems), unnamed)


def _block_problems(folder: Folder, rule: Mapping[str, str], settings: Mapping[str, Any],
                    tensors: Mapping[str, str]) -> list[str]:
    """A problem if the blocks of a stream are not of as many threads, and of windows of as many bytes, as settings say."""
    sizes = {leaf: folder.entry(tensors[leaf]).nbytes for leaf in ("encoded_exponent", "gaps", "output_positions")}
    claims = {key: settings[key] for key in (rule["threads"], rule["window"]) if settings.get(key) is not None}
    numbers = [first for value in claims.values() for first in (value[:1] if isinstance(value, list) else [value])]
    if len(claims) < 2 or not all(sizes.values()):
        return []
    if len(numbers) == 2 and type(numbers[0]) is int and numbers[0] > 0 and numbers[1] == WINDOW:
        blocks = -(-sizes["encoded_exponent"] // math.prod(numbers))
        if sizes["gaps"] == -(-5 * numbers[0] * blocks // 8) and sizes["output_positions"] in (4 * blocks, 4 * blocks + 4):
            return []
    says = " and ".join(f"{key} = {value}" for key, value in claims.items())
    return [f"{rule['settings']} says {says}, and the tensors are not of such blocks: " + ", ".join(
        f"'{leaf}' has {size} bytes" for leaf, size in sizes.items())]


def _text(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _splits(folder: Folder, name: str, count: int) -> list[int]:
    entry = folder.entry(name)
    if entry.dtype != "I64" or len(entry.shape) != 1:
        raise CheckpointError(f"{shown(name)} is {_text(entry)}; the format needs I64 [weights - 1]")
    data = folder.file(name).start(name, entry.nbytes)
    if len(data) < entry.nbytes:
        raise CheckpointError(f"{shown(name)} is known by its header alone, and its numbers say where weights begin")
    splits = list(struct.unpack(f"<{entry.shape[0]}q", data))
    if any(stop < start for start, stop in zip([0, *splits], [*splits, count], strict=True)):
        raise CheckpointError(f"{shown(name)} does not rise from 0 to {count}")
    return splits


def _weight_names(name: str, count: int, patterns: object, budget: Budget) -> list[str]:
    """The names of a group's weights, by the first pattern that matches its module; 'weight' for a single-weight module."""
    for pattern, attributes in patterns.items() if isinstance(patterns, Mapping) else ():
        budget.charge(COMPILED)
        if expression(pattern).match(name, whole=True) and isinstance(attributes, list):
            if attributes and all(isinstance(attribute, str) for attribute in attributes) and not (count == 1 < len(attributes)):
                return [f"{name}.{attribute}.weight" for attribute in attributes]
            break
    return [f"{name}.weight"] if count == 1 else []


def decoding_memory(folder: Folder, group: Group, limit: int = SHARED_MEMORY) -> DecodingMemory | None:
    """The shared memory that the group's kernel needs; None if tensors are invalid.  Raises StreamError for invalid tables."""
    import numpy as np

    from qdsl.codecs import lookup

    windows = implementation(CODING)
    threads = group.threads or windows.THREADS
    if group.problems:
        return None
    positions, tables = (folder.file(group.tensors[leaf]).start(group.tensors[leaf], folder.entry(group.tensors[leaf]).nbytes)
                         for leaf in ("output_positions", "luts"))
    if len(positions) < 4 or len(positions) % 4:
        raise StreamError(f"output_positions have {len(positions)} bytes")
    code = lookup.code_of_tables(np.frombuffer(tables, np.uint8).reshape(folder.entry(group.tensors["luts"]).shape))
    begins = np.append(np.frombuffer(positions, "<u4"), group.numbers).astype(np.int64)
    fullest = int(np.diff(begins).max())
    shortest = int(code.lengths[code.lengths > 0].min())
    return DecodingMemory(threads, windows.shared_memory(threads, fullest),
                          windows.threads_within(limit, threads, fullest, shortest))
