"""The models of a folder: one, or those of a diffusion pipeline, each in a folder of its own (transformer, text_encoder, vae)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qdsl.checkpoint.files.folder import Folder

PIPELINE = "model_index.json"
AUTOENCODER = "vae"
AUTOENCODERS = ("Autoencoder", "AsymmetricAutoencoder", "VQModel", "ConsistencyDecoder")      # how classes of diffusers begin


def names(path: Path) -> list[str]:
    """The folders of the models, '' for the folder itself: that is one where weights lie in it, or nowhere else either.

    What lies beside a pipeline's own index is none of its models: published ones have theirs there a second time, for others.
    """
    if not path.is_dir() or (_has_weights(path) and not (path / PIPELINE).is_file()):
        return [""]
    return sorted(each.name for each in path.iterdir()
                  if each.is_dir() and not each.name.startswith(".") and _has_weights(each)) or [""]


def _has_weights(path: Path) -> bool:
    return any(not each.name.startswith(".") for each in path.glob("*.safetensors"))


def gguf(path: Path) -> Path | None:
    """The GGUF file of a checkpoint, the first of a split one: the path itself, or that of a folder without safetensors."""
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() and names(path) == [""] and not any(path.glob("*.safetensors")) else []
    return files[0] if len(files) == 1 or (files and "-00001-of-" in files[0].name) else None


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Folder]]:
    """The models by their folders.  Raises CheckpointError and OSError as Folder does."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Folder(path / name if name else path)) for name in names(path)}


def meant(models: Mapping[str, Folder], only: Sequence[str] = ()) -> tuple[str, ...]:
    """The models of a pipeline that are quantized or compressed: those that are named, else all but autoencoders; () for all.

    An autoencoder is small, its libraries look for plain weights in it, and errors in it are seen.
    """
    plain = [name for name, folder in models.items() if not (name.startswith(AUTOENCODER) or is_autoencoder(folder))]
    return tuple(only) or (tuple(plain) if len(plain) < len(models) else ())


def is_autoencoder(folder: Folder) -> bool:
    """Whether a model's config names a class of diffusers that codes images or sound."""
    return str(folder.config.get("_class_name", "")).startswith(AUTOENCODERS)


def within(component: str, file: str) -> str:
    """A file's name from the folder of all models."""
    return f"{component}/{file}" if component else file
