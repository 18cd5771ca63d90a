"""Resolves references to checkpoints to local paths: files, folders, URLs, and repositories of the Hugging Face Hub.

A reference is a path, `FOLDER:QUANT`, `https://...`, `OWNER/NAME`, `OWNER/NAME/FILE` or `OWNER/NAME:QUANT`.  `@REVISION` may
follow OWNER/NAME.  QUANT chooses among GGUF files by a whole part of their names, such as Q4_K_M.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies

from qdsl.checkpoint.files.download import download, write_header
from qdsl.checkpoint.files.safetensors import CheckpointError, shown

FILES = (".gguf", ".safetensors", ".json")
# Files of a repository that are not downloaded: weights for other programs, and pictures.
SKIPPED = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.mlmodel", "*.png", "*.jpg", "original/*")
VOCABULARIES = ("*tokenizer*.json", "*vocab*.json")              # files that no reader of headers wants
LISTED = 8                                                       # names in a message
CONNECT = 5.0                                                    # seconds to wait for the hub, all its addresses together
_LIBRARY_NAME = re.compile(r"[\w-][\w.-]*")                      # without an owner, as libraries take it: gpt2
_REPOSITORY = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*?)(?:@(?P<revision>[\w.-]+))?"
                         r"(?:/(?P<file>[^:]+)|:(?P<quant>[\w.-]+))?")
_HUB_PATH = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)(?:/(?:resolve|blob|raw|tree)/(?P<revision>[^/]+)(?:/(?P<file>.+?))?)?/?")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub, and which of its files a reference names: one file, the GGUF files of a QUANT, or all that a
    model needs.
    """

    name: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None


@dataclass(frozen=True, slots=True)
class Url:
    """A file on any other server."""

    text: str

    @property
    def parts(self) -> dict[str, str]:
        """The URLs of all parts of a split file, or of the single file, by file name."""
        place = urlsplit(self.text)
        name = unquote(place.path).rpartition("/")[2]
        query = f"?{place.query}" if place.query else ""
        return {part: urljoin(self.text, quote(part) + query) for part in split_names(name)}


def local_path(ref: str | os.PathLike[str]) -> Path:
    """The local file or folder of a reference; a remote one is downloaded into a cache first.

    Of a split GGUF file it is the first part.  Files of the hub go into huggingface_hub's cache, with its token and offline mode;
    those of other servers into qdsl's.  Raises CheckpointError for a reference that names nothing or several files, and OSError.
    """
    target = parse_reference(ref)
    if isinstance(target, Repository):
        return _from_hub(target, os.fspath(ref))
    if isinstance(target, Url):
        first, *_ = [download(url) for url in target.parts.values()]
        return first
    return _readable(target)


def _readable(path: Path) -> Path:
    """The path of a file or folder.  Raises CheckpointError for a pipe, a device or a socket, also two levels into the folder.

    Libraries that read the folder, too, could wait for ever.
    """
    for entry in (path, *path.glob("[!.]*"), *path.glob("[!.]*/*")):
        with suppress(FileNotFoundError):                        # or a link to nothing
            mode = entry.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{entry}: not a regular file")
    return path


def path_hint(path: Path) -> str:
    """`; did you mean ...?` with names that resemble a path's, next to where it would be; '' for none."""
    with suppress(OSError):
        names = [other.name for other in path.absolute().parent.iterdir() if not other.name.startswith(".")]
        if near := get_close_matches(path.name, names, n=2) or [name for name in names if Path(name).stem == path.stem][:2]:
            return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return ""


@contextmanager
def local_headers(ref: str | os.PathLike[str]) -> Iterator[Path]:
    """The local path of a reference for readers of headers: of remote files only headers and small tensors are downloaded.

    Remote files become temporary sparse files, with holes in place of large tensors.  Raises CheckpointError, OSError.
    """
    target = parse_reference(ref)
    if isinstance(target, Path) or (isinstance(target, Repository) and _is_offline(os.fspath(ref))):
        yield local_path(ref)
        return
    with tempfile.TemporaryDirectory(prefix="qdsl-headers-") as folder:
        if isinstance(target, Repository):
            yield _headers_from_hub(target, os.fspath(ref), Path(folder))
        else:
            for name, url in target.parts.items():
                write_header(url, Path(folder) / name, {})
            yield Path(folder) / next(iter(target.parts))


def has_file(ref: str | os.PathLike[str], name: str) -> bool:
    """Whether a folder or a repository has a file of this name; other references have none.  Raises CheckpointError."""
    target = parse_reference(ref)
    if isinstance(target, Repository):
        with _hub_errors(os.fspath(ref)) as is_cut_off:
            return target.file is None and target.quant is None and name in _names(_hub(os.fspath(ref)), target, is_cut_off)
    return isinstance(target, Path) and (target / name).is_file()


