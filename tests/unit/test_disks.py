"""Jobs on disks that are full, read-only or broken: an error in words, exit code 1, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdsl.jobs.engine import stage
from tests.support.jobs import JOBS, command, files, job_inputs, succeed
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="disks of Linux")
SIZE = 8 << 20                                                   # bytes of the disk
LEFT = 12 << 10                                                  # bytes of it that are free when it is full

# read() fails for files in $BROKEN: beyond their first 16 KiB, and everywhere in a tokenizer.
BROKEN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t read(int file, void *data, size_t count) {
    static ssize_t (*own)(int, void *, size_t);
    char link[64], path[4096];
    const char *folder = getenv("BROKEN");
    if (!own) own = dlsym(RTLD_NEXT, "read");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = folder ? readlink(link, path, sizeof path - 1) : -1;
    if (length > 0) {
        path[length] = 0;
        off_t place = lseek(file, 0, SEEK_CUR);
        if (!strncmp(path, folder, strlen(folder)) && (strstr(path, "tokenizer.json") || place > 16384)) {
            errno = EIO;
            return -1;
        }
    }
    return own(file, data, count);
}
"""
RUN = """import json, sys
from tests.support.jobs import command
results = [command(*arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stderr] for result in results]))"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk of its own."""
    path = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root mounts disks")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def prepared(job: str, inputs: Path, folder: Path) -> list[str]:
    """The arguments of a job that writes into a folder, when what it follows is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    arguments, name = JOBS[job]
    writing = [*arguments.format(inputs).split(), "-o", str(folder / name)]
    if job == "merge-index":
        succeed(*writing)
        return ["merge-index", str(folder / name)]
    return writing


def shown(path: Path) -> list[str]:
    """The files below a folder, other than those of unfinished work."""
    return [name for name in files(path) if name != "out" and not name.startswith(f"out/{stage.STAGE}")]


@pytest.mark.parametrize("job", JOBS)
def test_a_full_disk(job: str, inputs: Path, disk: Path) -> None:
    """When there is room, the same command succeeds."""
    arguments = prepared(job, inputs, disk / "work")
    filler = disk / "filler"
    with open(filler, "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free - (LEFT if job != "merge-index" else 0)))
    result = command(*arguments)
    filler.unlink()
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {disk}/work/out") and \
        "No space left on device" in result.stderr
    assert not shown(disk / "work") and not any(name.endswith(".part") for name in files(disk / "work"))
    succeed(*arguments)
    assert shown(disk / "work")


@pytest.mark.parametrize("job", ["convert", "quantize", "merge-index"])
def test_a_limit_on_the_size_of_files(job: str, inputs: Path, tmp_path: Path) -> None:
    """As a full disk, for users who cannot mount one."""
    arguments = prepared(job, inputs, tmp_path / "work")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT if job != "merge-index" else 1, limits[1]))
    try:
        result = command(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {tmp_path}/work/out") and \
        "File too large" in result.stderr
    assert not shown(tmp_path / "work")
    succeed(*arguments)


@pytest.mark.parametrize("job", JOBS)
def test_a_read_only_disk(job: str, inputs: Path, disk: Path) -> None:
    arguments = prepared(job, inputs, disk / "work")
    before = files(disk)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    result = command(*arguments)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {disk}/") and \
        "Read-only file system" in result.stderr
    assert files(disk) == before


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_disk_whose_reads_fail(inputs: Path, tmp_path: Path) -> None:
    """In the middle of a tensor or, as merge-index reads none, in another file that it copies."""
    (tmp_path / "broken.c").write_text(BROKEN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "broken.so", tmp_path / "broken.c", "-ldl"], check=True)
    jobs = {job: prepared(job, inputs, tmp_path / job) for job in JOBS}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(tmp_path / "broken.so"), "BROKEN": str(inputs)}
    run = subprocess.run([sys.executable, "-c", RUN, json.dumps(list(jobs.values()))], env=environment, capture_output=True,
                         check=True)
    for job, (code, message) in zip(jobs, json.loads(run.stdout), strict=True):
        assert code == 1 and message.startswith(f"error: {inputs}/") and "Input/output error" in message, (job, message)
        assert not shown(tmp_path / job) and not any(name.endswith(".part") for name in files(tmp_path / job)), job
