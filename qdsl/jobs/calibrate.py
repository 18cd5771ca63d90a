"""Runs a language model on a text, and keeps the moments of its layers' inputs for quantizing by them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.host.files import digest, read_utf8
from qdsl.host.progress import SAMPLES
from qdsl.jobs.gguf.mixes import EMBEDDINGS, OUTPUT

EXPERTS = "_exps.weight"                                         # ends the names of stacked experts in GGUF files

if TYPE_CHECKING:
    from torch import Tensor

    from qdsl.jobs.gguf import mixes
    from qdsl.models.calibrate import Target
    from qdsl.models.gguf_maps import GgufMap
    from qdsl.models.language import LanguageModel


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a model is calibrated with: `samples` runs of `length` tokens of a text, at even distances.

    method: of encode/calibrated/solve.py.  sequential: a block is quantized before the next one gets its outputs.
    """

    text: Path
    method: str
    samples: int = 128
    length: int = 2048
    sequential: bool = True

    def content(self) -> str:
        """The text.  Raises OSError, InputError where it is not UTF-8."""
        return read_utf8(self.text)

    def data(self) -> dict[str, int | str | bool]:
        """What the moments depend on, for the request of a job: the text by its digest."""
        return {**asdict(self), "text": digest(self.content())}


def samples_of(tokenizer: Any, content: str, samples: int, length: int) -> list[Tensor]:
    """Runs of tokens [1, length] at even distances in a text; fewer of a short one.  Raises LoadError for less than one."""
    from qdsl.models.evaluate import chunks

    every = chunks(tokenizer, content, length, "--length")
    step = max(1, len(every) / samples)
    return [every[int(number * step)][None] for number in range(min(samples, len(every)))]


def write_moments(model: str, sampling: Sampling, folder: Path, target: Target, progress: Callable[[Mapping[str, int]], Any],
                  device: str | None = None, has_stored_names: bool = False) -> None:
    """Write the moments of a language model's layers into a folder; those that are there are kept.

    target(name): the format and options that a layer is quantized to, None where it stays.  has_stored_names: names are those of
    layers in the model's folder, and moments are found by them, too; else they are those of `calibrate`.  progress(amounts): a
    context that shows the work.  Raises LoadError, CheckpointError and OSError.
    """
    from qdsl.encode.calibrated.store import Moments, save, save_names
    from qdsl.models.calibrate import calibrate, calibration_bytes
    from qdsl.models.conversions import stored_names

    language, tokens = load_with_samples(model, sampling, device, fast=True)
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_names(language.model, Path(language.path)) if has_stored_names else {}
    save_names(folder, stored)
    by_model = {own: name for name, own in stored.items()}
    targets: Target | None = (lambda name: target(by_model.get(name, name))) if sampling.sequential else None
    with progress(calibration_bytes(language.model, tokens, targets, Moments(folder))):
        calibrate(language.model, tokens, targets, lambda block, hessians: save(folder, block, hessians), Moments(folder))


def load_with_samples(model: str, sampling: Sampling, device: str | None, fast: bool = False,
                      ) -> tuple[LanguageModel, list[Tensor]]:
    """A model with plain weights, and the samples on its device.

    Its numbers are float32 on a CPU; bfloat16 if `fast`, and the CPU multiplies it.
    """
    from qdsl.models.plugin import usable_device

    content, place = sampling.content(), usable_device(device)   # before imports and the model, which take longer
    from qdsl.models.language import load_language_model
    from qdsl.models.processor import bfloat16_instructions

    of_cpu = "bfloat16" if fast and bfloat16_instructions() else "float32"
    tokens: list[Tensor] = []
    language = load_language_model(model, device=device, dtype=of_cpu if place == "cpu" else "auto",
                                   check=lambda language: tokens.extend(
                                       samples_of(language.tokenizer, content, sampling.samples, sampling.length)))
    if language.packed_layers:
        language.model.dequantize()
    return language, [sample.to(language.model.device) for sample in tokens]