def parse_reference(ref: str | os.PathLike[str]) -> Path | Repository | Url:
    """Parses a reference.  Raises CheckpointError for a QUANT that a folder does not have, or has twice."""
    text = os.path.expanduser(ref)                               # shells do that, and Python's own functions do not
    if Path(text).exists():
        return Path(text)
    folder, _, quant = text.rpartition(":")
    if folder and Path(folder).is_dir():
        names = [str(path.relative_to(folder)) for path in sorted(Path(folder).rglob("*.gguf"))]
        return Path(folder) / gguf_files_of_quant(names, quant, text)[0]
    if text.startswith(("https://", "http://")):
        place = urlsplit(text)
        match = _HUB_PATH.fullmatch(unquote(place.path)) if f"{place.scheme}://{place.netloc}" == _endpoint() else None
        return Url(text) if match is None else Repository(match["repo"], match["revision"], match["file"])
    is_path = text.startswith((".", "/", "~")) or (text.count("/") == 1 and text.endswith(FILES))
    is_path = is_path or (text.count("/") > 1 and Path(text).parent.is_dir())
    match = None if is_path else _REPOSITORY.fullmatch(text)
    return Path(text) if match is None else Repository(match["repo"], match["revision"], match["file"], match["quant"])


def gguf_files_of_quant(names: Iterable[str], quant: str, ref: str) -> list[str]:
    """The names of the GGUF files of a QUANT; of a split one all parts in order.

    A name has QUANT between '-', '.' and '/', or after a '_' where it begins as types do, such as Q4.
    Raises CheckpointError for none, and for several that are not of one set.
    """
    before = "-._/" if re.match(r"[a-z]+\d", quant, re.IGNORECASE) else "-./"
    part = re.compile(rf"(?:^|[{re.escape(before)}]){re.escape(quant)}(?=[-./]|$)", re.IGNORECASE)
    models = _models(names)
    wanted = [name for name in models if part.search(_SPLIT.sub("", name)[:-len(".gguf")])]
    return _one_set(wanted, ref, f"has no GGUF file of {quant}; it has {_listed(models)}")


def split_names(name: str) -> list[str]:
    """The names of all parts of a split GGUF file, or the name."""
    split = _SPLIT.search(name)
    if split is None:
        return [name]
    return [f"{name[:split.start()]}-{part:05d}-of-{split[2]}{name[split.end():]}" for part in range(1, int(split[2]) + 1)]


def _models(names: Iterable[str]) -> list[str]:
    """The GGUF files of language models, without image encoders (mmproj)."""
    return [name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]


def _one_set(names: Sequence[str], ref: str, problem: str) -> list[str]:
    """The names, sorted, which must be one file or all parts of one.  Raises CheckpointError."""
    if not names:
        raise CheckpointError(f"{shown(ref)} {problem}")
    if len({_SPLIT.sub("", name) for name in names}) > 1:
        raise CheckpointError(f"{shown(ref)} names several files: {_listed(names)}; name one of them")
    if sorted(names) != sorted(split_names(names[0])):
        raise CheckpointError(f"{shown(ref)} has {len(names)} of {len(split_names(names[0]))} parts")
    return sorted(names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(shown, names[:LISTED])) + more if names else "none"


# The hub

def _hub(ref: str) -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise CheckpointError(f"no file or folder {shown(ref)}{path_hint(Path(ref))}; `pip install huggingface_hub` to download "
                              "repositories") from None
    return huggingface_hub


def _endpoint() -> str:
    try:
        return str(_hub("").constants.ENDPOINT)
    except CheckpointError:
        return "https://huggingface.co"


def _is_offline(ref: str = "") -> bool:
    return bool(_hub(ref).constants.HF_HUB_OFFLINE)


def available(ref: str | Path, revision: str | None = None, cache_dir: str | Path | None = None,
              local_files_only: bool = False, **_: object) -> str | Path:
    """The reference of a folder or a repository, for libraries that ask the hub by themselves, and would try for a minute.

    Where the hub cannot be reached, it is the repository's folder in huggingface_hub's cache.  The arguments are those of the
    libraries.  Raises CheckpointError for what is neither here nor there.
    """
    text, target = os.fspath(ref), parse_reference(ref)
    if isinstance(target, Path) and not target.exists():
        if _LIBRARY_NAME.fullmatch(text) is None or text.endswith(FILES):
            raise CheckpointError(f"no file or folder {shown(text)}{path_hint(target)}")
        target = Repository(text)
    if not isinstance(target, Repository) or local_files_only or _is_offline(text):
        return target if isinstance(target, Path) else ref
    with _hub_errors(text) as is_cut_off:
        return _snapshot(replace(target, revision=target.revision or revision), cache_dir) if is_cut_off else ref


