"""Renders the templates of generated code: whole lines, with holes for what the compiler prints."""

from __future__ import annotations

from functools import cache

import jinja2


@cache
def _environment() -> jinja2.Environment:
    """A jinja environment with only this package's templates, in which a name without a value is an error."""
    loader = jinja2.PackageLoader("qdsl.compiler.emit.triton", "skeletons")
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              keep_trailing_newline=True, autoescape=False)


def render(skeleton: str, **holes: object) -> list[str]:
    """The lines of a template with its holes filled."""
    text = _environment().get_template(f"{skeleton}.py.jinja").render(**holes)
    return [line.rstrip() for line in text.strip("\n").split("\n")]
