"""Converts or quantizes the layers of a checkpoint folder, shard by shard.  Re-run to resume, on one machine or many.

Shards are written into the stage (qdsl/jobs/engine), and moved into the checkpoint when all are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.groups import refuse_groups
from qdsl.checkpoint.detect.ignored import unmatched
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.ledger import Finding, refuse_changes
from qdsl.checkpoint.detect.shaped import Shapes, shaped_layers
from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.components import within
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import shown
from qdsl.checkpoint.report import worker
from qdsl.host.processes import affordable, needed
from qdsl.jobs.convert import encoded
from qdsl.jobs.convert.change import LayerChange
from qdsl.jobs.convert.config import changed_configs, check_producer, readers, stale_notes
from qdsl.jobs.convert.encoded import Piece
from qdsl.jobs.convert.plain import plain_layers
from qdsl.jobs.convert.plan_conversion import Plan, plan
from qdsl.jobs.convert.report import relative_rms
from qdsl.jobs.convert.target import Conversion, layer_format, parse_conversion
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.complete import complete
from qdsl.jobs.engine.intact import missing_shards, write_missing
from qdsl.jobs.engine.others import refuse_adapter
from qdsl.jobs.engine.pieces import encode_missing, keep_intact, read_all
from qdsl.jobs.engine.shards import Shard, balanced_part, index
from qdsl.jobs.engine.work import ShowProgress, no_progress
from qdsl.jobs.gguf.quality import Sums

MOMENTS = "moments"                                             # of the stage


@dataclass(frozen=True, slots=True)
class _Model:
    """A folder that is rewritten: the checkpoint itself (''), or a model of a pipeline.  left: matrices that stay plain, and why.
    """

    name: str
    folder: Folder
    layers: Layers
    plan: Plan
    left: Mapping[str, str] = field(default_factory=dict)


def convert(folder: Folder, detected: Layers, aim: Conversion, out: Path, *, jobs: int | None = 1,
            part: tuple[int, int] | None = None, force: bool = False, tell: ShowProgress = no_progress) -> dict[str, Any]:
    """Write a checkpoint with its quantized layers converted to the target, and everything else unchanged.

    part: (i, n), from 1: write only the i-th of n parts of the shards; `merge` completes the checkpoint.
    force: replace a checkpoint in `out`.
    A repeated call resumes, if files and version are the same; the written bytes do not depend on jobs, parts or interruptions.
    jobs: processes; None: as many as processors and memory allow.
    tell: progress in bytes of tensors, by kind of work.
    Memory: per process twice the largest tensor, and torch; to requantize also some float32 copies of the largest weight.
    Raises RewriteError, CheckpointError and OSError.
    """
    stage.check_output(out, folder.path, force)
    refuse_changes(folder.path, detected.findings, aim.allow_unknown)
    return _rewrite(folder.path, [_Model("", folder, detected, plan(folder, detected, aim))], aim, out, jobs, part, force, tell)


def quantize(path: Path, aim: Conversion, out: Path, *, jobs: int | None = 1, part: tuple[int, int] | None = None,
             force: bool = False, tell: ShowProgress = no_progress,
             calibrate: Callable[[Path], None] | None = None, missing: Callable[[], Sequence[Finding]] = tuple) -> dict[str, Any]:
    """Write a checkpoint with its plain Linear layers quantized, and everything else unchanged.

    path: a folder of one or more models, or a .safetensors file.  aim: of `parse_conversion` with `ignore`.  part, force, tell,
    resuming: as of `convert`.  calibrate: writes the moments of inputs into a folder, before weights are quantized by them; it
    resumes, too.  missing: finds parameters that the models lack; it is called when headers of files tell of nothing wrong.
    Memory: per process the largest quantized tensor, torch, and some float32 weights.
    Raises RewriteError for folders that are quantized already or that have nothing to quantize, CheckpointError and OSError.
    """
    stage.check_output(out, path, force)
    with components.open_models(path) as models:
        moments = str((out / stage.STAGE / MOMENTS).absolute()) if calibrate else ""
        aim = replace(aim, only=components.selected_models(models, aim.only), moments=moments)
        detected = _detected(path, models, aim)
        notes = refuse_changes(path, missing(), aim.allow_unknown)
        report = _rewrite(path, _quantized(path, detected, aim), aim, out, jobs, part, force, tell, calibrate)
    return {**report, "notes": [*report["notes"], *notes]}


def _detected(path: Path, models: Mapping[str, Folder], aim: Conversion) -> dict[str, tuple[Folder, Layers]]:
    """The models of a pipeline, with their layers.  Raises RewriteError for what the headers of files tell."""
    if unknown := [name for name in aim.only if name not in models]:
        raise RewriteError(f"{path}: no model {shown(unknown[0])}: {_components(models)}")
    every = {name: (folder, layers(folder)) for name, folder in models.items()}
    for name, (folder, detected) in every.items():
        refuse_changes(folder.path, detected.findings, aim.allow_unknown)
        is_selected = name in aim.only or not aim.only
        if is_selected and detected.layers:
            raise RewriteError(f"{folder.path}: layer {shown(detected.layers[0].name)} is quantized already; `qdsl convert "
                               "--requantize` writes another format")
        if is_selected:
            refuse_adapter(folder)
            refuse_groups(folder, detected.groups)
    return every


def _components(models: Mapping[str, Folder]) -> str:
    names = [*filter(None, models)]
    return f"there are {', '.join(names)}" if names else "the folder is one model, and no pipeline of several"


def _quantized(path: Path, models: Mapping[str, tuple[Folder, Layers]], aim: Conversion) -> list[_Model]:
    """The models of a pipeline, with the plans of those that are quantized."""
    quantized = []
    for name, (folder, detected) in models.items():
        is_selected = name in aim.only or not aim.only
        chosen, left = plain_layers(folder, aim.ignore or ()) if is_selected else ([], {"": f"`--component {name}` quantizes it"})
        planned = plan(folder, replace(detected, layers=chosen), aim, name)
        used = {full for layer in planned.changed for full in layer.tensors.values()}
        detected = replace(detected, layers=[*planned.changed], plain=[full for full in folder.names() if full not in used])
        quantized.append(_Model(name, folder, detected, planned, {**left, **planned.left}))
    if not any(model.plan.changed for model in quantized):
        why = next(iter(dict.fromkeys(why for model in quantized for why in model.plan.left.values())), "no plain Linear layer")
        raise RewriteError(f"{path}: nothing to quantize: {why}")
    return quantized


def _rewrite(path: Path, models: Sequence[_Model], aim: Conversion, out: Path, jobs: int | None,
             part: tuple[int, int] | None, force: bool, tell: ShowProgress, calibrate: Callable[[Path], None] | None = None,
             ) -> dict[str, Any]:
    for model in models:
        check_producer(model.folder, model.plan)
    shards = [shard for model in models for shard in model.plan.shards]
    jobs = jobs or _default_jobs(shards)
    what = f"a quantization to {aim.label}" if aim.is_from_plain else f"a conversion to {aim.label}"
    request = {"command": "convert", "work": what, "from": str(path.resolve()), **aim.data()}
    if stage.remove_if_ended(out, request):
        shards = [replace(shard, size=(out / shard.name).stat().st_size) for shard in shards]     # entropy codes have theirs
        return _report(models, aim, out, shards, 0, [f"{out} was complete already; what it cost is not measured again"], {})
    place = stage.begin(out, request, force)
    if calibrate is not None:
        _calibrate(calibrate, Path(aim.moments), out)
    pieces = encoded.pieces(shards, place)
    if pieces:
        _encode(pieces if part is None else balanced_part(pieces, *part), jobs, models, tell)
        if part is not None:                                     # files are as long as the codes of all parts
            return _report(models, aim, out, [], 0, [], {})
        models = _with_actual_sizes(models, pieces)
        shards = [shard for model in models for shard in model.plan.shards]
    mine = shards if part is None else balanced_part(shards, *part)
    written = _write(mine, place, jobs, models, tell)
    costs = stage.step_reports(mine, out)
    return _report(models, aim, out, mine, written, [] if part else _complete(path, models, shards, out), costs)


def _calibrate(calibrate: Callable[[Path], None], moments: Path, out: Path) -> None:
    """Write the moments of inputs; where that fails before any are there, the output is as it was."""
    try:
        calibrate(moments)
    except Exception:
        if not any(moments.glob("*.safetensors")):
            stage.remove(out)
            with suppress(OSError):                              # it held other files before
                out.rmdir()
        raise


def _default_jobs(shards: Sequence[Shard]) -> int:
    """As many processes as there are processors, and memory for the largest layer in each; fewer for few weights.

    Schemes that search, which are those that take an importance, need minutes for few weights, too.
    """
    from qdsl.encode.calibrated.hessian import inverting  # imports torch

    steps = [step for shard in shards for step in shard.steps if isinstance(step, LayerChange)]
    weights = [math.prod(step.layer.shape) * (step.layer.experts or 1) for step in steps]
    searched = any(variant.importance for step in steps if not step.aim.is_exact(step.layer)
                   for variant in layer_format(step.layer, step.aim).variants.values())
    largest = max((2 * math.prod(step.layer.shape) + (inverting(step.layer.shape[1]) if step.aim.moments else 0)
                   for step in steps), default=0)
    return affordable(needed(largest), None if searched else sum(weights))


def _encode(pieces: Sequence[Piece], jobs: int, models: Sequence[_Model], tell: ShowProgress) -> None:
    """Encode the pieces that are missing or out of date."""
    try:
        encode_missing(pieces, encoded.contents, encoded.encode, jobs, tell, worker.start,
                       tuple(model.folder.path for model in models))
    finally:
        worker.finish()


def _with_actual_sizes(models: Sequence[_Model], pieces: Sequence[Piece]) -> list[_Model]:
    """The models with files of the actual sizes of entropy codes.  Raises RewriteError where pieces are missing."""
    every = {change.label: (piece.path, header) for piece, header in read_all(pieces, encoded.contents)
             for change in piece.changes}
    return [replace(model, plan=replace(model.plan, shards=tuple(
        encoded.with_stream_sizes(shard, every) for shard in model.plan.shards))) for model in models]


def _write(shards: Sequence[Shard], place: Path, jobs: int, models: Sequence[_Model], tell: ShowProgress) -> int:
    """Write the files that are missing or out of date; returns their number."""
    try:
        return write_missing(shards, place.parent, jobs, tell, worker.start, tuple(model.folder.path for model in models))
    finally:
        worker.finish()


def merge(out: Path, shapes: Shapes | None = None) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all written.  shapes: of layers whose tensors do not state them.

    Raises RewriteError where shards are missing, or are not of the input as it is now.
    """
    request = stage.read_request(out, {**stage.REQUESTS, "format": str, "storage": str, "requantize": bool,
                                       "params": {"*": (int, str, float, bool)}, "ignore": ([str], None), "only": ([str], None),
                                       "skip": ([str], None), "keep_misfits": (bool, None), "producer": (str, None),
                                       "allow_unknown": (bool, None), "transposed": ([str], None)})
    path = Path(request["from"])
    aim = Conversion(**{option.name: value for option in fields(Conversion) if (value := request.get(option.name)) is not None})
    if aim.requantize:                                           # what a request names may not be there
        parse_conversion(aim.label, True, aim.params, aim.ignore, aim.only)
    with ExitStack() as stack:
        if aim.is_from_plain:
            folders = stack.enter_context(components.open_models(path))
            models = _quantized(path, _detected(path, folders, aim), aim)
        else:
            folder = stack.enter_context(Folder(path))
            detected = shaped_layers(folder, shapes)
            models = [_Model("", folder, detected, plan(folder, detected, aim))]
        if pieces := encoded.pieces([shard for model in models for shard in model.plan.shards], out / stage.STAGE):
            keep_intact(pieces, encoded.contents, affordable(0))
            models = _with_actual_sizes(models, pieces)
            _write([shard for model in models for shard in model.plan.shards], out / stage.STAGE, 1, models, no_progress)
        shards = [shard for model in models for shard in model.plan.shards]
        missing_shards(shards, out, affordable(0))
        costs = stage.step_reports(shards, out)
        return _report(models, aim, out, shards, 0, _complete(path, models, shards, out), costs)


