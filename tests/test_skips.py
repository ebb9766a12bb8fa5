"""Skips in CI: an unlisted reason fails the run, a listed one does not."""

import pytest

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


@pytest.mark.parametrize("source", [ONE, WHOLE], ids=["inside", "file"])
@pytest.mark.parametrize(
    "words", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_unlisted_skip_reason_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CI", "1")
    code, output = run(pytester, source, *words)
    assert code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert "the weather is bad: not a skip that tests.skips expects in CI" in output


@pytest.mark.parametrize(("environment", "reason"), [("1", KNOWN), ("", "the weather is bad")])
def test_listed_skip_reasons_pass_and_others_outside_of_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, environment: str, reason: str
) -> None:
    monkeypatch.setenv("CI", environment)
    code, output = run(pytester, MARKED, reason=reason)
    assert (code, "1 skipped" in output) == (0, True)
