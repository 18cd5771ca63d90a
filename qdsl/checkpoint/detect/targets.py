"""Reads names of formats and storages as people write them: `GPTQ`, `awq`, `Q4_K_M`, `int-group.awq`.

A name of a storage that one format has stands for both.  A name of a producer stands for the storage of its settings that may be
absent: GPTQ's config without `checkpoint_format` describes `gptq_v1`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.descriptions import description_of, descriptions
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core import places
from qdsl.core.places import UnknownSpec
from qdsl.core.producer import NULL
from qdsl.core.text import join_names, name_key, similar_names

LISTS = "`qdsl list` prints all"


def formats() -> list[str]:
    return [format.name for format in descriptions()]


def storages() -> dict[str, list[str]]:
    """The formats that have a storage, by the storage's name."""
    by_storage: dict[str, list[str]] = {}
    for format in descriptions():
        for storage in format.storages:
            by_storage.setdefault(storage, []).append(format.name)
    return by_storage


def format_target(word: str) -> str:
    """'FORMAT' or 'FORMAT.STORAGE' for a word that means one of them.  Raises UnknownSpec with suggestions for other words."""
    format, dot, storage = name_key(word).partition(".")
    if format in formats():
        return f"{format}.{_storage_of(format, storage)}" if dot else format
    if not dot and len(meanings := _meanings(format)) == 1:
        return meanings[0]
    if word.endswith((".yaml", ".yml")):
        folder = shlex.quote(str(Path(word).parent))
        raise UnknownSpec(f"{shown(word)} is a file, and a format is a name here: with {places.FOLDER_VARIABLE}={folder} in "
                          f"front of the command, or set for all, it is {Path(word).stem}")
    near = _did_you_mean(format, formats())
    raise UnknownSpec(f"no format {shown(word)}; {near}{LISTS}" + (
        "" if near else ", QDSL_SPECS names a folder of your own specs, and `qdsl quantize --type` takes llama-quantize's mixes"))


def spec_of(word: str) -> Path:
    """The spec that a path, or a word that means a format, leads to.  Raises UnknownSpec with suggestions for other words."""
    try:
        return places.find_spec(word)
    except UnknownSpec:
        if Path(f"{word}.yaml").is_file():
            raise UnknownSpec(f"no spec {shown(word)}; did you mean the file {word}.yaml?") from None
        if Path(word).exists() or word.endswith((".yaml", ".yml")):
            raise                                                # which asks for a file
        if not (_meanings(name_key(word)) or _did_you_mean(name_key(word), formats())):
            raise
    return places.find_spec(format_target(word).partition(".")[0])


def with_storage(word: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a format by a word, and options of its `quantize`, with the storage that the word means if they name none.

    Raises UnknownSpec with suggestions for other words.
    """
    format, _, storage = format_target(word).partition(".")
    return format, {**({"storage": storage} if storage else {}), **options}


def storage_target(word: str) -> str:
    """'STORAGE' or 'FORMAT.STORAGE' for a word that means a storage.  Raises UnknownSpec with suggestions for other words."""
    format, dot, storage = name_key(word).rpartition(".")
    if dot and format in formats():
        return f"{format}.{_storage_of(format, storage)}"
    if not dot and (storage in storages() or any(storage in description_of(name).transient for name in formats())):
        return storage
    if not dot and len(meanings := _meanings(storage)) == 1:
        return meanings[0].partition(".")[2]
    if not dot and storage in formats():
        raise UnknownSpec(f"{storage} is a format, and --to takes a storage: {join_names(_own_storages(storage))}; "
                           f"`--requantize {storage}` writes layers of other formats in it")
    raise UnknownSpec(f"no storage {shown(word)}; {_did_you_mean(storage, [*storages()])}{LISTS}")


def producer_target(word: str) -> str:
    """A producer's name in any letters, or ''.  Raises UnknownSpec with suggestions for other words."""
    name = word.lower()
    if not name or producers().is_known(name):
        return word
    names = [producer.name for producer in producers().every if producers().is_known(producer.name)]
    near = similar_names(name, names) or names
    raise UnknownSpec(f"no producer {shown(word)}; did you mean {join_names(near, 'or')}?")


def _storage_of(format: str, storage: str) -> str:
    """The storage of a format, by a word.  Raises UnknownSpec where the format has none of it."""
    own = _own_storages(format)
    of_producer = [name.partition(".")[2] for name in _meanings(storage) if name.partition(".")[0] == format]
    if storage in own or storage in description_of(format).transient:          # a plan refuses transient ones, and says why
        return storage
    if len(of_producer) == 1:
        return of_producer[0]
    near = similar_names(storage, own)
    raise UnknownSpec(f"{format} has no storage {shown(storage)}" + (f"; did you mean {join_names(near, 'or')}?" if near else
                                                                      f": it has {join_names(own)}"))


def _own_storages(format: str) -> list[str]:
    return description_of(format).storages


def _meanings(word: str) -> list[str]:
    """'FORMAT.STORAGE' for all that a word may mean: a storage of this name, or what a producer of this name writes."""
    if word in (named := storages()):
        return [f"{format}.{word}" for format in named[word]]
    rules = [(format, rule) for producer in producers().every if name_key(producer.name) == word
             for format, of_format in producer.formats.items() for rule in of_format]
    default = [rule for rule in rules if any(_may_be_absent(value) for value in rule[1].values())]
    return list(dict.fromkeys(f"{format}.{rule.get('storage') or _own_storages(format)[0]}" for format, rule in default or rules))


def _may_be_absent(value: object) -> bool:
    """Whether a rule's value for a setting lets a config leave the setting out."""
    return value == NULL or (isinstance(value, list) and NULL in value)


def _did_you_mean(key: str, names: Sequence[str]) -> str:
    """`did you mean ...? ` with names that contain a word, and what it may mean, or else names that resemble it; '' for none."""
    firsts = {f"{name}.{_own_storages(name)[0]}": name for name in formats()}
    near = [name for name in similar_names(key, names) if key in name] + [firsts.get(name, name) for name in _meanings(key)]
    shown_as = {name: f"{of[0]}.{name}" for name, of in storages().items()}
    shown_as |= {name: name for producer in producers().every if len(_meanings(name := name_key(producer.name))) == 1}
    shown_as |= {name: name for name in names}
    near = near or [shown_as[name] for name in similar_names(key, shown_as)]
    return f"did you mean {join_names(list(dict.fromkeys(near)), 'or')}? " if near else ""
