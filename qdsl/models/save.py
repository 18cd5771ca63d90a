"""Saving a model with packed weights as a checkpoint: the names, storages and files that it was loaded from."""

from __future__ import annotations

import filecmp
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.descriptions import descriptions
from qdsl.checkpoint.detect import numbers, says_numbers
from qdsl.checkpoint.folder import INDEX
from qdsl.checkpoint.ggml_types import TORCH
from qdsl.checkpoint.gguf_write import NewTensor
from qdsl.checkpoint.gguf_write import write as write_gguf
from qdsl.checkpoint.guard import FIELD, guarded, is_guard, unguarded
from qdsl.checkpoint.layer_weights import module_of
from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.safetensors import Buffer, Header, bytes_of, copy_chunks, laid_out, shown, torch_dtypes
from qdsl.convert.config import own_settings
from qdsl.convert.plan import beside, full_name
from qdsl.files import flush_folder, replacing, write_text
from qdsl.models.experts import Experts
from qdsl.models.origin import Origin, origin_in
from qdsl.rewrite.complete import INDICES, WEIGHTS, regular_files
from qdsl.runtime.convert import default_tensors
from qdsl.runtime.layout import PLANAR
from qdsl.runtime.module import PackedModule
from qdsl.runtime.packed import FormatError, PackedWeight

CONFIG = "config.json"
QUANTIZATION = ("quantization_config", "compression_config", "dfloat11_config")     # what states it in a config, at its top
SHARD_BYTES = 5 << 30                                            # of a file, where no checkpoint says how tensors are divided
STAGE = ".qdsl-save.part"                                        # a folder's files until all are written


class SaveError(ValueError):
    """A model that cannot be saved, or a folder that it cannot be saved into; nothing has been written."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The files of a saved model.  exact: config and weights are byte for byte those of the checkpoint, which is still there.

    notes: what else to know.
    """

    folder: Path
    files: tuple[str, ...]
    nbytes: int
    exact: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be written.  read: gives its elements when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """The dtype as safetensors calls it, and the shape."""
        return next(name for name, dtype in torch_dtypes().items() if dtype == self.dtype), self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(model: nn.Module, folder: Path, config: Mapping[str, Any] | None = None) -> SaveReport:
    """Write a model's weights, its config and what lies next to them; `qdsl.save_model` explains the arguments."""
    origin = origin_in(model)
    _check_target(folder, origin)
    collected = _Collector(model, origin or Origin(Path()))
    collected.collect()
    if origin is not None and origin.gguf is not None and not collected.changed:
        return _save_gguf(folder, origin, collected.tensors)
    files, exact = _files(collected.tensors, origin, collected.changed)
    texts = _texts(model, origin, config, collected, files, exact)
    stage = folder / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        for name, (start, header) in files.items():
            _write(stage / name, start, header, collected.tensors)
        if origin is not None and origin.config is not None and origin.path.is_dir():
            _copy_others(origin.path, stage, texts)
        for name, text in texts.items():
            write_text(stage / name, text)
        _put_in_place(stage, folder, list(files))
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    nbytes = sum(header.size for _, header in files.values())
    gone = origin is not None and origin.config is not None and not origin.path.is_dir()
    notes = (f"{origin.path} is gone: its other files, such as a tokenizer, were not copied",) if origin and gone else ()
    exact = exact and texts.get(CONFIG) == (origin.config if origin else None)
    exact = exact and all(_is_same(folder, origin, name) for name in files)
    return SaveReport(folder, tuple(files), nbytes, exact, notes)


def _is_same(folder: Path, origin: Origin | None, name: str) -> bool:
    """Whether a file that was written has the bytes of the checkpoint's; False where that is gone."""
    if origin is None:
        return False
    old = (origin.path if origin.path.is_dir() else origin.path.parent) / name
    return old.is_file() and filecmp.cmp(old, folder / name, shallow=False)


def _check_target(folder: Path, origin: Origin | None) -> None:
    """Raises SaveError for a folder that holds weights, those that the model is mapped from among them."""
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder}: is a file; give a folder")
    if origin is not None and folder.exists() and origin.path.exists() and folder.samefile(
            origin.path if origin.path.is_dir() else origin.path.parent):
        raise SaveError(f"{folder}: the model's weights are mapped from this folder; save into another one")
    if folder.is_dir() and (old := sorted(path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS))):
        raise SaveError(f"{folder}: holds weights already ({old[0]}); save into another folder")


