"""qdsl: one YAML file describes a quantized weight format; the compiler writes its reference, kernels and linear."""

from __future__ import annotations

from types import ModuleType

TYPE_CHECKING = False                                            # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    import torch
    from torch import nn

    from qdsl.checkpoint.checkpoint import Checkpoint
    from qdsl.encode.calibrated.hessian import Hessian
    from qdsl.models.load_report import LoadReport
    from qdsl.models.save import SaveReport
    from qdsl.runtime.torch.model import Report, Skip
    from qdsl.runtime.weight.packed import PackedWeight

__version__ = "0.1.0"
# Public names that lie in other modules; `GGML_TYPES` are the types of GGUF tensors by name.
_LAZY = {"Checkpoint": "checkpoint.checkpoint.Checkpoint", "CheckpointError": "checkpoint.files.safetensors.CheckpointError",
         "Experts": "models.experts.Experts", "FormatError": "runtime.weight.errors.FormatError",
         "GGML_TYPES": "checkpoint.files.ggml_types.BY_NAME", "GgufFile": "checkpoint.files.gguf.GgufFile",
         "GgufTensor": "checkpoint.files.gguf_write.NewTensor", "GgufValue": "checkpoint.files.gguf_metadata.Value",
         "PackedWeight": "runtime.weight.packed.PackedWeight", "SpecError": "compiler.spec.source.SpecError",
         "write_gguf": "checkpoint.files.gguf_write.write"}
__all__ = ["GGML_TYPES", "Checkpoint", "CheckpointError", "Experts", "FormatError", "GgufFile", "GgufTensor", "GgufValue",
           "PackedWeight", "SpecError", "calibrate", "compile_products", "fuse_", "generated", "ignore_packed_", "load",
           "load_weights_", "match_dense_", "open", "open_headers", "packed_parameters", "planar_", "quantize_", "save_model",
           "tune", "write_gguf"]
_SKIPS = ("ignore", "exclude", "filter", "filter_fn", "modules_to_not_convert")   # what other packages call `skip`


def load(spec: Path | str) -> ModuleType:
    """The generated module of a format: the name of one that ships, such as "q4_0", or a spec file.

    A name gives `qdsl.generated.NAME`.  A file is built into a cache folder and imported; the same spec gives the same module
    object, that of `qdsl.generated` for the spec of a format that ships.  What was pickled of it opens in a process that has
    loaded the spec.  Raises qdsl.compiler.spec.source.SpecError with everything that is wrong, qdsl.core.places.UnknownSpec, or
    OSError.
    """
    from importlib import import_module
    from pathlib import Path

    from qdsl.checkpoint.detect.targets import spec_of
    from qdsl.core.places import shipped, user_specs

    path = spec_of(str(spec))
    if path.resolve() in [own.resolve() for own in user_specs()] or (path in shipped() and not Path(spec).is_file()):
        return import_module(f"qdsl.generated.{path.stem}")
    from qdsl.compiler.load import load as load_spec

    return load_spec(path)


def quantize_(model: nn.Module, format: ModuleType | Path | str, skip: Skip = None,
              hessians: Mapping[str, Hessian] | None = None, **options: Any) -> Report:
    """Replace the nn.Linear layers of a model by layers of a format, in place, one at a time.

    format: a generated module, or what `load` takes.  skip: layers to leave: patterns of their names or of parts of them, such as
    "lm_head", or a function of a layer and its name; none without it.  hessians: what `calibrate` returned, by which the codes
    of layers are chosen.  options: those of the format's `quantize`.  Returns what was replaced, and what was left and why.
    Raises FormatError for options that the format does not have, before anything changes.
    """
    from functools import partial

    from qdsl.encode.calibrated.solve import quantize
    from qdsl.runtime.torch.model import check_model, quantize_model
    from qdsl.runtime.weight.packed import FormatError

    check_model(model)
    if other := next(filter(options.__contains__, _SKIPS), None):
        raise FormatError(f"quantize_ has no option '{other}': skip=... names the layers that are left")
    module, options = _module(format, options)
    calibrated = {name: partial(quantize, module.FORMAT, hessian=hessian) for name, hessian in (hessians or {}).items()}
    return quantize_model(model, module.FORMAT, skip, calibrated, **options)


def calibrate(model: nn.Module, data: Sequence[torch.Tensor], format: ModuleType | Path | str | None = None,
              **options: Any) -> dict[str, Hessian]:
    """The second moments of the inputs of a language model's linear layers, by name, for `quantize_(hessians=...)`.

    data: tokens int64 [1, length], all of one length; 128 samples of 2048 are usual.  format, options: what the model will be
    quantized to: each block then gets the outputs of the quantized block before it, as it will when the model runs.  The model is
    as before when this returns.  Memory: the activations of all samples, and a float32 matrix [K, K] for each input.  Raises
    qdsl.models.plan.LoadError for a model that is not a list of blocks.
    """
    from qdsl.models.calibrate import calibrate as run
    from qdsl.runtime.torch.model import check_model

    check_model(model)
    if format is None:
        return run(model, data)
    module, options = _module(format, options)
    return run(model, data, lambda name: (module.FORMAT, options))


