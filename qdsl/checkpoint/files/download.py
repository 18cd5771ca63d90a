"""Downloads files of HTTP servers into the cache, or reads only their headers."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from qdsl.checkpoint.files.gguf import parse
from qdsl.checkpoint.files.safetensors import START_BYTES, CheckpointError, TensorFile, shown
from qdsl.host.files import cache_folder, flush_folder, locked, write_text

SUFFIXES = (".gguf", ".safetensors")
TIMEOUT = 60                                                     # seconds without a byte
CHUNK = 1 << 20                                                  # bytes that are read at a time
FIRST = 1 << 20                                                  # bytes of a GGUF file that are read for its header at first
LIMIT = 1 << 28                                                  # bytes of a header, and of what a server without ranges gives
NUMBERS = 1 << 12                                                # bytes of float tensors that are read whole, as global scales
GAP = 1 << 18                                                    # ranges closer than this are read as one
WHOLE = (".output_positions", ".luts")                           # tensors of DF11 from which a kernel's memory is computed
REQUESTS = 8                                                     # at a time
MOST = 1 << 42                                                   # bytes of a file
DIGITS = 20                                                      # more than a number of bytes has
_TAG = re.compile(r'"[!#-~]{0,250}"')


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, and sends a token to no other host."""

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if urlsplit(newurl).scheme not in ("http", "https") or (req.full_url.startswith("https:") and newurl.startswith("http:")):
            raise URLError(f"it redirects to {shown(newurl)}")
        if redirected is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            redirected.remove_header("Authorization")
        return redirected


_OPENER = build_opener(_Redirects)


def download(url: str) -> Path:
    """Downloads the file of a URL into the cache and returns its path; a file that did not change on the server is not
    downloaded again.

    Re-run to resume.  Raises CheckpointError for an answer that is no such file, and OSError.
    """
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not name.endswith(SUFFIXES) or re.search(r"[\\/:\0]", name):
        raise CheckpointError(f"{shown(url)}: the name of a file ends with {' or '.join(SUFFIXES)}")
    folder = cache_folder() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            return _downloaded(url, folder / name)
    except BlockingIOError:
        raise CheckpointError(f"{shown(url)}: another process is downloading it") from None


def _downloaded(url: str, path: Path) -> Path:
    tag, part = path.with_name(path.name + ".etag"), path.with_name(path.name + ".part")
    etag = _valid_tag(tag.read_text()) if tag.is_file() else ""
    headers, start = {}, 0
    if path.is_file() and etag:
        headers["If-None-Match"] = etag
    elif part.is_file() and etag:
        start = part.stat().st_size
        headers |= {"Range": f"bytes={start}-", "If-Range": etag}
    try:
        answer = _open_url(url, headers)
    except CheckpointError as error:
        refusal = error.__cause__ if isinstance(error.__cause__, HTTPError) else None
        code = refusal and refusal.code
        if path.is_file() and code in (304, None):               # None: no server, as where there is no network
            return path
        if refusal is None or code != 416 or not start:
            raise
        part.rename(path)                                        # all of it is there, or it is of another file
        return path if refusal.headers["Content-Range"] == f"bytes */{start}" else _anew(url, path)
    with answer:
        if answer.status != 206:
            start = 0
            path.unlink(missing_ok=True)
            write_text(tag, _valid_tag(str(answer.headers["ETag"] or "")))
        length = _length(url, answer)
        if answer.status == 206 and _range_size(url, answer, start) != start + length:
            raise CheckpointError(f"{shown(url)}: the server sent a different range than requested")
        if length > shutil.disk_usage(path.parent).free:
            raise CheckpointError(f"{shown(url)}: {length} bytes, and the disk of {path.parent} has less room")
        with open(part, "ab" if start else "wb") as file:
            with _reading(url, "; run again to resume"):
                shutil.copyfileobj(answer, file, CHUNK)
            file.flush()
            os.fsync(file.fileno())
            missing = start + length - file.tell()
    if missing:
        raise CheckpointError(f"{shown(url)}: the answer ended {missing} bytes too early; run again to resume")
    os.replace(part, path)
    flush_folder(path.parent)
    return path


def _anew(url: str, path: Path) -> Path:
    """Downloads a file whose unfinished part the server cannot continue."""
    path.unlink()
    return _downloaded(url, path)


def _valid_tag(tag: str) -> str:
    """The ETag of a file's version where it is a strong one that can be sent back; else ''."""
    return tag if _TAG.fullmatch(tag) else ""


def _length(url: str, answer: Any) -> int:
    """How many bytes an answer says that it has.  Raises CheckpointError where it does not, or says it in two ways, or where
    they are not the file's own.
    """
    lengths = set(answer.headers.get_all("Content-Length") or ())
    if answer.chunked or len(lengths) != 1:
        raise CheckpointError(f"{shown(url)}: the server does not say how long the file is")
    if (coding := str(answer.headers["Content-Encoding"] or "identity")) != "identity":
        raise CheckpointError(f"{shown(url)}: the server sends the file as {shown(coding)}")
    return _size(url, lengths.pop())


