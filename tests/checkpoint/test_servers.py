"""Answers of servers that are wrong or hostile: an error and a bound, never a traceback, a full disk, or a file of another."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from qdsl.checkpoint.files import download
from qdsl.checkpoint.files.references import local_headers, local_path
from qdsl.checkpoint.files.safetensors import CheckpointError, plan_header
from tests.support.jobs import command

HEADER, _ = plan_header("x", {"w": ("F32", (4, 4))})
DATA = HEADER + bytes(64)
SIZE = str(len(DATA))


def answer(status: str = "200 OK", body: bytes = DATA, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextmanager
def server(data: bytes, endless: bytes = b"") -> Iterator[str]:
    """The URL of a server that gives every request these bytes, and then `endless` for as long as somebody reads."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        def give() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(data)
                    for _ in range(512 if endless else 0):
                        connection.sendall(endless)

        threading.Thread(target=give, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/x.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


SIZES = ["abc", "-5", "+9", "1e3", "0x10", "9" * 5000, str(1 << 43), str(1 << 62), str(2**80), "\u00b2", ""]
CHUNKED = answer(Transfer_Encoding="chunked", body=b"")
WRONG = {
    **{f"length {size[:9]!a}": answer(Content_Length=size) for size in SIZES},
    **{f"range {size[:9]!a}": answer("206 Partial Content", Content_Range=f"bytes 0-7/{size}", Content_Length="8", body=DATA[:8])
       for size in [*SIZES, "*"]},
    "another range": answer("206 Partial Content", Content_Range=f"bytes 8-15/{SIZE}", Content_Length="8", body=DATA[8:16]),
    "no range": answer("206 Partial Content", Content_Length="8", body=DATA[:8]),
    "two lengths": answer(Content_Length=f"{SIZE}\r\nContent-Length: 5"),
    "no length": answer(),
    "gzip": answer(Content_Encoding="gzip", Content_Length=SIZE),
    "a negative chunk": CHUNKED + b"-5\r\nabc",
    "no chunk": CHUNKED + b"ZZZ\r\nabc",
    "a huge chunk": CHUNKED + b"f" * 30 + b"\r\nabc",
    "a long size of a chunk": CHUNKED + b"1" * 70_000 + b"\r\nabc",
    "chunks and a length": answer(Transfer_Encoding="chunked", Content_Length=SIZE, body=b"-5\r\n"),
    "too early": answer(Content_Length=str(len(DATA) + 1)),
    "no version": answer("304 Not Modified", body=b""),
    "no such range": answer("416 Range Not Satisfiable", Content_Length="0", body=b""),
    "a status that is none": answer("999999 \x1b[2J"),
    "no status": b"\0" * 100,
    "many headers": answer(**{f"X{number}": "y" for number in range(200)}),
    "a redirect": answer("302 Found", Location="file:///etc/passwd", Content_Length="0", body=b""),
    "a redirect to itself": answer("302 Found", Location="/x.safetensors", Content_Length="0", body=b""),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_an_error(case: str, cache: Path) -> None:
    """Of a download, and of what is read of headers alone."""
    with server(WRONG[case]) as url:
        for read in (["inspect", url], ["inspect", url.replace("safetensors", "gguf")], ["verify", url]):
            result = command(*read)
            assert result.exit_code in (1, 2) and "rror: " in result.stderr and "\x1b" not in result.stderr, result.output
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 1 << 12


@pytest.mark.parametrize("start", [CHUNKED, answer(body=b""), CHUNKED + b"3\r\nabc\r\n0\r\n"],
                         ids=["chunks", "no length", "trailers"])
def test_a_body_without_an_end_is_not_read(start: bytes, cache: Path) -> None:
    endless = {CHUNKED: b"100000\r\n" + bytes(1 << 20) + b"\r\n"}.get(start, b"x: y\r\n" * (1 << 16))
    with server(start, endless) as url:
        for read in (local_path, lambda url: local_headers(url).__enter__()):
            with pytest.raises(CheckpointError, match="does not say how long the file is"):
                read(url)
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 1 << 12


def test_a_file_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with server(answer(Content_Length=SIZE)) as url, pytest.raises(CheckpointError, match="has less room"):
        local_path(url)


def test_ranges_of_many_layers_have_a_limit() -> None:
    start, _ = plan_header("x", {"a.luts": ("U8", (1 << 34,))})
    size = len(start) + (1 << 34)
    with server(answer("206 Partial Content", Content_Range=f"bytes 0-7/{size}", Content_Length="8", body=start[:8])) as url, \
            pytest.raises(CheckpointError):
        local_headers(url).__enter__()


@pytest.mark.parametrize("tag", ['"a\r\n b"', '"\x1b"', "W/\"weak\"", '"' + "x" * 5000 + '"', "bare"])
def test_a_tag_that_cannot_be_sent_back_is_not_kept(tag: str, tmp_path: Path) -> None:
    with server(answer(Content_Length=SIZE, ETag=tag)) as url:
        for _ in range(2):
            assert local_path(url).read_bytes() == DATA


@pytest.mark.parametrize("is_same", [True, False])
def test_a_download_that_was_killed_after_its_last_byte(is_same: bool, cache: Path) -> None:
    """The server has no bytes behind it: it is complete, or of another file."""
    size = SIZE if is_same else "7"
    with server(answer("416 Range Not Satisfiable", Content_Range=f"bytes */{size}", Content_Length="0", body=b"")) as url:
        folder = cache / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:24]
        folder.mkdir(parents=True)
        (folder / "x.safetensors.part").write_bytes(DATA)
        (folder / "x.safetensors.etag").write_text('"1"')
        if is_same:
            assert local_path(url).read_bytes() == DATA
        else:
            with pytest.raises(CheckpointError, match="416"):     # asked anew, without a range
                local_path(url)
            assert not (folder / "x.safetensors").exists() and not (folder / "x.safetensors.part").exists()
