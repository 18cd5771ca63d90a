"""The shipped formats: the tensors of their storages, and all producers' rules for them, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import qdsl.generated
from qdsl.checkpoint.detect.producers import Producers, producers
from qdsl.core.producer import Producer, check_references
from qdsl.core.program import program_description, program_files, read_program
from qdsl.core.stored import Description, Stored

Variants = Mapping[tuple[int | str, ...], Mapping[str, Mapping[str, Stored]]]


def descriptions() -> tuple[Description, ...]:
    """All shipped formats by name, with the rules of all producers.

    Raises ProducerError if a producer in QDSL_PRODUCERS names unknown formats or tensors.
    """
    return _with_producers(producers())


def description_of(format: str) -> Description:
    return next(own for own in descriptions() if own.name == format)


def program_of(format: str) -> dict[str, Any]:
    """The whole program of a format, with storages that files do not have."""
    return read_program(program_files(qdsl.generated.__path__)[format])


@cache
def _shipped() -> tuple[Description, ...]:
    """The formats without producers' rules."""
    paths = program_files(qdsl.generated.__path__).values()
    return tuple(program_description(read_program(path, in_files=True), in_files=True) for path in paths)


@cache
def _with_producers(registry: Producers) -> tuple[Description, ...]:
    for producer in registry.every:
        check_references(producer, _shipped())
    return tuple(replace(format, detect={**registry.rules(format.name), **format.detect},
                         variants=_renamed(format, registry.every)) for format in _shipped())


def _renamed(format: Description, every: Sequence[Producer]) -> Variants:
    """The variants of a format with producers' tensor names as additional aliases, and with axes of shorter integers."""
    names = [producer.tensors[format.name] for producer in every if format.name in producer.tensors]
    shorter = [own.shorter.axes[format.name] for own in every if own.shorter is not None and format.name in own.shorter.axes]
    if not names and not shorter:
        return format.variants

    def aliases(storage: str, tensor: str) -> list[str]:
        return [own[storage][tensor] for own in names if tensor in own.get(storage, {})]

    def axis(storage: str, tensor: str) -> int | None:
        return next((own[storage][tensor] for own in shorter if tensor in own.get(storage, {})), None)

    return {key: {storage: {tensor: stored.with_aliases(aliases(storage, tensor), axis(storage, tensor))
                            for tensor, stored in layout.items()}
                  for storage, layout in storages.items()} for key, storages in format.variants.items()}
