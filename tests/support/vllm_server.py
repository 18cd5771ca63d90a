"""`vllm serve` on a CPU, as a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.support.paths import ROOT


def write_metadata(folder: Path, name: str, number: str, entry_points: str = "") -> None:
    """Write the metadata of a package, which processes find with the folder in PYTHONPATH."""
    metadata = folder / f"{name}-{number}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def environment(packages: Path) -> dict[str, str]:
    """Variables for vLLM's processes: one thread of any core, and metadata of packages in a folder."""
    path = os.pathsep.join(filter(None, (str(packages), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path}


@contextmanager
def serving(model: Path, options: Sequence[str], packages: Path) -> Iterator[str]:
    """The address of a server that has started.  packages: a folder for metadata."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    number = f"{version('vllm-cpu')}+cpu"                        # the command asks for that of a package called vllm
    write_metadata(packages, "vllm", number)
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *options, "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=environment(packages)) as server:
        try:
            lines = []
            while not lines or "startup complete" not in lines[-1]:
                lines.append(str(server.stdout and server.stdout.readline()))
                assert lines[-1], "".join(lines[-20:])
            for _ in range(100):                                 # it says so before it listens
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def post(url: str, body: Mapping[str, Any]) -> Any:
    """The JSON with which a server answers."""
    with urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=100) as response:
        return json.load(response)
