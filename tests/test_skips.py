"""Skips in CI: an unlisted reason fails the run, a listed one does not."""

import pytest

from tests.skips import EXPECTED

pytest_plugins = ["pytester"]
KNOWN = "promtool comes with Prometheus; no package of Python brings it"
ONE = "import pytest\ndef test_one():\n    pytest.skip({!r})\n"
MARKED = "import pytest\n@pytest.mark.skipif(True, reason={!r})\ndef test_one():\n    pass\n"
PLUGINS = ("-p", "tests.skips", "-p", "no:cacheprovider", "-p", "no:schemathesis")
WHOLE = "import pytest\npytest.importorskip('no_such_package', reason={!r})\ndef test_one():\n    pass\n"


def run(
    pytester: pytest.Pytester, source: str, *words: str, reason: str = "the weather is bad"
) -> tuple[int, str]:
    pytester.makepyfile(source.format(reason))
    found = pytester.runpytest_inprocess(*PLUGINS, *words)
    return int(found.ret), found.stdout.str()


@pytest.mark.parametrize("source", [ONE, MARKED, WHOLE], ids=["inside", "mark", "file"])
@pytest.mark.parametrize(
    "words", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_unlisted_skip_reason_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CI", "1")
    code, told = run(pytester, source, *words)
    assert code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert "the weather is bad: not a skip that tests.skips expects in CI" in told


def test_listed_skip_reason_passes_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    code, told = run(pytester, MARKED, reason=KNOWN)
    assert (code, "1 skipped" in told) == (0, True)


def test_any_skip_reason_passes_outside_of_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    code, told = run(pytester, ONE)
    assert (code, "1 skipped" in told) == (0, True)


def test_xfail_is_not_a_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    code, told = run(pytester, "import pytest\n@pytest.mark.xfail\ndef test_one():\n    assert {!r} == ''\n")
    assert (code, "1 xfailed" in told) == (0, True)


def test_listed_skip_reasons_have_explanations() -> None:
    assert all(why for why in EXPECTED.values())
