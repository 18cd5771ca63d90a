"""The recorded answers of producers' programs, again: tests/support/producer_programs.py runs each of them.

`make live` installs the packages; without one its test does not run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.producer_answers import recorded
from tests.support.producer_programs import PRODUCERS

PACKAGES = {"bitsandbytes": "bitsandbytes", "hqq": "hqq", "quanto": "optimum.quanto", "torchao": "torchao",
            "compressed-tensors": "compressed_tensors", "gptqmodel": "gptqmodel", "gptqmodel-bits": "gptqmodel",
            "auto-round": "auto_round", "aqlm": "aqlm",
            "transformers": "transformers", "modelopt": "modelopt", "modelopt-packed": "modelopt", "quark": "quark"}
pytestmark = pytest.mark.filterwarnings("default")


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not is_installed("compressed_tensors"), reason="needs the packages of producers: make live")
@pytest.mark.parametrize("producer", PACKAGES)
def test_programs_answer_as_recorded(producer: str, tmp_path: Path) -> None:
    if not is_installed(PACKAGES[producer]):
        pytest.skip(f"needs {PACKAGES[producer]}: make live")
    every = {(one.producer, one.key, str(one.value)): one for one in recorded()}
    for answer in PRODUCERS[producer](tmp_path):
        before = every[answer.producer, answer.key, str(answer.value)]
        assert (answer.y is None) == (before.y is None), (answer, before.error)
        if answer.y is not None and before.y is not None:
            assert (answer.y - before.y).norm() <= 1e-3 * before.y.norm(), (answer.producer, answer.key, answer.value)
