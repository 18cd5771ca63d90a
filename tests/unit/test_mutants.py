"""A spec with one mistake is refused by the compiler, or contradicts the known answers of the format that it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import EQUAL, caught, verdict
from tests.support.answers import kept
from tests.support.covering import ALL, quarter_of
from tests.support.formats import SPECS, spec
from tests.support.mistakes import KINDS, Mutant, mutants

MANY = 20                                                        # of a spec with more about so many, but in test-all
SHARES = 6                                                       # of a spec's mutants, for workers to take one at a time


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_mutant_is_caught(path: Path, share: int) -> None:
    answers = kept(path.stem)
    listed = mutants(path) if ALL else mutants(path)[::1 + len(mutants(path)) // MANY]
    wrong = [problem for mutant in quarter_of(listed[share::SHARES]) if (problem := verdict(mutant, path.stem, answers))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_spec_itself_is_not_caught(path: Path) -> None:
    assert caught(Mutant("none", "none", spec(path)), kept(path.stem)) == ""


def test_there_are_mutants_of_every_kind() -> None:
    """And what is said of mutants is said of mutants that there are."""
    kinds: set[str] = set()
    for path in SPECS:
        kinds |= {mutant.kind for mutant in mutants(path)}
        names = {mutant.name for mutant in mutants(path)}
        assert len(names) == len(mutants(path))
        assert [name for name in EQUAL.get(path.stem, {}) if name not in names] == []
    assert kinds == set(KINDS)
    assert set(EQUAL) <= {path.stem for path in SPECS}
