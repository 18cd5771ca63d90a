"""Compresses a checkpoint: encodes units into pieces and assembles these to files.  Re-run the same call to resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry, shown
from qdsl.core.codecs import StreamError
from qdsl.host.files import identity
from qdsl.host.processes import affordable, needed, results
from qdsl.host.progress import CHECK, advance, step
from qdsl.jobs.compress import codecs, pieces, plan_compressed
from qdsl.jobs.compress.model import Model, Shapes, absolute_reference, decoded_models, plain_model
from qdsl.jobs.compress.pieces import Complete, Piece
from qdsl.jobs.compress.tensors import Reader, StoredTensor, stored_tensor
from qdsl.jobs.compress.units import FORMATS, THREAD_COUNTS, Compression, Unit, compression_units, uncompressed_notes
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.complete import complete
from qdsl.jobs.engine.intact import write_missing
from qdsl.jobs.engine.others import check_folder, refuse_adapter
from qdsl.jobs.engine.pieces import encode_missing, keep_intact, read_all
from qdsl.jobs.engine.shards import Copy, Shard, balanced_part
from qdsl.jobs.engine.work import ReportProgress, ShowProgress, no_progress


def compress(path: Path, aim: Compression, out: Path, *, like: str | Path | None = None, shapes: Shapes | None = None,
             jobs: int | None = 1, part: tuple[int, int] | None = None, check: bool = False, force: bool = False,
             tell: ShowProgress = no_progress) -> dict[str, Any]:
    """Write a checkpoint with its bfloat16 matrices compressed without loss, and everything else unchanged.

    path: a folder of one or more models, or a .safetensors file.  Compressed models are decoded first, unit by unit; the output
    is that of the plain model.  like, shapes: as of `decompress`, where files of compressed models do not state shapes.
    part: (i, n), from 1: encode only the i-th of n parts; a call without it, or `merge`, completes the checkpoint.
    check: decode the written tensors and compare them before they take their place.  force: replace a checkpoint in `out`.
    A repeated call resumes, if files and version are the same; the written bytes do not depend on jobs, parts or interruptions.
    Disk: until the checkpoint is complete, encoded tensors are stored twice.
    tell: progress in bytes, called for the encoding and again for the writing.
    Memory: per process at most 2.5 times the matrices that are encoded together.  jobs: processes, None for as many as
    processors and memory allow.
    Raises RewriteError, CheckpointError and OSError.
    """
    check_folder(out, path, like)
    with components.open_models(path) as folders:
        aim = replace(aim, only=components.selected_models(folders, aim.only))
        request = _as_from_json({"command": "compress", "work": f"a compression to {aim.format}", "from": str(path.resolve()),
                                 "like": absolute_reference(like), **asdict(aim)})
        if stage.remove_if_ended(out, request):
            return _report(out, aim, (), (), [])
        work = _work(path, folders, aim, out, like, shapes)
        stage.begin(out, request, force)
        jobs = jobs or _jobs(work)
        mine = work.pieces if part is None else balanced_part(work.pieces, *part)
        encode_missing(mine, pieces.read_contents, pieces.encode, jobs, tell)
        done = read_all(mine, pieces.read_contents)
        return _report(out, aim, done, (), work.left) if part else _finish(work, done, out, jobs, check, tell)


def merge(out: Path, *, shapes: Shapes | None = None, jobs: int | None = 1, tell: ShowProgress = no_progress) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all there.

    Raises RewriteError where some are missing, or are not of the input as it is now.
    """
    request = stage.read_request(out, {
        **stage.REQUESTS, "format": str, "threads": int, "patterns": ({"*": [str]}, None), "only": [str], "by_group": bool,
        "plain_config": bool, "like": (str, None)})
    if request["format"] not in FORMATS or request["threads"] not in THREAD_COUNTS:
        raise RewriteError(f"{out}: no compression to {shown(request['format'])} with {request['threads']} threads")
    aim = Compression(request["format"], request["threads"], request.get("patterns"), request["by_group"], tuple(request["only"]),
              request["plain_config"])
    path = Path(request["from"])
    with components.open_models(path) as folders:
        work = _work(path, folders, aim, out, request.get("like"), shapes)
        keep_intact(work.pieces, pieces.read_contents, jobs or _jobs(work))
        done = read_all(work.pieces, pieces.read_contents)
        return _finish(work, done, out, jobs or _jobs(work), False, tell)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of one call.  left: notes on uncompressed tensors; used: the patterns of DF11's groups by model; sources: the
    identities of files.
    """

    path: Path
    models: Mapping[str, Model]
    aim: Compression
    pieces: Sequence[Piece]
    left: Sequence[str]
    used: Mapping[str, dict[str, list[str]]]
    sources: Mapping[Path, list[Any]]


def _work(path: Path, folders: Mapping[str, Folder], aim: Compression, out: Path, like: str | Path | None, shapes: Shapes | None,
          ) -> _Work:
    for name, folder in folders.items():
        if aim.includes(name):
            refuse_adapter(folder)
    compressed = decoded_models({name: folder for name, folder in folders.items() if aim.includes(name)}, like, shapes)
    models = {name: compressed.get(name) or plain_model(folder) for name, folder in folders.items()}
    every, used = compression_units(models, aim)
    sources = {file: identity(file) for folder in folders.values() for file in folder.shards}
    return _Work(path, models, aim, pieces.pieces(every, aim, out / stage.STAGE, sources),
                 uncompressed_notes(models, aim, every), used, sources)


def _jobs(work: _Work) -> int:
    """The number of processes that memory and work allow."""
    sizes = [unit.nbytes_read for piece in work.pieces for unit in piece.units]
    return affordable(needed(max(sizes)), sum(sizes))


def _as_from_json(request: dict[str, Any]) -> dict[str, Any]:
    """A request as it comes back from JSON."""
    patterns = request.get("patterns")
    names = patterns and {key: list(parts) for key, parts in patterns.items()}
    return {**request, "only": list(request["only"]), "patterns": names}


def _finish(work: _Work, done: Complete, out: Path, jobs: int, check: bool, tell: ShowProgress) -> dict[str, Any]:
    """Write the files from complete pieces, check them if asked to, and complete the folder."""
    shards = plan_compressed.shards(work.models, work.aim, done, work.sources)
    write_missing(shards, out, jobs, tell)
    if check:
        checks = list(_checks(shards, done, out))
        with tell({CHECK: sum(one.piece.size for one in checks)}) as report:
            _check(checks, jobs, report)
    read = {file for model in work.models.values()
            for file in (*model.folder.shards, model.folder.root / model.folder.index_name)}
    texts = plan_compressed.texts(work.models, work.aim, done, work.used, shards)
    notes = complete(work.path, read, shards, texts, out, work.sources)
    return _report(out, work.aim, done, shards, [*work.left, *notes]) | {"checked": check}


@dataclass(frozen=True, slots=True)
class DecodeCheck:
    """A piece, and by encoded unit where its tensors were written."""

    piece: Piece
    tensors: Mapping[str, Mapping[str, StoredTensor]]


def _checks(shards: Sequence[Shard], done: Complete, out: Path) -> Iterator[DecodeCheck]:
    written = {(shard.name.rpartition("/")[0], step.name): (stage.shard_path(shard, out), step.to) for shard in shards
               for step in shard.steps if isinstance(step, Copy)}
    for piece, contents in done:
        units: dict[str, dict[str, StoredTensor]] = {}
        for unit in piece.units:
            for leaf in codecs.STREAM_NAMES[piece.aim.format] if unit.name not in contents.raw else ():
                entry = contents.header.tensors[unit.full(leaf)]
                path, start = written[unit.model, unit.full(leaf)]
                moved = Entry(entry.dtype, entry.shape, start, start + entry.nbytes)
                units.setdefault(unit.name, {})[leaf] = stored_tensor(path, moved)
        yield DecodeCheck(piece, units)


def _check(checks: Sequence[DecodeCheck], jobs: int, report: ReportProgress) -> None:
    """Check encoded units in parallel.  Raises RewriteError where one does not decode to its matrices."""
    count = 0
    with closing(results(why_different, checks, min(jobs, len(checks)))) as answers:
        for check, wrong in zip(checks, answers, strict=True):
            if wrong:
                raise RewriteError(wrong)
            count += check.piece.size
            report(count, check.piece.units[-1].label)


def why_different(check: DecodeCheck) -> str:
    """Why the tensors of a piece do not decode to its matrices; '' where all do."""
    reader = Reader()
    for unit in check.piece.units:
        with step(CHECK, unit.nbytes):
            if unit.name in check.tensors and (wrong := _difference(check, unit, reader)):
                return wrong
    return ""


def _difference(check: DecodeCheck, unit: Unit, reader: Reader) -> str:
    """Why the tensors of a unit do not decode to its matrices; '' where they do."""
    shapes = [part.shape for part in unit.parts.values()]
    try:
        tensors = {leaf: data.read() for leaf, data in check.tensors[unit.name].items()}
        matrices = codecs.decode(check.piece.aim.format, tensors, shapes, check.piece.aim.threads, every=True)
    except StreamError as error:
        return f"{unit.label}: {error}"
    advance(unit.nbytes / 2)                                     # about its share of the time
    for (name, part), matrix in zip(unit.parts.items(), matrices, strict=True):
        if not np.array_equal(reader.read(part).reshape(-1), matrix):
            return f"{unit.label}: {shown(name)} is another matrix when it is decoded"
    return ""


def _report(out: Path, aim: Compression, done: Complete, shards: Sequence[Shard], notes: Sequence[str]) -> dict[str, Any]:
    """The report of a call, for JSON."""
    encoded = [unit for unit, _, _ in pieces.encoded_units(done)]
    raw = [{"name": unit.label, "why": contents.raw[unit.name]} for piece, contents in done for unit in piece.units
           if unit.name in contents.raw]
    before = sum(unit.nbytes for unit in encoded)
    after = sum(contents.header.tensors[unit.full(leaf)].nbytes for unit, _, contents in pieces.encoded_units(done)
                for leaf in codecs.STREAM_NAMES[aim.format])
    return {"out": str(out), "format": aim.format, "units": len(encoded), "matrices": sum(len(unit.parts) for unit in encoded),
            "raw": raw, "nbytes_before": before, "nbytes_after": after,
            "bits_per_weight": 16 * after / before if before else None,
            "shards": [shard.name for shard in shards], "nbytes": sum(shard.size for shard in shards), "notes": list(notes)}