# -- what a model holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """A module's weight, or rows [start, stop) of it."""

    module: PackedModule
    start: int = 0
    stop: int | None = None

    def weight(self) -> PackedWeight:
        """These rows as a packed weight, in the storage that the module runs."""
        whole = self.module.checkpoint_weight()
        return whole.shard("N", self.start, whole.shape[0] if self.stop is None else self.stop)


class _Collector:
    """The tensors of a model under the names of its checkpoint.

    settings: format, storage and parameters of each packed layer, by its name in the checkpoint.  dense: modules that are not
    packed.  changed: some layer is not what the checkpoint has there.
    """

    def __init__(self, model: nn.Module, origin: Origin) -> None:
        self.model, self.origin = model, origin
        self.tensors: dict[str, Stored] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.dense: list[str] = []
        self.changed = False
        self._written: set[int] = set()                          # parameters and buffers
        self._converted: tuple[_Rows, PackedWeight] | None = None
        self._recorded: set[str] = set()                         # layers that are what the checkpoint has
        self._kinds = origin.kinds()

    def collect(self) -> None:
        experts = {name: module for name, module in self.model.named_modules() if isinstance(module, Experts)}
        for name, stack in experts.items():
            self._add_experts(name, stack)
        for name, module in self.model.named_modules():
            if isinstance(module, PackedModule):
                self._add_packed(name, module)
        for name, group in self.origin.groups.items():
            block = self.model.get_submodule(name)
            for full in group.tensors.values():
                self._add_plain(full, full, block.get_parameter(full.rpartition(".")[2]))
        transient = {f"{name}.{own}".lstrip(".") for name, module in self.model.named_modules()
                     for own in module._non_persistent_buffers_set}
        plain: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        plain |= dict(self.model.named_buffers(remove_duplicate=False))
        others: dict[str, Tensor] = {}                           # those for which the checkpoint has no name
        for name, tensor in plain.items():
            full, is_shared = self.origin.plain.get(name, name), id(tensor) in self._written and name not in self.origin.plain
            if name in transient or full in self.tensors or is_shared or self._add_encoded(name, tensor):
                continue
            if name in self.origin.biases:
                self._add_biases(name, tensor)
            elif name in self.origin.plain or self.origin.revert is None:
                self._add_plain(name, full, tensor)
            else:
                others[name] = tensor
        for full, tensor in (self.origin.revert(self.model, others) if self.origin.revert and others else {}).items():
            self._add_plain(full, full, tensor)
        for full, tensor in self.origin.unused.items():
            self._add(full, tensor.dtype, tuple(tensor.shape), tensor.detach)
        every = self.origin.layers.keys() | self.origin.stacks.keys() | self.origin.decoded.keys()
        self.changed |= self.origin.changed or bool(every - self._recorded)

    def _add_packed(self, name: str, module: PackedModule) -> None:
        parameters = {id(parameter) for parameter in module._held().values()}
        if parameters <= self._written and name not in self.origin.layers:
            return                                               # it shares the tensors of another layer
        self._written |= parameters
        self._add_layer(name, _Rows(module), self.origin.layers.get(name))

    def _add_layer(self, name: str, rows: _Rows, record: Layer | None) -> None:
        """A layer by itself.  record: what the checkpoint has, None for a layer that it has not."""
        layer, storage = self._record(name, rows.weight(), record)
        weight = self._as_stored(name, rows, storage, record)
        for tensor, value in weight.tensors.items():
            if tensor not in numbers(_description(weight)):
                self._add(self._full_name(layer, weight, tensor), value.dtype, tuple(value.shape),
                          partial(self._tensor, name, rows, storage, record, tensor))
        self._add_settings(layer, weight)

    def _add_experts(self, name: str, stack: Experts) -> None:
        record, layers = self.origin.layers.get(name), self.origin.stacks.get(name, ())
        if record is not None and record.experts is None:
            self._add_packed(name, stack.parts[0])               # type: ignore[arg-type]  # a matrix of E * N rows there, too
            return
        self._written |= {id(parameter) for part in stack.parts for parameter in part._parameters.values()}
        if layers and len(stack.parts) in (1, len(layers)):
            self._add_pieces(name, stack, layers)
            return
        try:
            first = stack.weight(0)
        except FormatError as error:
            raise SaveError(f"experts {shown(name)} have several weights each, which no file of stacks has: {error}") from None
        layer, storage = self._record(name, first, record)
        weight = self._convert(name, first, storage, record)
        for tensor, value in weight.tensors.items():
            full = self._full_name(layer, weight, tensor)
            own = (stack.experts, *(value.t().shape if layer.turned else value.shape))
            shape = self._kinds[full][1] if full in self._kinds else own
            self._add(full, value.dtype, shape, partial(self._stacked, name, stack, tensor, layer.turned, storage, shape))
        self._add_settings(layer, weight)

    def _stacked(self, name: str, stack: Experts, tensor: str, turned: bool, storage: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of all experts in the shape that files have; of one number for all, that."""
        record = self.origin.layers.get(name)
        parts = [self._convert(name, stack.weight(expert), storage, record).tensors[tensor] for expert in range(stack.experts)]
        if math.prod(shape) == parts[0].numel() != stack.experts * parts[0].numel():
            return parts[0]
        return torch.stack([part.t() if turned and part.dim() == 2 else part for part in parts])

    def _add_pieces(self, name: str, stack: Experts, layers: Sequence[Layer]) -> None:
        """The layers of experts that the checkpoint has one by one: weights that stayed apart, or rows of the joined one."""
        modules = list(stack.parts) if len(stack.parts) == len(layers) else [stack.parts[0]] * len(layers)
        start = 0
        for layer, module in zip(layers, modules, strict=True):
            start, stop = (start, start + layer.shape[0]) if len(stack.parts) == 1 else (0, layer.shape[0])
            self._add_layer(name, _Rows(module, start, stop), layer)  # type: ignore[arg-type]  # parts are packed modules
            start = stop

    def _add_biases(self, name: str, bias: Tensor) -> None:
        """The biases of experts that the checkpoint has one by one."""
        rows = self.origin.biases[name]
        for full, part in zip(rows, torch.split(bias.flatten(), list(rows.values())), strict=True):
            self._add_plain(name, full, part)
        self._written.add(id(bias))

    def _record(self, name: str, weight: PackedWeight, record: Layer | None) -> tuple[Layer, str]:
        """What the checkpoint calls a layer, and the storage that it has there.  record: the checkpoint's layer, if any."""
        known = record
        if record is not None and (record.format, dict(record.params)) == (weight.format.name, weight.params):
            self._recorded.add(name)
            storage = record.storage
        else:
            self.changed = True
            storage = weight.storage if weight.storage != PLANAR else next(iter(weight.variant.storages))
            own = self.origin.plain.get(f"{name}.weight".lstrip("."), name).removesuffix(".weight")
            record = Layer(record.name if record else own, weight.format.name, storage, weight.params, weight.shape)
        if record is not known and "parts" in _description(weight).detect:
            raise SaveError(f"layer {shown(name)}: files hold {weight.format.name} in groups of weights, and this is a layer by "
                            f"itself; `qdsl compress --format {weight.format.name}` writes them")
        self.settings[record.name] = {"format": weight.format.name, "storage": storage, **weight.params}
        return record, storage

    def _as_stored(self, name: str, rows: _Rows, storage: str, record: Layer | None) -> PackedWeight:
        """A weight in the storage that files have; the last one that was converted is kept."""
        if self._converted is None or self._converted[0] != rows:
            self._converted = None
            self._converted = rows, self._convert(name, rows.weight(), storage, record)
        return self._converted[1]

    def _tensor(self, name: str, rows: _Rows, storage: str, record: Layer | None, tensor: str) -> Tensor:
        return self._as_stored(name, rows, storage, record).tensors[tensor]

    def _convert(self, name: str, weight: PackedWeight, storage: str, record: Layer | None) -> PackedWeight:
        """A weight in the storage of files, with tensors of defaults, such as columns in order, where the files had them."""
        try:
            stored = weight.format.convert(weight, storage)
        except FormatError as error:
            raise SaveError(f"layer {shown(name)}: {weight.format.name}.{weight.storage} cannot be written as {storage}: {error}"
                            ) from None
        lost = [] if record is None else [key for key in record.tensors if key not in stored.tensors]
        return stored.derive({**stored.tensors, **default_tensors(stored, lost)}) if lost else stored

    def _full_name(self, layer: Layer, weight: PackedWeight, name: str) -> str:
        if name in layer.tensors:
            return layer.tensors[name]
        aliases = weight.layout.tensors[name].aliases
        if layer.experts is None:
            return full_name(layer, name, aliases)
        stacked = Layer(layer.name, tensors={"": "."})           # a weight with a name of its own
        return full_name(stacked, name, aliases)

    def _add_settings(self, layer: Layer, weight: PackedWeight) -> None:
        """The small tensors that belong to a layer's files."""
        kept = {full: self.origin.settings[full] for full in layer.settings if full in self.origin.settings}
        if not kept and not (layer.experts is not None and says_numbers(_description(weight))):
            known = numbers(_description(weight))
            values = {name: float(weight.tensors[name]) for name in known if name in weight.tensors}
            small = beside(layer, weight.format, weight.params, {}, values)
            kept = {full_name(layer, name): torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
                    for name, (dtype, shape, data) in small.items()}
        for full, tensor in kept.items():
            self._add(full, tensor.dtype, tuple(tensor.shape), tensor.detach)

    def _add_encoded(self, name: str, tensor: Tensor) -> bool:
        """Encode a layer again that the checkpoint holds without loss and the model in plain numbers; False where it did not."""
        layer = self.origin.decoded.get(name)
        format = module_of(layer).FORMAT if layer is not None and layer.experts is None else None
        if layer is None or format is None or not format.variant(layer.params).copies or tensor.numel() != math.prod(layer.shape):
            return False
        try:
            weight = format.quantize(tensor.detach().reshape(layer.shape), layer.storage, **layer.params)
        except FormatError:                                      # numbers that were trained since
            return False
        same = torch.equal(format.dequantize(weight, torch.float32), tensor.detach().reshape(layer.shape).float())
        if not same or weight.tensors.keys() != layer.tensors.keys():
            return False
        self._written.add(id(tensor))
        self._recorded.add(name)
        for key, value in weight.tensors.items():
            self._add(layer.tensors[key], value.dtype, tuple(value.shape), value.detach)
        self._add_settings(layer, weight)
        self.settings[layer.name] = {"format": layer.format, "storage": layer.storage, **layer.params}
        return True

    def _add_plain(self, name: str, full: str, tensor: Tensor) -> None:
        """A plain tensor, in the dtype that the checkpoint has where that holds its numbers."""
        if tensor.is_meta:
            raise SaveError(f"{shown(name)} is on meta: fill the model before it is saved")
        self._written.add(id(tensor))
        dtype, _ = self._kinds.get(full, (tensor.dtype, ()))
        if dtype != tensor.dtype and not _is_exact(tensor.detach(), dtype):
            dtype = tensor.dtype
        self._add(full, dtype, tuple(tensor.shape), lambda: tensor.detach().to(dtype))
        if name.endswith(".weight") and tensor.dim() == 2:
            self.dense.append(full.removesuffix(".weight"))

    def _add(self, full: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        if full in self.tensors:
            raise SaveError(f"two tensors of the model are called {shown(full)}")
        _, known = self._kinds.get(full, (dtype, shape))
        self.tensors[full] = Stored(dtype, known if math.prod(known) == math.prod(shape) else shape, read)


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds the numbers of a tensor."""
    if not dtype.is_floating_point or not tensor.is_floating_point():
        return False
    same = tensor.to(dtype).to(tensor.dtype)
    return bool(((same == tensor) | (same.isnan() & tensor.isnan())).all())


def _description(weight: PackedWeight) -> Any:
    return next(each for each in descriptions() if each.name == weight.format.name)


# -- files -------------------------------------------------------------------------------------------------------------


def _files(tensors: Mapping[str, Stored], origin: Origin | None, changed: bool) -> tuple[dict[str, tuple[bytes, Header]], bool]:
    """The bytes before the tensors of each file, and whether all files are those of the checkpoint."""
    kinds = {name: tensor.kind for name, tensor in tensors.items()}
    if origin is None or not origin.files:
        return _new_files(tensors), False
    files: dict[str, tuple[bytes, Header]] = {}
    placed = {name: file for file, (_, header) in origin.files.items() for name in header.tensors}
    last = next(reversed(origin.files))
    exact = True
    for file, (start, header) in origin.files.items():
        own = {name: kinds[name] for name in header.tensors if name in kinds}
        own |= {name: kind for name, kind in kinds.items() if name not in placed and _home(name, placed, last) == file}
        if own == {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}:
            files[file] = start, header
            continue
        exact = False
        metadata = {key: text for key, text in header.metadata.items() if key == "format"} if changed else header.metadata
        if own:
            files[file] = laid_out(file, own, metadata or None)
    return files, exact


def _home(name: str, placed: Mapping[str, str], last: str) -> str:
    """The file for a new tensor: that of another tensor of its module, else the last."""
    module = name.rpartition(".")[0]
    return next((file for other, file in placed.items() if other.rpartition(".")[0] == module), last)


def _new_files(tensors: Mapping[str, Stored]) -> dict[str, tuple[bytes, Header]]:
    """Files of at most SHARD_BYTES each, in the order of the model."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.kind
        size += tensor.nbytes
    names = ["model.safetensors"] if len(shards) == 1 else [f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                                                            for number in range(1, len(shards) + 1)]
    return {name: laid_out(name, own, {"format": "pt"}) for name, own in zip(names, shards, strict=True)}


def _write(path: Path, start: bytes, header: Header, tensors: Mapping[str, Stored]) -> None:
    with replacing(path) as file:
        file.write(start)
        for name, entry in header.tensors.items():
            copy_chunks(file, _bytes(tensors[name]), entry.nbytes, f"{path}: tensor {shown(name)}")


def _bytes(tensor: Stored) -> Iterator[Buffer]:
    yield bytes_of(tensor.read().reshape(tensor.shape))


def _texts(model: nn.Module, origin: Origin | None, config: Mapping[str, Any] | None, collected: _Collector,
           files: Mapping[str, tuple[bytes, Header]], exact: bool) -> dict[str, str]:
    """config.json and the index."""
    texts: dict[str, str] = {}
    if origin is not None and not collected.changed and config is None:
        texts |= {} if origin.config is None else {CONFIG: origin.config}
    else:
        base = dict(config) if config is not None else _config_of(model, origin)
        stored = {} if origin is None or origin.config is None or collected.changed else json.loads(origin.config)
        has_own = bool(collected.settings) or (origin is not None and bool(origin.groups))
        if stored:                                               # another config for the weights of the checkpoint
            base = {**{key: stored[key] for key in QUANTIZATION if key in stored}, **base}
            has_own = is_guard(stored.get(FIELD))
        elif collected.settings:
            base["quantization_config"] = own_settings(collected.settings, collected.dense)
        elif not has_own:
            base.pop("quantization_config", None)
        base = guarded(base) if has_own else unguarded(base)
        texts[CONFIG] = json.dumps(base, indent=2, ensure_ascii=False) + "\n"
    if exact and origin is not None:
        return texts | ({} if origin.index is None else dict([origin.index]))
    if len(files) > 1:
        name = origin.index[0] if origin is not None and origin.index is not None else INDEX
        placed = {tensor: file for file, (_, header) in files.items() for tensor in header.tensors}
        size = sum(entry.nbytes for _, header in files.values() for entry in header.tensors.values())
        texts[name] = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}, indent=2) + "\n"
    return texts


