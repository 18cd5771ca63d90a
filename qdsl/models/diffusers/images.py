"""Loads diffusion pipelines by name, generates images, and compares them with those of another pipeline."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.models.diffusers.pipeline import QUANTIZED, from_pretrained, pipeline_folder
from qdsl.models.language import named_errors
from qdsl.models.plan import LoadError
from qdsl.models.plugin import usable_device
from qdsl.runtime.torch.model import match_dense as match_dense_layers

PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PEAK = 255.0                                                     # of a channel of an image


@dataclass
class ImagePipeline:
    """A pipeline of diffusers.  name: as the user named it.  seconds: of loading."""

    name: str
    pipeline: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image of PIL.  latents: after the last step, None where the pipeline does not return them.  steps: how many ran."""

    image: Any
    latents: Tensor | None
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ImageDifference:
    """The difference between two images.

    psnr: peak signal to noise in decibels, infinite for equal images.  latents: the largest difference of the final latents;
    relative: the norm of their difference over that of the other's.  Both are None for latents of different shapes.
    """

    psnr: float
    latents: float | None
    relative: float | None

    @property
    def is_identical(self) -> bool:
        """Whether all pixels and latents are the same."""
        return self.psnr == math.inf and not self.latents

    def data(self) -> dict[str, Any]:
        """The figures as a dictionary for JSON."""
        return {"identical": self.is_identical, **asdict(self)}


def load_image_pipeline(ref: str, models: Mapping[str, str] | None = None, format: str | None = None, device: str | None = None,
                        dtype: str = "auto", params: Mapping[str, Any] | None = None, is_quiet: bool = False,
                        match_dense: bool = False, allow_unknown: bool = False) -> ImagePipeline:
    """Loads a folder or repository of a pipeline; packed weights stay packed, plain ones are quantized if a format is named.

    models: references of models that come from elsewhere, by their names in the pipeline.  device: by default a GPU where there
    is one.  dtype: by default that of most plain numbers.  is_quiet: without a progress bar of steps.  match_dense,
    allow_unknown: as of `QdslConfig`.  Raises LoadError, CheckpointError, OSError.
    """
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    device = usable_device(device)
    folder = pipeline_folder(ref, [*(models or {})])
    with named_errors(f"{ref}: diffusers does not load it", CheckpointError, OSError):
        pipeline = from_pretrained(folder, format=format, params=params, device=device, allow_unknown=allow_unknown,
                                   dtype=_stored_dtype(folder) if dtype == "auto" else getattr(torch, dtype), **(models or {}))
    for model in pipeline.components.values() if match_dense else ():
        if isinstance(model, torch.nn.Module):
            match_dense_layers(model)
    pipeline.set_progress_bar_config(disable=is_quiet, leave=False)
    return ImagePipeline(f"{ref} as {format}" if format else ref, pipeline, time.perf_counter() - began)


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of most plain numbers in a pipeline's models; autoencoders are often stored in another."""
    counts: Counter[str] = Counter()
    for path in sorted({file.parent for file in folder.glob("*/*.safetensors") if file.parent.name.startswith(QUANTIZED)}):
        with Folder(path) as model:
            for name in model.names():
                counts[model.entry(name).dtype] += math.prod(model.entry(name).shape)
    return PLAIN[max(PLAIN, key=counts.__getitem__)]


def generate_image(loaded: ImagePipeline, prompt: str, seed: int = 0, size: tuple[int, int] | None = None,
                   steps: int | None = None, guidance: float | None = None) -> GeneratedImage:
    """Generates the image of a prompt.  size: width and height.  None means the pipeline's default.

    The noise comes from a CPU, whatever the device.  Raises LoadError for a pipeline without an argument that is asked for,
    and where the pipeline fails.
    """
    pipeline, kind = loaded.pipeline, type(loaded.pipeline).__name__
    width, height = size or (None, None)
    options = {"width": width, "height": height, "num_inference_steps": steps, "guidance_scale": guidance}
    options = {name: value for name, value in options.items() if value is not None}
    accepted = inspect.signature(pipeline.__call__).parameters
    if "num_frames" in accepted:
        raise LoadError(f"{loaded.name}: {kind} generates videos, not images")
    if unknown := [name for name in ("prompt", *options) if name not in accepted]:
        raise LoadError(f"{loaded.name}: {kind} takes no {unknown[0]}")
    latents: list[Tensor] = []

    def keep(own: Any, step: int, timestep: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        latents[:] = [tensors["latents"]]
        steps_taken.append(step)
        return {}

    steps_taken: list[int] = []
    callback = {"callback_on_step_end": keep} if "callback_on_step_end" in accepted else {}
    began = time.perf_counter()
    try:
        image = pipeline(prompt=prompt, generator=torch.Generator().manual_seed(seed), **options, **callback).images[0]
    except RuntimeError as error:                                # memory that runs out, prompts that leave no tokens
        raise LoadError(f"{loaded.name}: {kind} cannot generate this image: {error}") from error
    seconds = time.perf_counter() - began
    return GeneratedImage(image, latents[0].float().cpu() if latents else None, len(steps_taken), seconds)


def peak_device_bytes() -> int:
    """The largest GPU memory of tensors of this process so far, in bytes; 0 without a GPU."""
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def image_difference(one: GeneratedImage, other: GeneratedImage) -> ImageDifference:
    """The difference between two images.  Raises LoadError for images of different sizes."""
    if one.image.size != other.image.size:
        sizes = " and ".join(f"{image.width}x{image.height}" for image in (one.image, other.image))
        raise LoadError(f"the images have {sizes} pixels; name a size for both with --size")
    pixels, others = (torch.frombuffer(bytearray(drawn.image.convert("RGB").tobytes()), dtype=torch.uint8).double()
                      for drawn in (one, other))
    error = float((pixels - others).square().mean())
    psnr = 10 * math.log10(PEAK ** 2 / error) if error else math.inf
    if one.latents is None or other.latents is None or one.latents.shape != other.latents.shape:
        return ImageDifference(psnr, None, None)
    distance = one.latents - other.latents
    return ImageDifference(psnr, float(distance.abs().max()), float(distance.norm() / other.latents.norm()))
