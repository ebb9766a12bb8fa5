"""What SECURITY.md names exists: settings, files, and a word for each advisory."""

import re
from pathlib import Path

import pytest

from ssd_serve.base.settings import PREFIX, Settings

ROOT = Path(__file__).parents[1]
VERDICTS = {"no", "closed", "open", "not known"}


@pytest.fixture(scope="module")
def security() -> str:
    return (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_setting_exists(security: str) -> None:
    named = set(re.findall(rf"{PREFIX}[A-Z_]+", security))
    assert len(named) > 15
    assert named <= {PREFIX + name.upper() for name in Settings.model_fields}


def test_every_file_exists(security: str) -> None:
    named = [name for name in re.findall(r"`([\w/.-]+)`", security) if "/" in name or name.endswith(".txt")]
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists() and name != "owner/name"] == []


def test_every_advisory_has_a_verdict(security: str) -> None:
    rows = [
        row.split(" | ")
        for row in security.partition("where we stand")[2].splitlines()
        if row.startswith("| ")
    ]
    advisories = rows[1:]
    assert len(advisories) > 25
    assert {row[2] for row in advisories} <= VERDICTS
    assert all(len(row) == 4 for row in advisories)


def test_every_number_is_one(security: str) -> None:
    assert security.count("CVE-") == len(re.findall(r"\bCVE-20\d\d-\d{4,7}\b(?!\*\w)", security))


def test_the_readme_leads_here() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