def _module(format: ModuleType | Path | str, options: Mapping[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a format, and options with the storage that a word such as "gptq" means if they name none."""
    from pathlib import Path

    from qdsl.checkpoint.detect.targets import with_storage

    if isinstance(format, str) and not Path(format).is_file():
        format, options = with_storage(format, options)
    return format if isinstance(format, ModuleType) else load(format), dict(options)


def planar_(model: nn.Module, skip: Skip = None, larger: bool = False) -> Report:
    """Store the weights of a model's qdsl layers as GPU kernels read them fastest, in place, one at a time; exact and reversible.

    skip: layers to leave, as `quantize_` takes them.  larger: also weights that take more memory so, by more than 4 %, or 12 %
    for codes of fewer than 4 bits.  Returns what was stored anew, and what was left and why.
    """
    from qdsl.runtime.torch.model import planar_model

    return planar_model(model, skip, larger)


def fuse_(model: nn.Module, skip: Skip = None) -> Report:
    """Store int4 weights of a model's qdsl layers for torch's own int4 operations, in place, one at a time; exact and reversible.

    Layers on a CPU run `torch.ops.aten._weight_int4pack_mm_for_cpu`, layers on an XPU
    `torch.ops.aten._weight_int4pack_mm_with_scales_and_zeros`.  Fill the model first, move it to its device, then call this.
    On a CPU torch's operation is fast in bfloat16 alone; layers called with other dtypes run as before.
    `save_model` writes fused layers as the checkpoint has them.  skip: layers to leave, as `quantize_` takes
    them.  Returns which layers were fused, and why others were left: a number would change, torch has no such operation for
    their device, or the operation does not take their rows or groups.
    """
    from qdsl.models.fused import fuse_model

    return fuse_model(model, skip)


def match_dense_(model: nn.Module, on: bool = True) -> None:
    """Have a model's qdsl layers compute the same bits as the dequantized model, in place; on=False ends that.

    A layer then decodes its whole weight to x's dtype at every product, and torch multiplies: slow, and only to compare.
    """
    from qdsl.runtime.torch.model import match_dense

    match_dense(model, on)


def tune(packed: PackedWeight, rows: Iterable[int] = (1, 8, 16), dtype: torch.dtype | None = None) -> dict[str, dict[str, Any]]:
    """Time the ways to multiply by a weight on its GPU for these numbers of rows of x, and keep the fastest for each number.

    A number stands for those down to half of it, 8 for 2 to 8.  dtype: of x, torch.float16 by default.  Returns kind,
    configuration and milliseconds, as the cache folder keeps them.  Raises MissingTriton where Triton is not installed, and
    FormatError for a weight that is on no GPU.
    """
    from qdsl.runtime.gpu.tune import tune as tune_weight

    return tune_weight(packed, rows) if dtype is None else tune_weight(packed, rows, dtype)


def compile_products(on: bool = True) -> None:
    """Compile products on a CPU, of small weights too, or none; until this is called, QDSL_CPU_COMPILE decides."""
    from qdsl.runtime.cpu.linear import compile_products as compile_on_cpu

    compile_on_cpu(on)


def packed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stored tensors of a model's qdsl layers, by their names in the model; a tied one under every name."""
    from qdsl.runtime.torch.distributed import packed_parameters as find_packed

    return find_packed(model)


def ignore_packed_(model: nn.Module) -> set[nn.Parameter]:
    """Have DDP leave a model's packed tensors alone, and return them, as `fully_shard(ignored_params=...)` takes them.

    Call it before the model is wrapped.  Every rank then holds all packed tensors itself: load the same checkpoint on each.
    """
    from qdsl.runtime.torch.distributed import ignore_packed_ as ignore

    return ignore(model)


def open(path: Path | str, shapes: Mapping[str, Sequence[int]] | None = None, verify: bool = False) -> Checkpoint:
    """Open a checkpoint of any producer: a folder of safetensors, a pipeline of such folders, a .safetensors or a .gguf file.

    Its `.layers`, `.layer(name)`, `.weight(name)`, `.weights()` and `.report()` read weights as they are packed, mapped and not
    copied.  shapes: (N, K), or (E, N, K) of experts, by the names of modules whose tensors do not state them.
    verify: read all files first, and compare them with the checksums that qdsl wrote with them.  Raises
    qdsl.checkpoint.files.safetensors.CheckpointError for anything that is wrong in the files, OSError where they cannot be read.
    """
    from qdsl.checkpoint.checkpoint import open_checkpoint
    from qdsl.checkpoint.files.references import local_path

    return open_checkpoint(local_path(path), shapes, verify)


def open_headers(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
                 metadata: Mapping[str, str] | None = None, config: Mapping[str, Any] | None = None,
                 weight_shapes: Mapping[str, Sequence[int]] | None = None) -> Checkpoint:
    """Open a checkpoint of which only headers are known; its weights are on meta, with the dtypes and shapes of the real ones.

    names, dtypes, shapes: of all tensors, dtypes as torch or safetensors calls them.  metadata: of the safetensors header.
    config: what config.json holds.  weight_shapes: as `shapes` of `open`.  Raises CheckpointError for an unknown dtype.
    """
    from qdsl.checkpoint.checkpoint import open_headers as open_by_headers

    return open_by_headers(names, dtypes, shapes, metadata, config, weight_shapes)


def load_weights_(model: nn.Module, path: Path | str, rename: Callable[[str], str | None] | Mapping[str, str] | None = None,
                  device: torch.device | str | None = None, dtype: torch.dtype | None = None, verify: bool = False,
                  copy: bool = False, format: str | None = None, skip: Sequence[str] | None = None,
                  base: Path | str | None = None, match_dense: bool = False, allow_unknown: bool = False,
                  **options: Any) -> LoadReport:
    """Fill a model, on meta or not, with the weights of a checkpoint as they are packed, in place, a tensor at a time.

    Linear and Embedding layers with packed weights are replaced, stacks of experts become `qdsl.Experts`, groups that are coded
    together are decoded for each block as it runs, and all other tensors are loaded as plain numbers.

    rename: what the model calls a weight of the checkpoint, None for one to be left out; a mapping replaces prefixes of names.
    device: for all weights; by default that of each parameter, the CPU for those on meta.  dtype: of plain floats and of
    products; by default each parameter's.  verify: first decode every stream, check every
    index, and compare all files with the checksums that qdsl wrote with them, where there are any.  copy: own the weights;
    by default those on a CPU stay mapped from the files, privately: the files must not be changed while the model lives.
    format, options: quantize plain Linear layers in a format on the way.  skip: patterns of names, or of parts of them, whose
    layers become dense, packed ones too; by default heads, embeddings, norms and routers are not quantized on the way.
    base: the folder or repository that a folder's weights were made of, with plain tensors for parameters that have none.
    match_dense: products have the bits of the dequantized model, as `match_dense_` sets it.
    allow_unknown: go on where settings or tensors change the model, and qdsl does not compute them or does not know them.

    Returns which layers are packed, which are dense and why, which tensors were not used, and bytes before and after.  Raises
    qdsl.models.plan.LoadError, with the model unchanged, where a parameter has no weight or shapes differ, and for DF11 where a
    tensor has no place; CheckpointError for files that are wrong; qdsl.core.places.UnknownSpec for an unknown format.
    """
    from qdsl.checkpoint.files.references import local_path
    from qdsl.models.load import load_weights
    from qdsl.runtime.torch.model import check_model

    check_model(model)

    return load_weights(model, local_path(path), rename, device, dtype, verify, copy, format, skip, base, match_dense,
                        allow_unknown, **options)


def save_model(model: nn.Module, folder: Path | str, config: Mapping[str, Any] | None = None) -> SaveReport:
    """Save a model with packed weights as a checkpoint folder.

    A model that `load_weights_` filled keeps its checkpoint's names, storages, settings and files: weights that did not change
    are the same bytes.  Planar weights are converted back, exactly.  A model that was quantized otherwise gets settings that
    state format, storage and every parameter.  config: the contents of config.json, by default those of the checkpoint or of
    `model.config`.  The folder must hold no weights.  Raises qdsl.models.save.SaveError before anything is written.
    """
    from pathlib import Path

    from qdsl.models.save import save
    from qdsl.runtime.torch.model import check_model

    check_model(model)
    return save(model, Path(folder), config)


def __getattr__(name: str) -> Any:
    """A public name of a module that is imported on first use."""
    from importlib import import_module

    if name == "generated":
        return import_module("qdsl.generated")
    if name not in _LAZY:
        from difflib import get_close_matches

        near = ["models.transformers.from_pretrained"] if name == "from_pretrained" else get_close_matches(name, __all__, n=1)
        raise AttributeError(f"module 'qdsl' has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    module, _, attribute = _LAZY[name].rpartition(".")
    return getattr(import_module(f"qdsl.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"])


def _further_modules() -> list[Path]:
    """The folder with the modules of the specs that QDSL_SPECS names, in a list; built into the cache.  [] without any.

    Raises UnknownSpec, SpecError, OSError.
    """
    import os

    if not os.environ.get("QDSL_SPECS"):                         # generated modules run without the compiler
        return []
    from qdsl.compiler.load import build_together
    from qdsl.core.places import user_specs

    return [build_together(user_specs())]
