"""References to checkpoints on this machine, on servers and in repositories; a server on this machine stands for the network."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files import download as downloads
from qdsl.checkpoint.files import references
from qdsl.checkpoint.files.references import (
    Repository,
    Url,
    available,
    gguf_files_of_quant,
    local_headers,
    local_path,
    parse_reference,
)
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.checkpoint.report.contents import contents
from qdsl.cli import app
from qdsl.generated import fp8_block, int_group
from qdsl.jobs.compress import run
from qdsl.jobs.compress.units import Compression
from tests.support import folders, ggufs
from tests.support.http_server import Server, serve

NAMES = ["Llama-Q4_K_M.gguf", "Llama-Q4_K_S.gguf", "Llama-IQ4_XS.gguf", "llama.q8_0.gguf", "mmproj-Q8_0.gguf",
         "BF16/Llama-BF16.gguf", "Q6_K/Llama-Q6_K-00001-of-00002.gguf", "Q6_K/Llama-Q6_K-00002-of-00002.gguf",
         "Llama-UD-Q2_K.gguf", "Llama-Q2_K.gguf", "Q5_0-00001-of-00003.gguf"]
GGUF = ggufs.framed([ggufs.info(b"a.weight", (32, 4))], [ggufs.pair(b"general.architecture", "string", b"toy")], bytes(512))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a folder of files and a hub; caches of its own."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    with serve(Server()) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", running.url, raising=False)
        yield running


def gptq(path: Path) -> Path:
    """A folder with layers of which the first words of large tensors tell how they were quantized."""
    shards = []
    for name in ("model.up", "model.down"):
        weight = int_group.quantize(torch.randn(256, 512), "gptq_v2", bits=4, group=32)
        shards.append(folders.named({name: weight}))
    return folders.folder(path, *shards)


@pytest.mark.parametrize(("quant", "names"), [
    ("Q4_K_M", ["Llama-Q4_K_M.gguf"]), ("q4_k_m", ["Llama-Q4_K_M.gguf"]), ("IQ4_XS", ["Llama-IQ4_XS.gguf"]),
    ("Q8_0", ["llama.q8_0.gguf"]), ("BF16", ["BF16/Llama-BF16.gguf"]), ("UD-Q2_K", ["Llama-UD-Q2_K.gguf"]),
    ("Q6_K", ["Q6_K/Llama-Q6_K-00001-of-00002.gguf", "Q6_K/Llama-Q6_K-00002-of-00002.gguf"])])
def test_a_quantization_is_a_whole_part_of_a_name(quant: str, names: list[str]) -> None:
    assert gguf_files_of_quant(NAMES[::-1], quant, "ref") == names


@pytest.mark.parametrize(("quant", "message"), [
    ("Q4_K", "'ref' has no GGUF file of Q4_K; it has 'Llama-Q4_K_M.gguf', 'Llama-Q4_K_S.gguf'"), ("K_M", "no GGUF file of K_M"),
    ("4_XS", "no GGUF file of 4_XS"), (".*", "no GGUF file of "), ("Q5_0", "'ref' has 1 of 3 parts"),
    ("Q2_K", "'ref' names several files: 'Llama-UD-Q2_K.gguf', 'Llama-Q2_K.gguf'; name one of them")])
def test_what_no_single_file_fits_is_refused(quant: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf_files_of_quant(NAMES, quant, "ref")
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "meaning"), [
    ("Qwen/Qwen3-8B", Repository("Qwen/Qwen3-8B")), ("Qwen/Qwen3-8B@v1.0", Repository("Qwen/Qwen3-8B", "v1.0")),
    ("unsloth/Q-GGUF:Q4_K_M", Repository("unsloth/Q-GGUF", None, None, "Q4_K_M")),
    ("unsloth/Q-GGUF@main/BF16/q.gguf", Repository("unsloth/Q-GGUF", "main", "BF16/q.gguf")),
    ("https://huggingface.co/a/b/resolve/main/x/y.gguf?download=true", Repository("a/b", "main", "x/y.gguf")),
    ("https://huggingface.co/a/b/tree/main", Repository("a/b", "main")), ("https://huggingface.co/a/b", Repository("a/b")),
    ("https://example.org/a/b/resolve/main/x.gguf", Url("https://example.org/a/b/resolve/main/x.gguf")),
    ("models/missing.gguf", Path("models/missing.gguf")), ("./a/b", Path("a/b")), ("/a/b/c", Path("/a/b/c")),
    ("missing", Path("missing")), ("a/b/../../c:d:e", Path("a/b/../../c:d:e"))])
def test_what_references_mean(text: str, meaning: Repository | Url | Path) -> None:
    assert parse_reference(text) == meaning


def test_files_on_this_machine_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.chdir(tmp_path)
    gptq(tmp_path / "owner" / "name")
    (tmp_path / "owner" / "toy-Q4_0.gguf").write_bytes(GGUF)
    assert local_path("owner/name") == Path("owner/name")
    assert local_path("owner:Q4_0") == Path("owner/toy-Q4_0.gguf") and server.log == []
    with pytest.raises(CheckpointError, match=r"'owner:Q8_0' has no GGUF file of Q8_0; it has 'toy-Q4_0\.gguf'"):
        local_path("owner:Q8_0")


def test_a_url_is_downloaded_once(server: Server) -> None:
    """Redirects are followed, what the server still has is not sent again, and without it the file in the cache serves."""
    server.files["/x/toy model.gguf"] = GGUF
    server.redirects["/toy%20model.gguf".replace("%20", " ")] = f"{server.url}/x/toy%20model.gguf"
    url = f"{server.url}/toy%20model.gguf"
    path = local_path(url)
    assert path.read_bytes() == GGUF and path.name == "toy model.gguf" and path == local_path(url)
    assert server.log[-1][2]["If-None-Match"]
    changed = GGUF[:-1] + b"\1"
    server.files["/x/toy model.gguf"] = changed
    assert local_path(url).read_bytes() == changed
    del server.redirects["/toy model.gguf"]
    with pytest.raises(CheckpointError, match="the server says 404 'Not Found'"):
        local_path(url)


def test_a_file_in_the_cache_serves_without_a_network(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/toy.gguf"] = GGUF
    path = local_path(f"{server.url}/toy.gguf")
    monkeypatch.setattr(downloads, "TIMEOUT", 0.001)
    monkeypatch.setattr(downloads, "_OPENER", Refusing())
    assert local_path(f"{server.url}/toy.gguf") == path
    with pytest.raises(CheckpointError, match=r"other\.gguf': no network"):
        local_path(f"{server.url}/other.gguf")


class Refusing:
    """Opens nothing."""

    def open(self, *_: object, **__: object) -> None:
        raise OSError("no network")


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_download_that_ends_early_is_resumed(server: Server, tmp_path: Path, is_changed: bool) -> None:
    """From where it ended, if the file is still the same; else from its beginning."""
    server.files["/toy.gguf"], server.short["/toy.gguf"] = GGUF, 100
    with pytest.raises(CheckpointError, match="run again to resume"):
        local_path(f"{server.url}/toy.gguf")
    assert not list((tmp_path / "cache").rglob("toy.gguf"))
    server.short.clear()
    if is_changed:
        server.files["/toy.gguf"] = GGUF + bytes(32)
    assert local_path(f"{server.url}/toy.gguf").read_bytes() == server.files["/toy.gguf"]
    assert server.sent("/toy.gguf") == ["", "bytes=100-"]
    assert [path.name for path in sorted((tmp_path / "cache" / "downloads").rglob("toy*"))] == ["toy.gguf", "toy.gguf.etag"]


def test_all_parts_of_a_split_url(server: Server) -> None:
    names = [f"toy-{part:05d}-of-00002.gguf" for part in (1, 2)]
    server.files = {f"/{name}": GGUF for name in names}
    path = local_path(f"{server.url}/{names[0]}?key=1")
    assert path.name == names[0] and [headers for _, _, headers in server.log]
    assert [asked for _, asked, _ in server.log] == [f"/{name}" for name in names]


@pytest.mark.parametrize(("path", "message"), [("/x.bin", "the name of a file ends with .gguf or .safetensors"),
                                               ("/x%5C.gguf", "the name of a file"), ("/missing.gguf", "the server says 404")])
def test_urls_that_are_no_files(server: Server, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        local_path(server.url + path)


def test_a_token_stays_with_its_host(server: Server) -> None:
    """A redirect to another server, as from the hub to its storage, does not carry it; one to a file system is refused."""
    with serve(Server({"/toy.gguf": GGUF})) as other:
        server.redirects = {"/here.gguf": f"{other.url}/toy.gguf", "/disk.gguf": "file:///etc/passwd"}
        server.files["/toy.gguf"] = GGUF
        data, size = downloads.read_range(f"{server.url}/here.gguf", 0, 4, {"Authorization": "Bearer secret"})
        assert (data, size) == (b"GGUF", len(GGUF)) and server.log[0][2]["Authorization"] == "Bearer secret"
        assert "Authorization" not in other.log[0][2] and other.log[0][2]["Range"] == "bytes=0-3"
        with pytest.raises(CheckpointError, match="Redirection to url"):
            downloads.read_range(f"{server.url}/disk.gguf", 0, 4, {})


# Repositories


def test_repositories(server: Server, tmp_path: Path) -> None:
    """A folder with what a model needs, a file of it, GGUF files by their quantization; then the cache alone serves."""
    plain = folders.files(gptq(tmp_path / "plain"))
    server.add_repository("toy/plain", {**plain, "pytorch_model.bin": b"PK", "a-Q8_0.gguf": GGUF})
    server.add_repository("toy/ggufs", dict.fromkeys(NAMES, GGUF))
    folder = local_path("toy/plain")
    assert folders.files(folder).keys() == plain.keys() - {"pytorch_model.bin"}
    with qdsl.open("toy/plain") as checkpoint:
        assert checkpoint.layers.keys() == {"model.up", "model.down"}
    linears = nn.ModuleDict({name: nn.Linear(512, 256, bias=False) for name in ("up", "down")})
    model = nn.ModuleDict({"model": linears})
    assert len(qdsl.load_weights_(model, "toy/plain").packed) == 2
    assert local_path("toy/ggufs:q4_k_m").name == "Llama-Q4_K_M.gguf"
    first = local_path("toy/ggufs:Q6_K")
    assert first.name == "Llama-Q6_K-00001-of-00002.gguf" and len(list(first.parent.iterdir())) == 2
    assert local_path(f"{server.url}/toy/ggufs/blob/main/BF16/Llama-BF16.gguf").name == "Llama-BF16.gguf"
    for ref, message in (("toy/ggufs", "names several files"), ("toy/ggufs:Q3_K", "no GGUF file of Q3_K"),
                         ("toy/missing", "no file or folder 'toy/missing', and the hub says: 404"),
                         ("toy/ggufs/other.gguf", "'toy/ggufs/other.gguf' is not in the repository, which has ")):
        with pytest.raises(CheckpointError) as caught:
            local_path(ref)
        assert message in str(caught.value)


def test_a_prepared_cache_serves_offline(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add_repository("toy/plain", folders.files(gptq(tmp_path / "plain")))
    folder = local_path("toy/plain")
    server.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path("toy/plain") == folder and server.log == []
    with local_headers("toy/plain") as path:
        assert path == folder
    with pytest.raises(CheckpointError, match="no file or folder 'toy/other', and the hub says: "):
        local_path("toy/other")


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub refuses connections."""
    monkeypatch.setattr(references, "getproxies", dict)
    monkeypatch.setattr(references, "_endpoint", lambda: "http://127.0.0.1:9")