def _size(url: str, text: str) -> int:
    """A number of bytes.  Raises CheckpointError for other text, and for more than a file has."""
    if not (text.isascii() and text.isdecimal() and len(text) < DIGITS and int(text) <= MOST):
        raise CheckpointError(f"{shown(url)}: the server says that the file has {shown(text)} bytes; the limit is {MOST}")
    return int(text)


def _range_size(url: str, answer: Any, start: int) -> int:
    """The size of the file of which a range from `start` on is sent.  Raises CheckpointError for another range."""
    first, _, size = str(answer.headers["Content-Range"]).partition("/")
    if not first.startswith(f"bytes {start}-"):
        raise CheckpointError(f"{shown(url)}: the server sent a different range than requested")
    return _size(url, size)


@contextmanager
def _reading(url: str, hint: str = "") -> Iterator[None]:
    """Turns what can go wrong while an answer is read into CheckpointError."""
    try:
        yield
    except (HTTPException, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{shown(url)}: {shown(str(error))[1:-1]}{hint}") from error


def _open_url(url: str, headers: Mapping[str, str]) -> Any:
    """The HTTP response, with status 200 or 206.  Raises CheckpointError, with the HTTPError as its cause where the server
    answered.
    """
    try:
        return _OPENER.open(Request(url, headers={"User-Agent": "qdsl", **headers}), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        raise CheckpointError(f"{shown(url)}: the server says {error.code} {shown(str(error.reason))}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise CheckpointError(f"{shown(url)}: {shown(str(getattr(error, 'reason', None) or error))[1:-1]}") from error


def read_range(url: str, start: int, stop: int, headers: Mapping[str, str]) -> tuple[bytes, int]:
    """The bytes [start, stop) of a remote file, fewer where it ends, and the size of the file.  Raises CheckpointError."""
    with _open_url(url, {**headers, "Range": f"bytes={start}-{stop - 1}"}) as answer, _reading(url):
        length, is_whole = _length(url, answer), answer.status != 206
        if stop - start > LIMIT or (is_whole and stop > LIMIT):
            raise CheckpointError(f"{shown(url)}: " + ("the server sends only whole files" if is_whole else
                                                       f"{stop - start} bytes are over the limit of {LIMIT}"))
        size = length if is_whole else _range_size(url, answer, start)
        data = answer.read(stop)[start:] if is_whole else answer.read(stop - start)
    if len(data) != max(0, min(stop, size) - start):
        raise CheckpointError(f"{shown(url)}: the answer has {len(data)} bytes, not the requested {min(stop, size) - start}")
    return data, size


def write_header(url: str, path: Path, headers: Mapping[str, str]) -> None:
    """Write a sparse local file of the same size with the header of a remote one and the bytes that `layers` reads of tensors;
    the other bytes are a hole.

    Raises CheckpointError for a header that is no header, OSError.
    """
    try:
        (_write_safetensors if path.suffix == ".safetensors" else _write_gguf)(url, path, headers)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(path), url)) from error


def _write_safetensors(url: str, path: Path, headers: Mapping[str, str]) -> None:
    start, size = read_range(url, 0, 8, headers)
    length = struct.unpack("<Q", start.ljust(8, b"\0"))[0]
    if length > min(size, LIMIT):
        raise CheckpointError(f"{path}: its header of {length} bytes is over the limit of {min(size, LIMIT)}")
    _put(path, size, 0, start + read_range(url, 8, 8 + length, headers)[0])
    ranges = _ranges_to_read(path)
    if (total := sum(stop - start for start, stop in ranges)) > 32 * LIMIT:
        raise CheckpointError(f"{path}: {total} bytes tell the formats of its layers, over the limit of {32 * LIMIT}")
    with ThreadPoolExecutor(REQUESTS) as pool:
        parts = pool.map(lambda part_range: read_range(url, part_range[0], part_range[1], headers), ranges)
        for (first, _), (data, _) in zip(ranges, parts, strict=True):
            _put(path, size, first, data)


def _write_gguf(url: str, path: Path, headers: Mapping[str, str]) -> None:
    length = FIRST
    while True:
        data, size = read_range(url, 0, length, headers)
        try:
            parse(BytesIO(data), size, path)
        except CheckpointError:
            if length >= min(size, LIMIT):
                raise
            length *= 4
        else:
            _put(path, size, 0, data)
            return


def _put(path: Path, size: int, start: int, data: bytes) -> None:
    """Write bytes at an offset of a sparse file of a given size."""
    with open(path, "r+b" if path.exists() else "xb") as file:
        file.truncate(size)
        file.seek(start)
        file.write(data)


def _ranges_to_read(path: Path) -> list[tuple[int, int]]:
    """Byte ranges of a safetensors file from which layers' formats are detected: the starts of integer tensors, and small float
    tensors.
    """
    with TensorFile(path) as file:
        ranges = sorted((entry.start, entry.stop if name.endswith(WHOLE) else min(entry.stop, entry.start + START_BYTES))
                        for name, entry in file.header.tensors.items()
                        if entry.nbytes and (entry.dtype[0] in "UI" or entry.nbytes <= NUMBERS))
    whole: list[tuple[int, int]] = []
    for start, stop in ranges:
        if whole and start - whole[-1][1] <= GAP:
            whole[-1] = (whole[-1][0], stop)
        else:
            whole.append((start, stop))
    return whole
