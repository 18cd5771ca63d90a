"""Plans a converted checkpoint: for every tensor its file, its place in it, and the source of its bytes.

Files are those of the input.  A layer's tensors go into the file of its largest current tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qdsl.checkpoint.detect.descriptions import description_of, program_of
from qdsl.checkpoint.detect.groups import refuse_groups
from qdsl.checkpoint.detect.header_claims import HeaderClaims
from qdsl.checkpoint.detect.ignored import is_skipped
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.layer_weights import module_of, unread
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.rules import choices, numbers, says_extents, says_numbers
from qdsl.checkpoint.detect.tensor_names import WEIGHT
from qdsl.checkpoint.detect.transforms import why_not_contained
from qdsl.checkpoint.files.components import within
from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import TensorFile, plan_header, shown, torch_dtypes
from qdsl.core.options import FormatError, storage_name
from qdsl.core.program import program_description
from qdsl.core.shapes import shared_blocks, slicing_step
from qdsl.core.stored import OF_QUANTIZED_X, Description
from qdsl.core.text import join_names
from qdsl.host.files import digest, identity
from qdsl.jobs.convert import encoded, header
from qdsl.jobs.convert.change import LayerChange, small_tensors
from qdsl.jobs.convert.fused import fused_layers
from qdsl.jobs.convert.target import (
    Conversion,
    becomes_transposed,
    converted_weight,
    is_plain_target,
    layer_format,
    layer_params,
    shares_scale,
)
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.engine.shards import Copy, Shard, Step, by_offset, copy

if TYPE_CHECKING:
    import torch

    from qdsl.runtime.format import Format
    from qdsl.runtime.weight.packed import PackedWeight


_Named = list[tuple[str, str, tuple[str, tuple[int, ...]]]]       # new tensors: names in storage and files, dtype and shape
MOST_PROBLEMS = 8                                                         # problems to list in a message
OTHER_WAYS = ("--requantize FORMAT writes other numbers, and says how far they are from these; `qdsl dequantize` writes plain "
              "floats, of which `qdsl quantize --type` makes GGUF files")


@dataclass(frozen=True, slots=True)
class ConvertStep(LayerChange):
    """A step that converts a layer and writes it."""

    def write(self, out: BinaryIO) -> tuple[str, dict[str, Any]] | None:
        """Write the converted layer; returns the error of requantizing, None if exact.  Raises RewriteError."""
        from qdsl.jobs.convert.steps import write_change

        if self.encoded is not None:
            return encoded.copy(self, self.encoded, out)
        cost = write_change(self, out)
        return None if cost is None else (self.label, asdict(cost))


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned files of a folder, the layers that change, in their old form, and those that stay.

    left: layers that stay unchanged, and why.  inputs: the identities of the folder's files.
    """

    aim: Conversion
    shards: tuple[Shard, ...]
    changed: tuple[Layer, ...]
    kept: tuple[Layer, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[Path, list[Any]] = field(default_factory=dict)

    @property
    def format(self) -> str:
        return self.aim.format if self.aim.requantize else self.changed[0].format

    @property
    def storages(self) -> list[tuple[str, str]]:
        """The format and storage of all layers after the conversion."""
        changed = [(self.aim.format if self.aim.requantize else layer.format, self.aim.storage) for layer in self.changed]
        return [*changed, *((layer.format, layer.storage) for layer in self.kept)]

    @property
    def params(self) -> list[Mapping[str, int | str]]:
        """The parameters of all layers after the conversion."""
        params_by_format: dict[str, Mapping[str, int | str]] = {}    # thousands of layers share parameters
        for layer in self.changed:
            if not self.aim.is_exact(layer) and self.aim.format not in params_by_format:
                params_by_format[self.aim.format] = layer_params(layer, self.aim)
        changed = [layer.params if self.aim.is_exact(layer) else params_by_format[self.aim.format] for layer in self.changed]
        return [*changed, *(layer.params for layer in self.kept)]

    @property
    def tensors(self) -> list[Collection[str]]:
        """The names of the tensors of all layers in their storage, after the conversion."""
        changed_tensors = [step.to for shard in self.shards for step in shard.steps if isinstance(step, LayerChange)]
        return [*changed_tensors, *(layer.tensors for layer in self.kept)]


@dataclass(slots=True)
class _File:
    """A planned file: the names, dtypes and shapes of its tensors, and their sources."""

    old: TensorFile
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    layers: list[tuple[Layer, dict[str, str]]] = field(default_factory=list)


def plan(folder: Folder, layers: Layers, aim: Conversion, model: str = "") -> Plan:
    """Plans the conversion of all selected layers; everything else stays unchanged.  model: of a pipeline, or ''.

    Reads only headers, indices of columns, and some rows of each quantized layer, to check that it can be converted.  Raises
    RewriteError with every quantized layer that cannot; plain ones are skipped.
    """
    every_layer = layers.layers
    changed = changed_layers(folder, layers, aim)
    named: dict[str, _Named] = {}
    problems: list[tuple[Layer, str]] = []
    for layer in changed:
        try:
            named[layer.name] = _new_tensors(folder, layer, aim, layers.quantizations[0].method if layers.quantizations else "")
        except RewriteError as error:
            problems.append((layer, str(error)))
    if not aim.is_from_plain and not (aim.keep_misfits and named):
        _refuse_storage(folder, aim, problems, *(["--keep-misfits leaves them as they are"] if named else []))
    changed = [layer for layer in changed if layer.name in named]
    files = _files(folder, [(layer, named[layer.name]) for layer in changed], _folded_tensors(layers, changed, aim))
    kept = tuple(layer for layer in every_layer if not aim.includes(layer) or aim.is_reached(layer) or
                 (layer.name not in named and not aim.is_from_plain))
    metadata = _headers_metadata(folder, files.values(), kept, aim)
    sources = {path: identity(path) for path in folder.shards}
    sharing = fused_layers(layer for layer in changed if shares_scale(layer, aim))
    shards = tuple(_shard(folder, file, metadata[path], aim, sources, model, sharing)
                   for path, file in files.items() if file.tensors)
    left = {layer.name: "a pattern names it" for layer in every_layer
            if not aim.is_from_plain and is_skipped(layer.name, aim.skip)}
    return Plan(aim, shards, tuple(changed), kept, left | {layer.name: why for layer, why in problems}, sources)


def changed_layers(folder: Folder, layers: Layers, aim: Conversion) -> list[Layer]:
    """The layers that a conversion changes.

    Raises RewriteError for what the headers of files tell: unrecognised layers, none to convert, a storage of another format.
    """
    wanted = [layer for layer in layers.layers if aim.includes(layer)]
    _refuse(folder, [(layer, layer.why) for layer in layers.layers if not layer.format])
    if not wanted and not aim.is_from_plain:
        refuse_groups(folder, layers.groups)
        raise RewriteError(f"{folder.path}: no layer of format {aim.format}" if layers.layers else
                           f"{folder.path}: no quantized layer; `qdsl quantize FOLDER --format FORMAT` quantizes plain ones")
    changed = [layer for layer in wanted if not aim.is_reached(layer)]
    if not aim.requantize:
        formats = {name: program_description(program_of(name)) for name in {layer.format for layer in changed}}
        problems = [(layer, _why_no_storage(formats[layer.format], aim.storage, layer.params)) for layer in changed]
        if all(why for _, why in problems):                      # of some, all reasons are listed when their tensors were read
            _refuse_storage(folder, aim, problems)
    return changed


def _why_no_storage(format: Description, storage: str, params: Mapping[str, int | str]) -> str:
    try:
        storage_name(format, storage, params)
    except FormatError as error:
        return str(error)
    return ""


def _refuse_storage(folder: Folder, aim: Conversion, problems: Sequence[tuple[Layer, str]], *advice: str) -> None:
    """Raises RewriteError for layers that a storage cannot hold, and why."""
    _refuse(folder, [(layer, f"{layer.format}.{layer.storage} cannot be {aim.storage}: {why}") for layer, why in problems],
            *([] if aim.requantize else [OTHER_WAYS]), *advice)


def _folded_tensors(layers: Layers, changed: Sequence[Layer], aim: Conversion) -> set[str]:
    """Tensors that go with layers that become plain: transforms that their weights contain, and scales of inputs."""
    names = {layer.name for layer in changed if is_plain_target(layer, aim)}
    others = [layer.transform_tensors for layer in layers.layers if layer.name not in names]
    others += [frozenset(own.tensors) for every in layers.transforms.values() for own in every]
    repeats = {full for layer in changed if layer.name in names for own in layer.transforms for full in own.repeats}
    inputs = {full for layer in changed if layer.name in names for leaf, full in layer.others.items() if leaf in OF_QUANTIZED_X}
    folded = {full for layer in changed if layer.name in names for full in layer.transform_tensors}
    return repeats | inputs | folded.difference(*others)


def _files(folder: Folder, layers: Sequence[tuple[Layer, _Named]], folded_tensors: set[str]) -> dict[Path, _File]:
    """The files with the new tensors of layers and all other tensors.  Raises RewriteError if two have one name.

    folded_tensors: those of transforms that new weights contain.
    """
    files = {file.path: _File(file) for file in folder.files()}
    gone = {full for layer, _ in layers for full in (*layer.tensors.values(), *layer.settings)}
    gone |= folded_tensors
    for name in folder.names():
        if name not in gone:
            file = files[folder.file(name).path]
            file.copied.append(name)
            file.tensors[name] = (folder.entry(name).dtype, folder.entry(name).shape)
    for layer, named in layers:
        largest = max(layer.tensors.values(), key=lambda name: folder.entry(name).nbytes)
        file = files[folder.file(largest).path]
        for _, full, kind in named:
            if full in file.tensors:
                raise RewriteError(f"{folder.path}: layer {shown(layer.name)}: there is a tensor {shown(full)} already")
            file.tensors[full] = kind
        file.layers.append((layer, {name: full for name, full, _ in named}))
    names = [name for file in files.values() for name in file.tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RewriteError(f"{folder.path}: two tensors would be called {shown(twice)}")
    return files


def _headers_metadata(folder: Folder, files: Collection[_File], kept: Sequence[Layer],
                      aim: Conversion) -> dict[Path, dict[str, str]]:
    """The metadata of the files, which describe all weights if producers need that."""
    changed = {header.weight(layer): header.weight_json(layer, layer_format(layer, aim).name, aim.storage,
                                                        layer_params(layer, aim), list(names))
               for file in files for layer, names in file.layers}
    ours = {full for layer in kept for full in layer.tensors.values()}
    ours |= {full for file in files for _, names in file.layers for full in names.values()}
    plain = [name for file in files for name in file.tensors if name not in ours]
    new = header.texts(HeaderClaims(folder), changed, kept, plain)
    gone = [*changed, *(layer.name for file in files for layer, _ in file.layers)]
    return {file.old.path: header.renew_metadata(file.old.header.metadata, new, gone, plain) for file in files}


def _refuse(folder: Folder, problems: Sequence[tuple[Layer, str]], *advice: str) -> None:
    """Raises RewriteError if there are problems; equal problems are listed once, because thousands of layers may be alike."""
    if not problems:
        return
    alike: dict[str, list[str]] = {}
    for layer, problem in problems:
        alike.setdefault(problem, []).append(shown(layer.name))
    lines = [f"{folder.path}: layer {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {problem}"
             for problem, names in alike.items()]
    more = [f"... and {sum(map(len, list(alike.values())[MOST_PROBLEMS:]))} layers more"] if len(alike) > MOST_PROBLEMS else []
    raise RewriteError("\n".join([*lines[:MOST_PROBLEMS], *more, *advice]))


def _new_tensors(folder: Folder, layer: Layer, aim: Conversion, method: str) -> _Named:
    """A layer's new tensors: their names in the storage and in files, dtypes and shapes.

    method: the quant_method of the folder's settings.  Raises RewriteError where the storage cannot hold the layer.
    """
    dtypes = {str(dtype)[6:]: name for name, dtype in torch_dtypes().items()}
    storages = [item for variant in description_of(layer_format(layer, aim).name).variants.values() for item in variant.items()]
    layouts = [layout for _, layout in sorted(storages, key=lambda item: item[0] == aim.storage)]   # its own names come last
    aliases = {name: stored.aliases for layout in layouts for name, stored in layout.items()}
    format, params = layer_format(layer, aim).name, layer_params(layer, aim)
    is_in_header = header.rule(format, aim.storage, params) is not None
    writer = producers().of(producer(format, aim.storage, "" if aim.requantize else method))
    usual = producers().of(producer(format, aim.storage))
    if aim.is_from_plain and layer.experts is not None and usual.experts == "none":
        raise RewriteError(f"{usual.name} has no names for experts in one tensor")
    if is_plain_target(layer, aim) and (why := why_not_contained(layer)):
        raise RewriteError(why)
    tensors = tensors_in(folder, layer, aim)
    if wrong := header.why_unwritable(layer, format, aim.storage, params, list(tensors)):
        raise RewriteError(wrong)
    named, foreign = [], producers().tensor_names(format)
    base = layer if layer.stacked else replace(layer, tensors={name: full for name, full in layer.tensors.items()
                                                               if full.rpartition(".")[2] not in foreign})
    for name, (dtype, shape) in tensors.items():
        own = producers().tensor_name(writer.name, format, aim.storage, name)
        shape = header.file_shape(format, aim.storage, name, layer.shape, params, shape) or shape
        full = header.tensor_name(layer, format, aim.storage, name) if is_in_header else \
            full_name(base, own or name, () if own else aliases.get(name, ()), usual.experts == "full")
        stored = header.stored_tensor(format, aim.storage, name)
        shape = shape[::-1] if becomes_transposed(layer, aim) else shape
        kind, shape = (str(dtype)[6:], shape) if stored is None else stored.of_file(str(dtype)[6:], shape)
        named.append((name, full, (dtypes[kind], shape)))
    return named


def tensors_in(folder: Folder, layer: Layer, aim: Conversion) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a layer will have, with dtypes and shapes: those of the storage, and small ones that its producer adds.

    Converts some rows, or all if omitted fields may differ between rows.  Raises RewriteError if the storage cannot hold the
    layer, CheckpointError if its tensors do not fit together.
    """
    from qdsl.runtime.weight.packed import FormatError

    format, params = layer_format(layer, aim), layer_params(layer, aim)
    spec = description_of(format.name)
    if aim.storage not in spec.storages:
        raise RewriteError("it is made when a checkpoint is loaded" if aim.storage in format.storages else
                           f"{format.name} has no storage {shown(aim.storage)}; it has {join_names(spec.storages)}")
    try:
        if layer.experts is not None and has_streams(layer, aim):
            raise RewriteError("an entropy code holds one matrix, and these are experts in one tensor")
        other = format.empty(layer.shape, aim.storage, "meta", (), **params)
        stored = [_quantized(format, aim.storage, layer.shape, tuple(aim.options.items()))] if aim.is_from_plain else \
            [_whole_tensors(weight, _convert_first_rows(weight, other, layer, aim), aim.is_exact(layer))
             for weight in unread(folder, layer)]
    except FormatError as error:
        raise RewriteError(str(error)) from None
    if any(kinds != stored[0] for kinds in stored):
        raise RewriteError("some of its experts need other tensors there")
    if layer.transposed:
        _check_transposed(stored[0], spec, header.rule(format.name, aim.storage, params) is not None)
    if layer.experts is not None and says_numbers(spec):
        raise RewriteError("its tensors of numbers next to a weight have no form for experts in one tensor")
    if layer.experts is not None and not says_extents(spec):
        return {name: (dtype, (layer.experts, *(shape[::-1] if layer.transposed else shape)))
                for name, (dtype, shape) in stored[0].items()}
    if layer.experts is not None:
        _check_flat(layer, other, numbers(spec))
    flat = {name: (dtype, shape if layer.experts is None else (layer.experts * shape[0], *shape[1:]))
            for name, (dtype, shape) in stored[0].items() if name not in numbers(spec)}
    return flat | {name: (dtype, small) for name, (dtype, small, _)
                   in small_tensors(layer, format, params, _settings(folder, format)).items()}


def _check_transposed(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], spec: Description, is_in_header: bool) -> None:
    """Raises RewriteError if experts' weights cannot be [E, K, N], as the model has them."""
    if is_in_header or says_extents(spec) or any(len(shape) > 2 for _, shape in tensors.values()):
        raise RewriteError("its experts are [E, K, N], and there they are [E, N, K]")


def _check_flat(layer: Layer, other: PackedWeight, numbers: Sequence[str]) -> None:
    """Raises RewriteError if tensors cannot concatenate all experts."""
    if numbers:
        raise RewriteError(f"'{numbers[0]}' is one number for all experts there")
    axes = [axis for tensor in other.layout.tensors.values() for axis in tensor.axes]
    axes += [axis for kind in other.variant.fields.values() for axis in kind.axes]
    step = slicing_step(axes, "N", other.sizes, layer.shape[1])  # for all experts; other.step is for one
    if layer.shape[0] % step:
        raise RewriteError(f"experts of {layer.shape[0]} rows would {shared_blocks(step)}")


def producer(format: str, storage: str, method: str = "") -> str:
    """The producer whose settings are written for a storage: `method` if it describes the storage, '' if no producer does."""
    names = [rule["quant_method"] for rule in description_of(format).detect.get("config", [])
             if rule.get("storage", storage) == storage]
    return method if method in names else next(iter(names), "")


def _settings(folder: Folder, format: Format) -> dict[str, Any]:
    """The config's settings that small tensors next to a weight also have."""
    return {name: folder.config[name] for name in choices(description_of(format.name)) if name in folder.config}


def _convert_first_rows(weight: PackedWeight, other: PackedWeight, layer: Layer, aim: Conversion) -> PackedWeight:
    """A weight's first rows after the conversion.  Raises FormatError if some rows cannot be converted."""
    import torch

    least = math.lcm(weight.step("N"), other.step("N"))
    fields = weight.variant.fields
    every = aim.is_exact(layer) and any(fields[name].type != "index" for name in other.layout.where)
    if weight.layout.streams and not every:                      # cannot be sliced, but some rows can be decoded
        rows = weight.decode_rows(torch.arange(min(weight.shape[0], other.step("N")), device="cpu"))
        if rows is not None:
            return converted_weight(rows, layer, aim)
    samples = []
    for start in range(0, weight.shape[0] if every else 1, least):
        part = weight.format.checked(weight.cut("N", start, min(start + least, weight.shape[0])))
        samples.append(converted_weight(part, layer, aim))
    return samples[0]


def _whole_tensors(weight: PackedWeight, sample: PackedWeight, exact: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a whole weight from those of some rows; all rows decide on tensors that are omitted by value."""
    from qdsl.runtime.weight.convert import omitted_tensors

    names, layout = set(sample.tensors), sample.layout
    if exact and layout.omits:
        open_ = {name for name, stored in layout.tensors.items() if stored.optional in layout.omits}
        names = names - open_ | open_ - omitted_tensors(weight.format.checked(weight), layout)
    own = {name: weight.tensors[name] for name in sample.branch_names}       # their sizes depend on the numbers
    every = sample.format.stored(sample.derive(own, weight.shape))
    return {name: every[name] for name in every if name in names}


@cache
def _quantized(format: Format, storage: str, shape: tuple[int, int], options: tuple[tuple[str, Any], ...],
               ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a quantized weight, which do not depend on its numbers.  Raises FormatError for a wrong shape."""
    import torch

    from qdsl.runtime.weight.convert import with_scales

    params = {name: value for name, value in options if name in format.params}
    whole = format.empty(shape, storage, "meta", (), **params)
    rows = min(shape[0], whole.step("N"))
    ones = torch.ones(rows, shape[1], dtype=torch.float32, device="cpu")
    return _whole_tensors(whole, with_scales(format.quantize(ones, storage, **dict(options))), False)


def full_name(layer: Layer, name: str, aliases: Sequence[str] = (), whole: bool = False) -> str:
    """The name of a storage's tensor in a checkpoint, derived from the layer's current names or from the layer.

    An alias with a dot that the name cannot contain is the name in files.  A weight with its own name is a prefix of other
    tensors' names: 'weight_scale' becomes 'down_proj_scale', or, `whole`, 'down_proj_weight_scale'.  Raises RewriteError if no
    name is known.
    """
    if not layer.stacked:
        if name in layer.tensors:
            return layer.tensors[name]
        name = next((alias for alias in aliases if alias.replace(".", "_") == name), name)
        return f"{layer.name}.{name}" if layer.name else name
    for leaf in (*(alias for alias in aliases if alias.replace(".", "_") == name), name):
        if leaf.startswith(WEIGHT):
            return f"{layer.name}_{leaf}" if whole and leaf != WEIGHT else layer.name + leaf.removeprefix(WEIGHT)
    if f"_{name}" in aliases:
        return f"{layer.name}_{name}"
    raise RewriteError(f"no rule gives the name of '{name}' next to experts in one tensor")


def has_streams(layer: Layer, aim: Conversion) -> bool:
    """Whether a layer will have entropy-coded tensors."""
    return bool(layer_format(layer, aim).storage(aim.storage, layer_params(layer, aim))[1].streams)


def _shard(folder: Folder, file: _File, metadata: Mapping[str, str], aim: Conversion, identities: Mapping[Path, list[Any]],
           model: str, sharing: Mapping[str, tuple[Layer, ...]]) -> Shard:
    path = file.old.path
    start, head = plan_header(path, file.tensors, metadata)
    places = head.tensors
    steps: list[Step] = [copy(folder, name, places[name]) for name in file.copied]
    steps += [ConvertStep(layer, aim, {name: places[full] for name, full in names.items()}, names,
                     _settings(folder, layer_format(layer, aim)), folder.path, model, sharing.get(layer.name, ()),
                     has_streams(layer, aim), reads=_reads(folder, (layer, *sharing.get(layer.name, ()))))
              for layer, names in file.layers]
    ordered = by_offset(steps)
    return Shard(within(model, path.name), start, head.size, tuple(places), ordered,
                 _key(folder, file, start, ordered, identities))


def _reads(folder: Folder, layers: Iterable[Layer]) -> tuple[Range, ...]:
    """The ranges of files that hold layers."""
    names = dict.fromkeys(full for layer in layers for full in (*layer.tensors.values(), *layer.settings))
    return tuple(map(folder.range, names))


def _key(folder: Folder, file: _File, start: bytes, steps: Sequence[Step], identities: Mapping[Path, list[Any]]) -> str:
    """A digest of everything that a file's bytes depend on: formats, layers, and input files."""
    sources = {folder.file(name).path for name in file.copied}
    layers = {part.name: part for step in steps if isinstance(step, LayerChange) for part in (step.layer, *step.sharing)}
    sources |= {folder.file(full).path for layer in layers.values() for full in layer.tensors.values()}
    return digest(start.hex(), [identities[path] for path in sorted(sources)], list(map(_step_parts, steps)))


def _step_parts(step: Step) -> list[Any]:
    if isinstance(step, Copy):
        return [step.path.name, step.start, step.nbytes]
    assert isinstance(step, LayerChange)
    layer = step.layer
    aim = replace(step.aim, ignore=None).data()
    return [module_of(layer).FORMAT.key, layer_format(layer, step.aim).key, aim, layer.storage, dict(layer.params),
            layer.shape, layer.experts, layer.transposed, dict(layer.tensors),
            {name: entry.start for name, entry in step.to.items()}, dict(step.settings),
            *([[shared.format, shared.storage, dict(shared.tensors)] for shared in step.sharing])]
