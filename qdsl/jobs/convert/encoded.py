"""Encodes layers with entropy codes, whose sizes are unknown before, into files of the stage.

Afterwards the layout of the checkpoint's files is computed, and tensors are copied from there.  After an interruption, complete
files are not encoded again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from qdsl.checkpoint.files.crc import Range, ranges_checksum
from qdsl.checkpoint.files.safetensors import Chunks, Header, parse_header, plan_header, read_header
from qdsl.host import progress
from qdsl.host.files import digest, read_chunks
from qdsl.jobs.convert.change import LayerChange
from qdsl.jobs.engine.pieces import read_piece, write_piece
from qdsl.jobs.engine.shards import Copy, Shard, Step, by_offset
from qdsl.jobs.engine.work import batches

FOLDER = "encoded"                                               # of the stage
COSTS = {"*": {"*": (int, float)}}


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers of one new file, and the file of the stage that they are encoded into.  key: a digest of what it depends on."""

    path: Path
    changes: tuple[LayerChange, ...]
    key: str

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(math.prod(change.layer.shape) for change in self.changes)

    @property
    def label(self) -> str:
        return self.changes[-1].label

    @property
    def reads(self) -> list[Range]:
        """The ranges of input files that hold its layers."""
        return list(dict.fromkeys(part for change in self.changes for part in change.reads))


def pieces(shards: Iterable[Shard], place: Path) -> list[Piece]:
    """Divides the entropy-coded layers of files into pieces by size.  place: the stage."""
    all_pieces: list[Piece] = []
    for shard in shards:
        for some in batches(stream_changes(shard.steps)):
            path = place / FOLDER / f"{len(all_pieces):06}.safetensors"
            all_pieces.append(Piece(path, some, digest(shard.key, [change.label for change in some])))
    return all_pieces


def stream_changes(steps: Sequence[Step]) -> list[LayerChange]:
    """The changes that write entropy codes."""
    return [step for step in steps if isinstance(step, LayerChange) and step.has_streams]


def contents(piece: Piece) -> Header | None:
    """The header of a piece that is complete and whose inputs are unchanged; else None."""
    stored = read_piece(piece, costs=COSTS)
    wanted = {full for change in piece.changes for full in change.names.values()}
    return stored[0] if stored is not None and stored[0].tensors.keys() == wanted else None


def encode(piece: Piece) -> int:
    """Write a piece; returns the number of weights.  Raises RewriteError where a storage cannot represent one."""
    from qdsl.jobs.convert.steps import converted_tensors

    tensors: dict[str, Chunks] = {}
    costs: dict[str, Any] = {}
    reads = ranges_checksum(piece.reads)
    for change in piece.changes:
        with progress.step(progress.ENCODE, math.prod(change.layer.shape)):
            parts, cost = converted_tensors(change)
        tensors |= {change.names[name]: part for name, part in parts.items()}
        costs |= {} if cost is None else {change.label: asdict(cost)}
    write_piece(piece, tensors, reads, costs=costs)
    return piece.size


def with_stream_sizes(shard: Shard, headers: Mapping[str, tuple[Path, Header]]) -> Shard:
    """A shard with its entropy codes in their actual sizes.  headers: pieces and their headers by layer label."""
    changes = stream_changes(shard.steps)
    if not changes:
        return shard
    old = parse_header(shard.start[8:], Path(shard.name))
    tensors = {name: (entry.dtype, entry.shape) for name, entry in old.tensors.items()}
    for change in changes:
        own = headers[change.label][1].tensors
        tensors |= {full: (own[full].dtype, own[full].shape) for full in change.names.values()}
    start, head = plan_header(shard.name, tensors, old.metadata or None)
    steps = [_moved(step, head, headers) for step in shard.steps]
    return Shard(shard.name, start, head.size, tuple(head.tensors), by_offset(steps), digest(shard.key, start.hex()))


def _moved(step: Step, head: Header, headers: Mapping[str, tuple[Path, Header]]) -> Step:
    if isinstance(step, Copy):
        return replace(step, to=head.tensors[step.name].start)
    assert isinstance(step, LayerChange)
    return replace(step, to={name: head.tensors[full] for name, full in step.names.items()},
                   encoded=headers[step.label][0] if step.has_streams else None)


def copy(change: LayerChange, path: Path, out: BinaryIO) -> tuple[str, dict[str, Any]] | None:
    """Copy a layer's tensors from a piece to the new file; returns its cost, as `write` of a LayerChange does."""
    header = read_header(path)
    for name, entry in change.to.items():
        out.seek(entry.start)
        out.writelines(read_chunks(path, header.tensors[change.names[name]].start, entry.nbytes))
    cost = json.loads(header.metadata["costs"]).get(change.label)
    return None if cost is None else (change.label, cost)