def test_what_was_downloaded_serves_while_the_hub_cannot_be_reached(server: Server, request: pytest.FixtureRequest) -> None:
    """Without HF_HUB_OFFLINE, too, for a model that was not downloaded there is a sentence."""
    server.add_repository("toy/plain", folders.files(gptq(Path(constants.HF_HUB_CACHE).with_name("plain"))))
    folder = local_path("toy/plain")
    assert available("toy/plain") == "toy/plain"
    server.log.clear()
    request.getfixturevalue("cut_off")
    assert local_path("toy/plain") == available("toy/plain") == available("toy/plain", revision="main") == folder
    assert references.has_file("toy/plain", "config.json") and not references.has_file("toy/plain", "model_index.json")
    with local_headers("toy/plain") as path:
        assert path == folder
    assert server.log == []
    for read in (local_path, available, lambda ref: references.has_file(ref, "config.json")):
        with pytest.raises(CheckpointError, match=r"no file or folder 'toy/other', and 127\.0\.0\.1, .* cannot be reached: Conn"):
            read("toy/other")


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, cut_off: None) -> None:
    """Each of its addresses might take that long; all together may not."""
    monkeypatch.setattr(references, "CONNECT", 0.1)
    is_over = threading.Event()

    def waiting(*_: object) -> None:
        is_over.wait()
        raise OSError

    monkeypatch.setattr(references.socket, "create_connection", waiting)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be reached: no answer within"):
        local_path("toy/plain")
    assert time.monotonic() - began < 3
    is_over.set()


