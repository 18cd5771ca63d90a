"""The models of a checkpoint folder: one, or the components of a diffusion pipeline (transformer, text_encoder, vae), one per
subfolder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import is_gguf

PIPELINE = "model_index.json"
AUTOENCODER = "vae"
AUTOENCODERS = ("Autoencoder", "AsymmetricAutoencoder", "VQModel", "ConsistencyDecoder")      # how classes of diffusers begin


def names(path: Path) -> list[str]:
    """Names of the subfolders that hold models; [''] where the folder itself is the model.

    Weights next to model_index.json are not a model of the pipeline: published pipelines repeat their weights there for other
    programs.
    """
    if not path.is_dir() or (_has_weights(path) and not (path / PIPELINE).is_file()):
        return [""]
    return sorted(child.name for child in path.iterdir()
                  if child.is_dir() and not child.name.startswith(".") and _has_weights(child)) or [""]


def _has_weights(path: Path) -> bool:
    return any(not file.name.startswith(".") for file in path.glob("*.safetensors"))


def gguf(path: Path) -> Path | None:
    """The GGUF file of a checkpoint, the first of a split one: the path itself, by its name or its first bytes; or the file of a
    folder without safetensors, of one model.  None if there is none.
    """
    if not path.is_dir():
        return path if is_gguf(path) else None
    if names(path) != [""] or any(path.glob("*.safetensors")):
        return None
    firsts = gguf_files(path)
    return firsts[0] if len(firsts) == 1 else None


def why_no_model(path: Path) -> str:
    """Why an existing file holds no language model; '' for GGUF files and folders."""
    if path.is_dir() or gguf(path) is not None:
        return ""
    return "a language model is a GGUF file, or a folder of all its files" + (
        f", as {path.parent}" if path.suffix == ".safetensors" else "")


def why_no_config(path: Path) -> str:
    """Why a folder of weights does not say of what model they are; '' where it does."""
    if any((path / name).is_file() for name in ("config.json", PIPELINE)) or not any(path.glob("*.safetensors")):
        return ""
    return "no config.json beside the weights, which says of what model they are"


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder, of split ones the first."""
    return sorted(path for path in folder.glob("*.gguf") if re.search(r"-0*1-of-\d+$", path.stem) or "-of-" not in path.stem)


@contextmanager
def open_models(path: Path) -> Iterator[dict[str, Folder]]:
    """Opens the models of a folder, by the names of their subfolders.  Raises CheckpointError and OSError as Folder does."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Folder(path / name if name else path)) for name in names(path)}


def selected_models(models: Mapping[str, Folder], only: Sequence[str] = ()) -> tuple[str, ...]:
    """The models of a pipeline to quantize or compress: those of `only`, else all but autoencoders; () means all.

    An autoencoder is small, its libraries expect plain weights, and its errors are visible in images.
    """
    plain = [name for name, folder in models.items() if not name.startswith(AUTOENCODER)
             and not str(folder.config.get("_class_name", "")).startswith(AUTOENCODERS)]
    return tuple(only) or (tuple(plain) if len(plain) < len(models) else ())



def within(component: str, file: str) -> str:
    """A file's path relative to the folder of all models."""
    return f"{component}/{file}" if component else file
