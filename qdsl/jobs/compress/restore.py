"""Decompresses a checkpoint: the same tensors as before, and the same files where qdsl-original.json describes them.

Without that file, matrices go into the files of their streams.  Shapes of DF11's matrices come from another checkpoint with the
same tensors, or from the class of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.components import within
from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.folder import ORIGINAL, Folder
from qdsl.checkpoint.files.safetensors import Header
from qdsl.host.files import digest, identity
from qdsl.host.processes import affordable, needed
from qdsl.host.progress import advance
from qdsl.jobs.compress.model import Model, Shapes, absolute_reference, decoded_models
from qdsl.jobs.compress.tensors import EncodedMatrices, EncodedMatrix, Reader, StoredTensor, byte_view, checksum
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.complete import complete
from qdsl.jobs.engine.intact import missing_shards, write_missing
from qdsl.jobs.engine.others import check_folder
from qdsl.jobs.engine.shards import Copy, Shard, Step, balanced_part, by_offset
from qdsl.jobs.engine.work import ShowProgress, no_progress


@dataclass(frozen=True, slots=True)
class Decode:
    """A step that decodes matrices and writes those of one file.  to: the offset of each, None for one of another file."""

    coded: EncodedMatrices
    to: tuple[int | None, ...]

    @property
    def kind(self) -> str:
        return "decode"

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.extents)

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        return [(start, EncodedMatrix(self.coded, number).nbytes) for number, start in enumerate(self.to) if start is not None]

    @property
    def reads(self) -> Sequence[Range]:
        return [data.range for data in self.coded.tensors.values()]

    def write(self, out: BinaryIO) -> None:
        """Decode the matrices and write them.  Raises RewriteError for damaged tensors."""
        matrices = self.coded.decoded()
        advance(self.nbytes / 2)                                 # about its share of the time
        for start, matrix in zip(self.to, matrices, strict=True):
            if start is not None:
                out.seek(start)
                out.write(byte_view(matrix))
                advance(matrix.nbytes / 2)


def decompress(path: Path, out: Path, *, like: str | Path | None = None, shapes: Shapes | None = None, jobs: int | None = 1,
               part: tuple[int, int] | None = None, force: bool = False, tell: ShowProgress = no_progress) -> dict[str, Any]:
    """Write the plain checkpoint of a compressed one.

    like: a reference to a checkpoint with the same tensors, from whose headers shapes and files are taken where unknown.
    shapes: a function from a model's folder to the shapes of its parameters, called where neither states them.
    part, force, tell, jobs and memory: as of `compress`; a part is a share of the files.
    Raises RewriteError, CheckpointError and OSError.
    """
    check_folder(out, path, like)
    with components.open_models(path) as folders:
        plan = _plan(path, folders, like, shapes)
        request = {"command": "decompress", "work": "a decompression", "from": str(path.resolve()),
                   "like": absolute_reference(like)}
        if stage.remove_if_ended(out, request):
            return _report(out, plan, plan.shards, [])
        stage.begin(out, request, force)
        mine = plan.shards if part is None else balanced_part(plan.shards, *part)
        sizes = [step.coded.nbytes for shard in plan.shards for step in shard.steps if isinstance(step, Decode)]
        jobs = jobs or affordable(needed(max(sizes)), sum(sizes))
        write_missing(mine, out, jobs, tell)
        return _report(out, plan, mine, [] if part else _complete(path, plan, out))


def merge(out: Path, *, shapes: Shapes | None = None) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all there.  Raises RewriteError where they are not."""
    request = stage.read_request(out, {**stage.REQUESTS, "like": (str, None)})
    path = Path(request["from"])
    with components.open_models(path) as folders:
        plan = _plan(path, folders, request.get("like"), shapes)
        missing_shards(plan.shards, out, affordable(0))
        return _report(out, plan, plan.shards, _complete(path, plan, out))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The models, the shards to write, and the identities of the input files."""

    models: Mapping[str, Model]
    shards: Sequence[Shard]
    inputs: Mapping[Path, list[Any]]


def _plan(path: Path, folders: Mapping[str, Folder], like: str | Path | None, shapes: Shapes | None) -> _Plan:
    models = decoded_models(folders, like, shapes)
    if not any(isinstance(data, EncodedMatrix) for model in models.values() for data in model.data.values()):
        raise RewriteError(f"{path}: nothing here is compressed")
    inputs = {path: identity(path) for model in models.values() for path in model.folder.shards}
    return _Plan(models, [_shard(model, name, file, *content, [inputs[path] for path in model.folder.shards])
                          for name, model in models.items() for file, content in model.files.items()], inputs)


def _shard(model: Model, component: str, file: str, start: bytes, header: Header, inputs: list[Any]) -> Shard:
    steps: list[Step] = []
    together: dict[int, tuple[EncodedMatrices, dict[int, int]]] = {}
    for name, entry in header.tensors.items():
        data = model.data[name]
        if isinstance(data, StoredTensor):
            steps.append(Copy(name, data.path, data.start, data.nbytes, entry.start))
        else:
            together.setdefault(id(data.coded), (data.coded, {}))[1][data.number] = entry.start
    steps += [Decode(coded, tuple(map(starts.get, range(len(coded.names))))) for coded, starts in together.values()]
    return Shard(within(component, file), start, header.size, tuple(header.tensors), by_offset(steps),
                 digest(start.hex(), inputs))


def _complete(path: Path, plan: _Plan, out: Path) -> list[str]:
    """Complete the folder; returns notes on files that were not copied."""
    folders = [model.folder for model in plan.models.values()]
    read = {file for folder in folders for file in (*folder.shards, folder.root / folder.index_name)}
    texts = {within(name, file): text for name, model in plan.models.items() if model.path.is_dir()
             for file, text in {**model.plain_texts(), **_config(model)}.items()}
    return complete(path, read, plan.shards, texts, out, plan.inputs, is_restored=True)


def _config(model: Model) -> dict[str, str]:
    """config.json of a model that says that its head is not tied; {} if it is kept as it is, or as it was."""
    if model.is_exact or not model.config:
        return {}
    reader = Reader()
    config = model.tied(lambda name: checksum(reader.read(model.data[name])))
    return {"config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"} if config != model.config else {}


def _report(out: Path, plan: _Plan, shards: Sequence[Shard], notes: Sequence[str]) -> dict[str, Any]:
    exact = all(model.is_exact for model in plan.models.values())
    more = [] if exact else [f"no {ORIGINAL} says what the files were: their tensors are the same, the files may not be"]
    count = sum(isinstance(data, EncodedMatrix) for model in plan.models.values() for data in model.data.values())
    return {"out": str(out), "units": count, "shards": [shard.name for shard in shards], "exact": exact,
            "nbytes": sum(shard.size for shard in shards), "notes": [*more, *notes]}
