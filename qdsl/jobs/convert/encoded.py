"""Layers that become entropy codes, whose lengths are known only when they are encoded: first into files of the stage.

The files of the checkpoint are then laid out anew and copy from there, so that what was encoded is not encoded again after an
interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qdsl.checkpoint.files.safetensors import CheckpointError, Chunks, Header, laid_out, parse_header, read_header, write_chunks
from qdsl.host.files import digest, read_chunks
from qdsl.jobs.engine import stage
from qdsl.jobs.engine.shards import Copy, Shard, Step, in_order
from qdsl.jobs.engine.work import batches

if TYPE_CHECKING:
    from qdsl.jobs.convert.plan import Change

FOLDER = "encoded"                                               # of the stage
COSTS = {"*": {"*": (int, float)}}


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers of one new file, and the file that they are encoded into.  key: what it depends on."""

    path: Path
    changes: tuple[Change, ...]
    key: str

    @property
    def size(self) -> int:
        """How many weights it has."""
        return sum(math.prod(change.layer.shape) for change in self.changes)


def pieces(shards: Iterable[Shard], place: Path) -> list[Piece]:
    """The layers of files that become entropy codes, cut by their sizes.  place: the stage."""
    found: list[Piece] = []
    for shard in shards:
        for some in batches(coded(shard.steps)):
            path = place / FOLDER / f"{len(found):06}.safetensors"
            found.append(Piece(path, some, digest(shard.key, [change.label for change in some])))
    return found


def coded(steps: Sequence[Step]) -> list[Change]:
    """Those that write entropy codes."""
    from qdsl.jobs.convert.plan import Change

    return [step for step in steps if isinstance(step, Change) and step.has_streams]


def contents(piece: Piece) -> Header | None:
    """The header of a piece that is complete and made of what it would be made of now; None for all others."""
    try:
        header = read_header(piece.path)
        costs = json.loads(header.metadata.get("costs", ""))
    except (FileNotFoundError, CheckpointError, ValueError):
        return None
    wanted = {full for change in piece.changes for full in change.names.values()}
    is_ours = header.metadata.get("key") == piece.key and header.tensors.keys() == wanted and stage.fits(costs, COSTS)
    return header if is_ours else None


def encode(piece: Piece) -> int:
    """Write a piece; returns how many weights it has.  Raises RewriteError where a storage cannot hold one after all."""
    from qdsl.jobs.convert.steps import tensors_of

    tensors: dict[str, Chunks] = {}
    costs: dict[str, Any] = {}
    for change in piece.changes:
        parts, cost = tensors_of(change)
        tensors |= {change.names[name]: part for name, part in parts.items()}
        costs |= {} if cost is None else {change.label: asdict(cost)}
    write_chunks(piece.path, tensors, {"key": piece.key, "costs": json.dumps(costs)})
    return piece.size


def resized(shard: Shard, headers: Mapping[str, tuple[Path, Header]]) -> Shard:
    """A file with its entropy codes as long as they are.  headers: the pieces that have them, by the labels of layers."""
    changes = coded(shard.steps)
    if not changes:
        return shard
    old = parse_header(shard.start[8:], Path(shard.name))
    tensors = {name: (entry.dtype, entry.shape) for name, entry in old.tensors.items()}
    for change in changes:
        own = headers[change.label][1].tensors
        tensors |= {full: (own[full].dtype, own[full].shape) for full in change.names.values()}
    start, head = laid_out(shard.name, tensors, old.metadata or None)
    steps = [_moved(step, head, headers) for step in shard.steps]
    return Shard(shard.name, start, head.size, tuple(head.tensors), in_order(steps), digest(shard.key, start.hex()))


def _moved(step: Step, head: Header, headers: Mapping[str, tuple[Path, Header]]) -> Step:
    from qdsl.jobs.convert.plan import Change

    if isinstance(step, Copy):
        return replace(step, to=head.tensors[step.name].start)
    assert isinstance(step, Change)
    return replace(step, to={name: head.tensors[full] for name, full in step.names.items()},
                   encoded=headers[step.label][0] if step.has_streams else None)


def copy(change: Change, path: Path, out: BinaryIO) -> tuple[str, dict[str, Any]] | None:
    """Put a layer's tensors in their places; returns what it cost, as `write` of a Change does."""
    header = read_header(path)
    for name, entry in change.to.items():
        out.seek(entry.start)
        out.writelines(read_chunks(path, header.tensors[change.names[name]].start, entry.nbytes))
    cost = json.loads(header.metadata["costs"]).get(change.label)
    return None if cost is None else (change.label, cost)
