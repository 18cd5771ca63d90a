"""A process that renders one chat template: JSON from standard input to standard output.  Imports nothing of qdsl, no torch.

Templates of files are programs.  They run in Jinja's immutable sandbox, with limits of processor time, memory and output, and
cannot write files.  The names that templates may use, and what they do, are those of transformers.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

CPU_SECONDS = 2
MEMORY = 512 << 20
OUTPUT = 8 << 20                                                 # characters
RECURSION = 400                                                  # of macros and nested expressions


def main() -> None:
    """Render the template of the request; the answer is {"text": ...} or {"error": ...}."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    import jinja2.ext
    import jinja2.sandbox

    _set_limits()
    try:
        answer = {"text": _render(jinja2, request["template"], request["variables"])}
    except MemoryError:
        answer = {"error": f"needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "is nested too deeply"}
    except Exception as error:                                   # of many kinds: a template may divide by zero
        answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    json.dump(answer, sys.stdout)


def _set_limits() -> None:
    """Limit this process, where the system can."""
    sys.setrecursionlimit(RECURSION)
    with suppress(ImportError, ValueError, OSError):
        import resource

        for kind, limit in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_FSIZE, OUTPUT * 6), (resource.RLIMIT_AS, MEMORY),
                            (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (limit, limit))


def _render(jinja2: Any, template: str, variables: dict[str, Any]) -> str:
    """The text of a template.  Raises ValueError where it is too long, and what the template raises."""
    pieces, length = [], 0
    for piece in _sandbox(jinja2).from_string(template).generate(**variables):
        length += len(piece)
        if length > OUTPUT:
            raise ValueError(f"more than {OUTPUT} characters")
        pieces.append(piece)
    return "".join(pieces)


def _sandbox(jinja2: Any) -> Any:
    """The sandbox with the names that transformers gives templates."""
    from datetime import datetime

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        """The tag `generation`, which marks the answers to learn from: here its text alone."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """The statements between the tags."""
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


if __name__ == "__main__":
    main()
