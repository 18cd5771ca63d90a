"""Write build/docs, what mkdocs makes the site of: the pages, the files that they link to, and a picture page for each format."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from qdsl.compiler.emit.show import page, picture
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import load
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
        if linked.is_dir() or not linked.exists():
            return os.path.relpath(OUT / "pictures.md", target.parent)                       # the folder of specs
        copy = OUT / place(linked)
        if linked.suffix != ".md" or place(linked).parts[0] == "files":
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, copy)
        return os.path.relpath(copy, target.parent)

    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(LINK.sub(moved, source.read_text()))


def write_pictures() -> None:
    """The bit layouts of every format, a picture for each storage, inline so that they follow the theme of the site."""
    (OUT / "pictures").mkdir(parents=True)
    about = "Where every bit of a format lies, at the default parameters, as `qdsl show FORMAT --svg FILE` draws it."
    lines = ["# Pictures", "", about, ""]
    for path in shipped():
        programs = page.distinct(compile_spec(load(path)))
        storages = dict.fromkeys(program.storage for program in programs)
        text = [f"# {path.stem}", "", programs[0].spec.title, ""]
        for storage in storages:
            drawing = picture.svg([program for program in programs if program.storage == storage][:1])
            text += [f"## {storage}", "", f"<div>{drawing.strip()}</div>", ""]
        (OUT / "pictures" / f"{path.stem}.md").write_text("\n".join(text))
        lines.append(f"- [{path.stem}](pictures/{path.stem}.md): {programs[0].spec.title}")
    (OUT / "pictures.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    for source in {*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")}:
        write_page(source)
    write_pictures()


if __name__ == "__main__":
    main()
