"""An HTTP server of one process that gives the files of a dictionary, and a hub of model repositories made of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789" * 4


@dataclass
class Server:
    """files: bytes by their paths.  redirects: paths that lead to other URLs.  short: paths whose answers end too early.

    log: the method, the path and the headers of each request.  ranges: whether ranges are given.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    log: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def sent(self, path: str) -> list[str]:
        """The ranges that were asked for of a path, '' for the whole of it."""
        return [headers.get("Range", "") for method, asked, headers in self.log if asked == path and method == "GET"]

    def add_repository(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        """A repository as the hub gives it."""
        api = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0,
                          "siblings": [{"rfilename": path} for path in files]}).encode()
        tree = json.dumps([{"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                           for path, data in files.items()]).encode()
        for ref in (revision, COMMIT):
            self.files[f"/api/models/{name}/revision/{ref}"] = api
            self.files[f"/api/models/{name}/tree/{ref}"] = tree
            self.files |= {f"/{name}/resolve/{ref}/{path}": data for path, data in files.items()}
        self.files[f"/api/models/{name}"] = api


@contextmanager
def serve(server: Server) -> Iterator[Server]:
    """The server on a free port of this machine, with its URL set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            server.log.append((self.command, path, dict(self.headers.items())))
            if path in server.redirects:
                self._head(302, 0, {"Location": server.redirects[path]})
            elif path not in server.files:
                self._head(404, 0, {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"})
            else:
                self._give(server.files[path], path)

        def _give(self, data: bytes, path: str) -> None:
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            more = {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes" if server.ranges else "none"}
            wanted = self.headers.get("Range", "").removeprefix("bytes=")
            if self.headers.get("If-None-Match") == tag:
                self._head(304, 0, more)
                return
            status, start, stop = 200, 0, len(data)
            if wanted and server.ranges and self.headers.get("If-Range", tag) == tag:
                first, _, last = wanted.partition("-")
                status, start, stop = 206, int(first), min(len(data), int(last) + 1 if last else len(data))
                more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self._head(status, stop - start, more)
            if self.command == "GET":
                self.wfile.write(data[start:stop][:server.short.get(path)])
                self.close_connection = self.close_connection or path in server.short

        def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(length)}.items():
                self.send_header(name, text)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_port}"
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            listening.shutdown()