def _complete(path: Path, models: Sequence[_Model], shards: Sequence[Shard], out: Path) -> list[str]:
    notes: list[str] = []
    texts: dict[str, str | None] = {}
    for model in models:
        changed, more = changed_configs(model.folder, model.plan, model.layers)
        more += stale_notes(model.folder, model.plan)
        if model.folder.index or len(model.plan.shards) > 1:
            changed[model.folder.index_name] = index(model.plan.shards, model.folder.index)
        texts |= {within(model.name, name): text for name, text in changed.items()}
        notes += [f"{model.name}: {note}" if model.name else note for note in more]
    read = [file for model in models for file in model.folder.shards]
    inputs = {file: identities for model in models for file, identities in model.plan.inputs.items()}
    return [*notes, *complete(path, read, shards, texts, out, inputs)]


def _report(models: Sequence[_Model], aim: Conversion, out: Path, shards: Sequence[Shard], written: int, notes: Sequence[str],
            costs: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a call, for JSON.  written: how many of the shards were written now."""
    steps = {step.label: step for shard in shards for step in shard.steps if isinstance(step, LayerChange)}
    changed_layers = [step.layer for step in steps.values()]
    changed = Counter((layer.format, layer.storage) for layer in changed_layers)
    written_names = {name for shard in shards for name in shard.tensors}
    kept = sum(next(iter(layer.tensors.values())) in written_names for model in models for layer in model.plan.kept)
    sums = {name: Sums(*(cost.get(total.name, 0.0) for total in fields(Sums))) for name, cost in costs.items()}
    readable = [(model, readers(model.folder, model.plan, model.layers)) for model in models if model.plan.changed]
    named = {layer.name for model in models for layer in (*model.plan.changed, *model.plan.kept)}
    named |= {name for model in models for name in (*model.left, *model.plan.left)}
    allowed = [text for model in models for text in refuse_changes(model.folder.path, model.layers.findings, allow_unknown=True)]
    notes = [*(f"not computed: {text}" for text in allowed), *unmatched(aim.ignore or aim.skip, sorted(named)),
             *(note for model in models for note in model.layers.notes),
             *(f"layer {shown(layer.name)}: {problem}" for layer in changed_layers for problem in layer.problems), *notes]
    return {"out": str(out), "shards": [shard.name for shard in shards], "shards_written": written,
            "nbytes": sum(shard.size for shard in shards), "notes": notes, "layers_kept": kept,
            "layers": [{"from": f"{format}.{storage}", "to": f"{aim.format if aim.requantize else format}.{aim.storage}",
                        "count": count} for (format, storage), count in changed.items()],
            "requantized": {name: total.data() for name, total in sums.items()},
            "snr_db": sum(sums.values(), Sums()).data()["snr_db"],
            "readers": {model.name: read for model, (read, _) in readable}, "not_read_by": {
                model.name: others for model, (_, others) in readable},
            "left": {within(model.name, name): why for model in models for name, why in
                     (model.left if aim.is_from_plain else model.plan.left).items()},
            **(_quantized_report(steps, sums) if aim.is_from_plain else {})}


def _quantized_report(steps: Mapping[str, LayerChange], sums: Mapping[str, Sums]) -> dict[str, Any]:
    """The part of a report about quantized plain layers."""
    rows: list[dict[str, Any]] = []
    for name, step in ((name, step) for name, step in steps.items() if name in sums):
        decibels = sums[name].data()["snr_db"]
        experts = [] if step.layer.experts is None else [step.layer.experts]
        rows.append({"name": name, "from": step.layer.format, "shape": [*experts, *step.layer.shape], "nbytes": step.nbytes,
                     "snr_db": decibels, "relative_rms": relative_rms(decibels)})
    weights = sum(math.prod(row["shape"]) for row in rows)
    return {"quantized": rows, "bits_per_weight": 8 * sum(row["nbytes"] for row in rows) / weights if weights else None}
