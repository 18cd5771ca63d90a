"""Renders chat templates of checkpoints in a process of its own, with limits: they are programs of the file's author."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.host import template_process
from qdsl.models.plan import LoadError

PROGRAM = Path(template_process.__file__)
SECONDS = 20                                                     # of the clock; the process itself has 2 of the processor


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str) -> str:
    """The prompt that a template makes of messages.  variables: further ones, such as special tokens.

    where: the checkpoint, for messages.  Raises LoadError, with one sentence, for a template that fails or exceeds a limit.
    """
    request = {"path": sys.path, "template": template, "variables": {
        **variables, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}}
    try:
        result = subprocess.run([sys.executable, "-I", str(PROGRAM)], input=json.dumps(request, default=str), text=True,
                                encoding="utf-8", capture_output=True, timeout=SECONDS, check=False)
        answer = json.loads(result.stdout) if result.returncode == 0 else {"error": "took too much time or memory, and was ended"}
    except subprocess.TimeoutExpired:
        answer = {"error": f"took more than {SECONDS} s, and was ended"}
    if "error" in answer:
        raise LoadError(f"{where}: the chat template fails: {' '.join(str(answer['error']).split())}; --raw goes without it")
    return str(answer["text"])
