"""Write build/docs, what mkdocs makes the site of: the pages, the files that they link to, a page for each format, and the
reference of Python's names.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from docs import format_pages
from qdsl.core.places import shipped

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[#)])")
# A README is the page of its folder to mkdocs, so that of docs/ has another name.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md",
         "SECURITY.md": "SECURITY.md", "docs/README.md": "documentation.md"}


def place(path: Path) -> Path:
    """Where a file of the repository lies in the site: pages as they are in docs, others as text under files."""
    inside = path.relative_to(ROOT)
    if str(inside) in PAGES:
        return Path(PAGES[str(inside)])
    if inside.parts[0] == "docs":
        return Path(*inside.parts[1:])
    return Path("files", f"{inside}.txt")


def write_page(source: Path) -> None:
    """A page with its links as they are in the site; files that it links to are copied."""
    target = OUT / place(source)

    def moved(match: re.Match[str]) -> str:
        linked = (source.parent / match[1]).resolve()
        if linked.parent == ROOT / "specs" and source.name == "formats.md" and linked.suffix == ".yaml":
            write_copy(linked)
            return f"formats/{linked.stem}.md"
        if linked.is_dir() or not linked.exists():
            return os.path.relpath(OUT / "formats.md", target.parent)                       # the folder of specs
        copy = OUT / place(linked)
        if linked.suffix != ".md" or place(linked).parts[0] == "files":
            write_copy(linked)
        return os.path.relpath(copy, target.parent)

    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(LINK.sub(moved, PLOT.sub(_inline, source.read_text())))


def _inline(match: re.Match[str]) -> str:
    """A figure itself in place of an image, so that it follows the theme of the site."""
    return f"\n<div class=\"plot\" data-search-exclude>{(ROOT / 'docs' / 'plots' / f'{match[2]}.svg').read_text().strip()}</div>"


def write_copy(path: Path) -> None:
    """Copy a file that is no page, as text."""
    copy = OUT / place(path)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)


PLOT = re.compile(r"!\[([^\]]*)\]\((?:docs/)?plots/(\w+)\.svg\)")
# Public modules, whose pages mkdocstrings writes from docstrings, without importing them.
MODULES = ("qdsl", "qdsl.models.transformers", "qdsl.models.diffusers", "qdsl.models.peft", "qdsl.kv_cache", "qdsl.analyze")
# Classes that `qdsl` has by another name than the module that they lie in.
CLASSES = ("qdsl.runtime.Format", "qdsl.models.experts.Experts", "qdsl.checkpoint.files.gguf.GgufFile",
           "qdsl.checkpoint.files.gguf_write.NewTensor", "qdsl.models.load_report.LoadReport", "qdsl.models.save.SaveReport")


def write_reference() -> None:
    """A page for each public module, and one for classes."""
    (OUT / "api").mkdir(parents=True)
    for module in MODULES:
        options = "" if module == "qdsl" else "    options: {members: true}\n"
        (OUT / "api" / f"{module}.md").write_text(f"# {module}\n\n::: {module}\n{options}")
    text = "\n\n".join(f"::: {name}\n    options: {{show_root_heading: true}}" for name in CLASSES)
    (OUT / "api" / "classes.md").write_text(f"# Classes\n\n{text}\n")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    for source in {*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")}:
        write_page(source)
    (OUT / "formats").mkdir()
    for path in shipped():
        format_pages.write(path, OUT / "formats")
    write_reference()
    for name in ("extra.css", "iframe-worker.js", "search.js"):
        shutil.copyfile(ROOT / "docs" / name, OUT / name)


if __name__ == "__main__":
    main()
