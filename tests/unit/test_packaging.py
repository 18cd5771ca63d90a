"""What is said of releases, of Python and of other packages, is what the tests run with."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]])
def test_a_required_package_has_one_tested_release(text: str) -> None:
    needed = Requirement(text)
    release = next(version for name, version in TESTED.items() if name.lower().replace("_", "-") == needed.name.lower())
    assert needed.specifier.contains(release)


def test_tested_releases_name_no_build() -> None:
    """`torch==2.13.0+cpu` would refuse the builds for GPUs."""
    assert not [version for version in TESTED.values() if not re.fullmatch(r"[0-9.]+", version)]


def test_the_claimed_releases_of_python_are_tested() -> None:
    tested = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested is not None
    oldest = PROJECT["requires-python"].removeprefix(">=")
    claimed = [name.rpartition(" ")[2] for name in PROJECT["classifiers"]]
    assert claimed == [oldest, *(name.removeprefix("python") for name in tested[1].split())]


def test_the_claimed_releases_of_transformers_are_tested() -> None:
    """`make transformers` and the pinned release are those of docs/transformers.md, and CI runs it."""
    others = re.search(r"^TRANSFORMERS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert others is not None and "make transformers" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = [TESTED["transformers"], *(name.partition("==")[2] for name in others[1].split())]
    claimed = re.search(r"Tests run with transformers (5\.\d+)\..* CI, runs .* with ([\d.]+) and ([\d.]+)\.", (
        ROOT / "docs" / "transformers.md").read_text())
    assert claimed is not None and [*claimed.groups()] == [tested[0].rpartition(".")[0], *tested[1:]]


def test_addresses_lead_somewhere() -> None:
    """Without an address there is no table; with one it has all that PyPI shows, and no reserved name in place of an address."""
    urls = PROJECT.get("urls", {})
    assert not urls or urls.keys() >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    reserved = re.compile(r"^https://([\w.-]+\.)?(example(\.\w+)?|invalid|localhost|test)(/|$)")
    assert [url for url in urls.values() if reserved.match(url) or url.endswith(".example")] == []


def test_actions_of_ci_are_pinned_by_commit() -> None:
    """A tag can be moved to other code."""
    uses = [use for path in (ROOT / ".github" / "workflows").glob("*.yml") for use in re.findall(r"uses: (.*)", path.read_text())]
    assert uses and not [use for use in uses if not re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}  # v[0-9.]+", use)]