def _from_hub(repository: Repository, ref: str) -> Path:
    """The file, or the folder, in huggingface_hub's cache.  Raises CheckpointError with what the hub says."""
    with _hub_errors(ref) as is_cut_off:
        return _downloaded(repository, ref, is_cut_off)


def _downloaded(repository: Repository, ref: str, is_cut_off: bool) -> Path:
    hub = _hub(ref)
    options = {"revision": repository.revision, "local_files_only": is_cut_off}
    files = _files(_names(hub, repository, is_cut_off), repository, ref)
    if files:
        first, *_ = [hub.hf_hub_download(repository.name, name, **options) for name in files]
        return Path(first)
    return Path(hub.snapshot_download(repository.name, **options, ignore_patterns=list(SKIPPED)))


def _headers_from_hub(repository: Repository, ref: str, folder: Path) -> Path:
    """Downloads headers and settings of a repository's files into a temporary folder and returns the path of the model."""
    hub = _hub(ref)
    with _hub_errors(ref) as is_cut_off:
        if is_cut_off:
            return _downloaded(repository, ref, is_cut_off)
        names = _names(hub, repository)
        files = _files(names, repository, ref)
        for name in files or [name for name in names if name.endswith(FILES[1:]) and not _fits(name, (*SKIPPED, *VOCABULARIES))]:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise CheckpointError(f"{shown(ref)} has a file called {shown(name)}")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".json"):
                (folder / name).symlink_to(hub.hf_hub_download(repository.name, name, revision=repository.revision))
            else:
                url = hub.hf_hub_url(repository.name, name, revision=repository.revision)
                write_header(url, folder / name, hub.utils.build_hf_headers())
    return folder / files[0] if files else folder


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _files(names: Sequence[str], repository: Repository, ref: str) -> list[str]:
    """The files that a reference to a repository names; [] for all that a model needs."""
    if repository.quant is not None:
        return gguf_files_of_quant(names, repository.quant, ref)
    if repository.file is not None:
        wanted = [name for name in split_names(repository.file) if name in names]
        return _one_set(wanted, ref, f"is not in the repository, which has {_listed(names)}")
    if any(name.endswith(".safetensors") for name in names):
        return []
    return _one_set(_models(names), ref, "has no .safetensors and no .gguf file")


def _names(hub: Any, repository: Repository, is_cut_off: bool = False) -> list[str]:
    """The files of a repository; offline, those in the cache."""
    if not (is_cut_off or _is_offline()):
        return list(hub.HfApi().list_repo_files(repository.name, revision=repository.revision))
    root = _snapshot(repository)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _snapshot(repository: Repository, cache_dir: str | Path | None = None) -> Path:
    """The folder of a repository in huggingface_hub's cache."""
    hub = _hub(repository.name)
    return Path(hub.snapshot_download(repository.name, revision=repository.revision, cache_dir=cache_dir, local_files_only=True,
                                      allow_patterns=[]))


def _unreachable() -> str:
    """Why the hub cannot be reached, for which its client would wait half a minute; '' if it can, or a proxy is asked."""
    place = urlsplit(_endpoint())
    address = place.hostname or "", place.port or (80 if place.scheme == "http" else 443)
    if getproxies():
        return ""
    problems = [f"no answer within {CONNECT:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection(address, CONNECT).close()
            problems.clear()
        except OSError as error:
            problems[:] = [error.strerror or str(error)]

    thread = threading.Thread(target=connect, daemon=True)       # which tries one address after the other, each so long
    thread.start()
    thread.join(CONNECT)
    return f"{place.hostname}, where it might be a repository, cannot be reached: {problems[0]}" if problems else ""


@contextmanager
def _hub_errors(ref: str) -> Iterator[bool]:
    """Yields whether the hub cannot be reached, and only its cache can serve; re-raises errors of huggingface_hub as a
    CheckpointError with the first line of their message.
    """
    errors = _hub(ref).errors
    problem = "" if _is_offline() else _unreachable()
    try:
        yield bool(problem)
    except Exception as error:
        if not isinstance(error, errors.HfHubHTTPError | errors.HFValidationError | errors.EntryNotFoundError |
                          errors.OfflineModeIsEnabled | ConnectionError) and not type(error).__module__.startswith("httpx"):
            raise                                                # the hub's client is httpx, of which several versions exist
        if problem:
            raise CheckpointError(f"no file or folder {shown(ref)}{path_hint(Path(ref)) or ', and'} {problem}") from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Request ID" not in line]
        raise CheckpointError(f"no file or folder {shown(ref)}{path_hint(Path(ref))}, and the hub says: "
                              f"{next(iter(lines), type(error).__name__)}") from error