def write_imatrix(model: Path, sampling: Sampling, out: Path, progress: Callable[[Mapping[str, int]], Any],
                  device: str | None = None) -> list[str]:
    """Write an importance matrix as llama-imatrix does, in its GGUF form; returns the linear layers that it leaves out.

    Raises LoadError for a model without a map to GGUF, CheckpointError and OSError.
    """
    from qdsl.checkpoint.files.ggml_types import BY_NAME
    from qdsl.checkpoint.files.gguf_metadata import Value
    from qdsl.checkpoint.files.gguf_write import NewTensor, write
    from qdsl.checkpoint.files.safetensors import bytes_of
    from qdsl.models.calibrate import square_sums, token_bytes

    language, tokens = load_with_samples(str(model), sampling, device)
    with progress({SAMPLES: sum(map(token_bytes, tokens))}):
        sums = square_sums(language.model, tokens)
    own = _map_of(model)
    tensors, left = [], []
    for name, matrices in _sums_by_parameter(sums, language.model).items():
        rule = own.rule(name)
        left += [] if rule else [name.removesuffix(".weight")]
        for source in rule.sources if rule is not None else ():
            if source not in EMBEDDINGS and source != OUTPUT:
                counts = struct.pack(f"<{len(matrices)}f", *(rows for _, rows in matrices))
                data = b"".join(bytes_of(total.cpu()) for total, _ in matrices)
                tensors.append(NewTensor(f"{source}.in_sum2", BY_NAME["F32"], (len(matrices), len(matrices[0][0])), [data]))
                tensors.append(NewTensor(f"{source}.counts", BY_NAME["F32"], (len(matrices), 1), [counts]))
    metadata = {"general.type": Value.of("string", "imatrix"), "imatrix.datasets": Value.of("string[]", [sampling.text.name]),
                "imatrix.chunk_count": Value.of("u32", len(tokens)), "imatrix.chunk_size": Value.of("u32", sampling.length)}
    write(out, metadata, sorted(tensors, key=lambda tensor: tensor.name))
    return left


def _sums_by_parameter(sums: Mapping[str, tuple[Tensor, int]], model: Any) -> dict[str, list[tuple[Tensor, int]]]:
    """The sums of each weight's matrices by the names of parameters: one matrix of a linear layer, all of stacked experts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))      # a head may be its embedding
    matrices = {f"{name}.weight": [total] for name, total in sums.items() if f"{name}.weight" in parameters}
    for name, (total, _) in sums.items():
        stack = name.rpartition(".")[0]
        if f"{name}.weight" not in matrices and stack not in matrices:
            matrices[stack] = [sums.get(f"{stack}.{expert}", (total.new_zeros(total.shape), 0))
                               for expert in range(len(parameters[stack]))]
    return matrices


def tensor_layers(path: Path, tensors: Iterable[mixes.Tensor]) -> dict[str, list[str]]:
    """What `calibrate` calls the matrices of tensors in a language model's GGUF file: one name, or one for each expert.

    path: the GGUF file, or the folder that is written as one.  Raises LoadError for a model without a map.
    """
    from qdsl.models.gguf_maps import BLOCK, pattern_of

    own = _map_of(path)
    layers = {source: name.removesuffix(".weight") for name, rule in own.rules.items() for source in rule.sources
              if source.endswith(EXPERTS) or (name.endswith(".weight") and not (rule.transposed or rule.elements))}
    names = {}
    for tensor in tensors:
        pattern, block = pattern_of(tensor.name)
        if pattern in layers:
            name = layers[pattern].replace(BLOCK, block)
            names[tensor.name] = [f"{name}.{expert}" for expert in range(tensor.experts)] if pattern.endswith(EXPERTS) else [name]
    return names


def _map_of(path: Path) -> GgufMap:
    """The map between the parameters of a model and the tensors of its GGUF file."""
    import transformers

    from qdsl.checkpoint.files.gguf import GgufFile
    from qdsl.models.gguf_maps import FOLDER, GgufMap, map_of
    from qdsl.models.transformers.gguf import config_of

    if path.is_dir():
        return GgufMap.read(FOLDER / f"{transformers.AutoConfig.from_pretrained(path).model_type}.json")
    with GgufFile(path) as file:
        architecture = str(file.metadata["general.architecture"])
        return map_of(config_of(file).model_type, architecture)