def _config_of(model: nn.Module, origin: Origin | None) -> dict[str, Any]:
    """The config of the checkpoint, else that which the model has, as those of transformers and diffusers do."""
    if origin is not None and origin.config is not None:
        config: dict[str, Any] = json.loads(origin.config)
        return config
    own: Any = getattr(model, "config", None)
    settings = own.to_dict() if hasattr(own, "to_dict") else own
    return dict(settings) if isinstance(settings, Mapping) else {}


def _copy_others(source: Path, stage: Path, texts: Mapping[str, str]) -> None:
    """Copy the tokenizer and whatever else of the checkpoint holds no weights."""
    for path in regular_files(source):
        name = path.relative_to(source)
        if not path.name.endswith((*WEIGHTS, *INDICES)) and str(name) not in texts:
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, stage / name)


def _put_in_place(stage: Path, folder: Path, weights: Sequence[str]) -> None:
    """Move files into a folder, those of weights last: a folder without them is no checkpoint."""
    others = [path.relative_to(stage) for path in regular_files(stage)]
    for name in [*(name for name in others if str(name) not in weights), *map(Path, weights)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, folder / name)
    flush_folder(folder)


def _save_gguf(folder: Path, origin: Origin, tensors: Mapping[str, Stored]) -> SaveReport:
    """The tensors of a GGUF file, in its order and types, as one file."""
    assert origin.gguf is not None
    path = folder / origin.path.name
    new = []
    for name, (kind, shape) in origin.gguf.tensors.items():
        if name not in tensors:
            raise SaveError(f"the model holds no {shown(name)} of {origin.path}")
        if tensors[name].dtype != getattr(torch, TORCH.get(kind.name, "uint8")):
            raise SaveError(f"{shown(name)} has become {str(tensors[name].dtype)[6:]}, and {kind.name} cannot hold its numbers")
        new.append(NewTensor(name, kind, shape, _bytes(tensors[name])))
    folder.mkdir(parents=True, exist_ok=True)
    size = write_gguf(path, origin.gguf.metadata, new)
    return SaveReport(folder, (path.name,), size, _is_same(folder, origin, path.name))
