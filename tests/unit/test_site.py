"""`make docs`: what mkdocs reads is complete, and pictures follow the theme."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from qdsl.compiler.emit.show import picture
from tests.support.paths import ROOT

LINK = re.compile(r"\]\(([^)#:\s]+)[)#]")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, with the pictures of three formats."""
    names: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site.py"))
    out = tmp_path_factory.mktemp("docs")
    shipped = [ROOT / "specs" / f"{name}.yaml" for name in ("q4_0", "int4pack", "hlane")]
    names["main"].__globals__.update(OUT=out, shipped=lambda: shipped)
    names["main"]()
    return out


def test_public_modules_list_their_names() -> None:
    """The reference shows what `__all__` has; of a module without it also what is imported and private."""
    modules = runpy.run_path(str(ROOT / "docs" / "site.py"))["MODULES"]
    files = [origin for name in modules if (spec := find_spec(name)) and (origin := spec.origin)]
    assert len(files) == len(modules) > 4
    assert [name for name in files if not re.search(r"^__all__ = ", Path(name).read_text(), re.MULTILINE)] == []


def test_links_lead_to_files(site: Path) -> None:
    pages = sorted(site.rglob("*.md"))
    broken = {f"{page.relative_to(site)}: {link}" for page in pages for link in LINK.findall(page.read_text())
              if "files" not in page.relative_to(site).parts and not (page.parent / link).exists()
              and not (link.startswith("formats/") and (ROOT / "specs" / f"{Path(link).stem}.yaml").is_file())}
    assert len(pages) > 30 and broken == set()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """Or below a folder that mkdocs.yml leaves out of it."""
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(site)) for page in site.rglob("*.md")}
    assert listed <= pages
    assert {page for page in pages - listed if not page.startswith(("formats/", "files/"))} == set()


def test_pictures_are_light_and_dark(site: Path) -> None:
    for name, storages in {"q4_0": 2, "int4pack": 6, "hlane": 1}.items():
        drawings = re.findall(r"<svg.*?</svg>", (site / "formats" / f"{name}.md").read_text(), re.DOTALL)
        assert len(drawings) >= storages, name
        for drawing in drawings:
            assert "prefers-color-scheme:dark" in drawing and "[data-md-color-scheme=slate]" in drawing
            assert "\n\n" not in drawing                         # an empty line ends HTML in Markdown
            assert {*re.findall(r'(?:fill|stroke)="(#\w+)"', drawing)} <= {*picture.COLOURS}    # paper and ink are the theme's


def test_the_site_needs_no_server_and_no_other_site(site: Path) -> None:
    """Search in pages that are opened from files needs a worker without a server, which the theme would load from elsewhere."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "offline:" in config and "polyfills: [iframe-worker.js]" in config and "font: false" in config
    assert "IFrameWorker" in (site / "iframe-worker.js").read_text()
    assert (site / "extra.css").is_file() and (site / "search.js").is_file()
    assert (ROOT / "NOTICE").read_text().count("docs/iframe-worker.js") == 1


def test_a_format_page_says_where_bits_lie_and_who_reads_them(site: Path) -> None:
    text = (site / "formats" / "q4_0.md").read_text()
    assert "weight[n, k] = d * (q - 8)" in text and "right end is bit 0" in text
    assert "| `gguf` | llama.cpp and what is built on it |" in text and "21.1 dB at 4.50 bits" in text
    assert "by itself 13.93: 16.36 at 4.50 bits" in text
    assert "byte, bit</text>" in text and text.count("<svg") == 6
