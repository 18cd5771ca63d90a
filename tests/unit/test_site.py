"""`make docs`: what mkdocs reads is complete, and pictures follow the theme."""

from __future__ import annotations

import re
import runpy
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