@pytest.mark.parametrize(("ref", "message"), [
    ("gpt3", "'gpt3', and 127.0.0.1, where it might be a repository, cannot"), ("./nope", "'./nope'"),
    ("two words", "'two words'"), (r"C:\models\qwen", "qwen'"), ("models/qwen.gguf", "'models/qwen.gguf'"), ("a/b/c/d", "c/d'")])
def test_libraries_are_not_asked_for_what_is_not_there(cut_off: None, ref: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        available(ref)
    assert message in str(caught.value)


# Headers alone


@pytest.mark.parametrize("where", ["url", "repository"])
@pytest.mark.parametrize("ranges", [True, False])
def test_inspect_reads_headers_alone(server: Server, tmp_path: Path, where: str, ranges: bool) -> None:
    """It says the same of a remote checkpoint as of a local one."""
    server.ranges = ranges
    pairs = [ggufs.pair(f"key.{number}".encode(), "string", b"x" * 1000) for number in range(2000)]
    large = ggufs.framed([ggufs.info(b"a.weight", (1 << 18, 64))], pairs, bytes(1 << 26))
    server.files["/toy.gguf"] = large
    server.add_repository("toy/ggufs", {"toy-F32.gguf": large})
    (tmp_path / "toy.gguf").write_bytes(large)
    ref = f"{server.url}/toy.gguf" if where == "url" else "toy/ggufs:F32"
    result = CliRunner().invoke(app, ["inspect", ref, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"schema": 1, **contents(tmp_path / "toy.gguf"), "file": ref}
    if ranges:
        [path] = {asked for _, asked, headers in server.log if "Range" in headers}
        assert server.sent(path) == ["bytes=0-1048575", "bytes=0-4194303"]


def test_inspect_reads_what_tells_formats(server: Server, tmp_path: Path) -> None:
    """The headers of all files of a folder, its settings, and the beginnings of integers; no more."""
    path = gptq(tmp_path / "plain")
    weight = fp8_block.quantize(torch.randn(2048, 2048))
    large = folders.folder(tmp_path / "large", folders.named({"up": weight}), config={"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}})
    blocks = {"a.weight": torch.randn(512, 4096).bfloat16(), "b.weight": torch.randn(512, 4096).bfloat16()}
    run.compress(folders.folder(tmp_path / "blocks", blocks, config={}), Compression("df11"), tmp_path / "df11")
    for local in (path, tmp_path / "df11", large):
        server.log.clear()
        server.add_repository(f"toy/{local.name}", folders.files(local))
        with local_headers(f"toy/{local.name}") as headers:
            listing = contents(headers)
            assert not list(headers.glob("*.bin"))
        wanted = contents(local)
        assert listing.pop("file") != wanted.pop("file") and listing == wanted
    assert sum(path.stat().st_size for path in large.glob("*.safetensors")) > 1 << 22
    asked = [headers["Range"].removeprefix("bytes=").split("-") for _, _, headers in server.log if "Range" in headers]
    assert sum(int(last) - int(first) + 1 for first, last in asked) < 1 << 16


@pytest.mark.parametrize(("data", "message"), [
    (b"PK" * 100, "not how a GGUF file begins"), (GGUF[:30], "x.gguf: byte 8: 1 tensors take 24 bytes each at least"), (b"", "")])
def test_remote_files_that_are_no_checkpoints(server: Server, data: bytes, message: str) -> None:
    server.files["/x.gguf"] = data
    result = CliRunner().invoke(app, ["inspect", f"{server.url}/x.gguf"])
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and message in result.stderr


def test_a_short_answer_is_no_header(server: Server) -> None:
    server.files["/x.gguf"], server.short["/x.gguf"] = GGUF, 40
    with pytest.raises(CheckpointError), local_headers(f"{server.url}/x.gguf"):
        pass
    server.files["/x.safetensors"] = (1 << 40).to_bytes(8, "little") + bytes(100)
    with pytest.raises(CheckpointError, match="header of 1099511627776 bytes is over the limit of 108"), \
            local_headers(f"{server.url}/x.safetensors"):
        pass


def test_commands_take_references(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server.add_repository("toy/plain", folders.files(gptq(tmp_path / "plain")))
    server.files["/toy.gguf"] = GGUF
    invoke = CliRunner().invoke
    assert invoke(app, ["verify", "toy/plain", "plain"]).exit_code == 0
    assert invoke(app, ["dequantize", f"{server.url}/toy.gguf", "--out", "out.safetensors"]).exit_code == 0
    converted = invoke(app, ["convert", "toy/plain", "--to", "awq", "--out", "out"])
    assert converted.exit_code == 0 and os.path.isdir("out"), converted.output
    missing = invoke(app, ["convert", "toy/missing", "--to", "gptq", "--out", "other"])
    assert missing.exit_code == 1 and missing.stderr.startswith("error: no file or folder 'toy/missing', and the hub says: 404")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    readers = (local_path, lambda ref: references.has_file(ref, "config.json"), lambda ref: local_headers(ref).__enter__())
    for read in readers:
        with pytest.raises(CheckpointError, match="no file or folder 'toy/plain'; `pip install huggingface_hub` to download"):
            read("toy/plain")
    assert references.parse_reference("https://huggingface.co/a/b") == Repository("a/b")


def test_what_is_not_there_gets_similar_names_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the hub cannot be reached, whose client would try for half a minute."""
    monkeypatch.chdir(tmp_path)
    Path("models/qwen").mkdir(parents=True)
    monkeypatch.setattr(references, "getproxies", dict)
    monkeypatch.setattr(references, "_endpoint", lambda: "http://127.0.0.1:9")
    missing = CliRunner().invoke(app, ["inspect", "./models/qwenn"])
    assert missing.exit_code == 1 and "models/qwenn: No such file or directory; did you mean models/qwen?" in missing.stderr
    with pytest.raises(CheckpointError, match=r"no file or folder 'models/qwn'; did you mean models/qwen\?.*cannot be reached"):
        local_path("models/qwn")
