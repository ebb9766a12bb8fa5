"""The page in a headless Chromium, against a scripted engine."""

import re
import subprocess
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import Abort
from ssd_serve.base.settings import Settings
from tests.server import browser
from tests.server.browser import Page
from tests.server.fakes import STATUS, Script, ScriptOf, say
from tests.server.running_server import ListeningServer, listening_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed: its package is chromium"),
]
KEY = "k" * 32
ANSWER = "Sum:\n\n```python\ndef add(a, b):\n    return a + b\n```\n\n- one\n- <b onclick=alert(1)>two</b>\n"
VIEWS = ("chat", "race", "inside", "figures")
SHOWN = "document.querySelector('[role=tabpanel]:not([hidden])')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page, None, None]:
    with browser.browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def opened(page: Page) -> Generator[Callable[..., ListeningServer], None, None]:
    """Start a server with a script, and open its page."""
    running: list[Any] = []

    def start(
        script: Script | ScriptOf, settings: Settings | None = None, path: str = "/"
    ) -> ListeningServer:
        running.append(listening_server(script if callable(script) else lambda _: script, settings))
        server: ListeningServer = running[-1].__enter__()
        page.view(1280, 900, calm=True)
        page.open(f"{server.url}{path}")
        page.wait("document.querySelector('.model span, dialog[open]')")
        return server

    page.faults.clear()
    yield start
    page.send("Page.navigate", url="about:blank")
    for each in running:
        each.__exit__(None, None, None)
    assert page.faults == []


def ask(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.press("Enter")


def answered(page: Page) -> None:
    page.wait("document.querySelector('.answer footer')")


def race(page: Page) -> None:
    page.click("#tab-race")
    page.fill(".race-form textarea", "Why?")
    page.click(".race-form .primary")
    page.wait("document.querySelector('.verdict')")


def test_answer_streams_as_markdown_and_never_as_html(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say(ANSWER, hold_after=8))
    ask(page, "add")
    page.wait("document.querySelector('.answer')?.textContent.includes('def add')")
    assert page.value("document.querySelector('.answer').ariaBusy") == "true"
    server.engine.released.set()
    answered(page)
    assert page.text(".answer .code pre") == "def add(a, b):\n    return a + b"
    assert page.text(".answer .code-head span") == "python"
    assert page.value("document.querySelectorAll('.answer li').length") == 2
    assert "<b onclick=alert(1)>" in page.text(".answer li:last-child")
    assert page.value("document.querySelector('.answer b')") is None
    assert "tokens a round" in page.text(".answer .note")
    assert page.text(".chat > [role=status]").startswith("Answer complete")


def test_escape_stops_an_answer_and_its_request(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say("abcdefghi", hold_after=2))
    ask(page, "go")
    page.wait("document.querySelector('.answer')?.textContent.includes('abcdef')")
    page.press("Escape")
    answered(page)
    assert "stopped" in page.text(".answer .note")
    assert "abcdef" in page.text(".answer .markdown")
    server.engine.wait_for(lambda: bool(server.engine.sent(Abort)))


def test_error_of_the_server_is_shown(page: Page, opened: Callable[..., Any]) -> None:
    opened(say("abc"))
    page.click(".drawers summary")
    page.fill(".parameters input[min='1']", "100000")
    ask(page, "go")
    page.wait("document.querySelector('.answer .problem')")
    assert "context" in page.text(".answer .problem")


def test_shift_enter_begins_a_line_and_regenerate_asks_again(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say("abc"))
    page.fill("#draft", "one")
    page.press("Enter", shift=True)
    assert page.value("document.querySelector('#draft').value") == "one\n"
    assert page.value("document.querySelectorAll('.turn').length") == 0
    page.click(".drawers summary")
    page.fill(".parameters textarea", "Be brief.")
    ask(page, "one")
    answered(page)
    page.value(
        "[...document.querySelectorAll('.answer button')].find(b => b.textContent == 'Regenerate').click()"
    )
    server.engine.wait_for(lambda: len(server.engine.submits()) == 2)
    answered(page)
    first, second = server.engine.submits()
    assert first.prompt == second.prompt
    assert b"Be brief." in bytes(token for token in first.prompt if token < 256)
    assert page.value("document.querySelectorAll('.turn').length") == 2


def test_race_shows_ratio_and_identical_tokens(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say("the same words twice"))
    page.click("#tab-race")
    page.value("document.querySelectorAll('.race-form .chip')[1].click()")
    assert "JSON" in page.value("document.querySelector('.race-form textarea').value")
    race(page)
    assert "20 of 20 tokens are identical" in page.text(".verdict")
    assert "×" in page.text(".verdict .ratio")
    texts = page.value("[...document.querySelectorAll('.race-text')].map(each => each.textContent)")
    assert texts == ["the same words twice"] * 2
    modes = [submit.options.max_nodes for submit in server.engine.submits()]
    assert modes == [0, 0, None], "the prompt is read once before both"
    assert len({submit.seed for submit in server.engine.submits()}) == 1
    assert "one run of each" in page.text(".verdict")
    page.click(".race-form .primary")
    page.wait("document.querySelector('.verdict')?.textContent.includes('the median of 2 races')")
    modes = [submit.options.max_nodes for submit in server.engine.submits()]
    assert modes[3:] == [0, None, 0], "the modes take turns in beginning"


def test_escape_stops_a_race(page: Page, opened: Callable[..., Any]) -> None:
    opened(lambda submit: say("abcdef", hold_after=None if submit.parameters.max_tokens == 1 else 1))
    page.click("#tab-race")
    page.fill(".race-form textarea", "Why?")
    page.click(".race-form .primary")
    page.wait("document.querySelector('.lane.off .race-text')?.textContent == 'abc'")
    page.value("document.querySelector('.race-text').focus()")
    page.press("Escape")
    page.wait("!document.querySelector('.lane') && !document.querySelector('#view-race .problem')")


def test_race_tells_where_tokens_differ(page: Page, opened: Callable[..., Any]) -> None:
    opened(lambda submit: say("abcdef" if submit.options.max_nodes == 0 else "abcxef"))
    race(page)
    assert "3 of 6 tokens are identical, up to the first difference" in page.text(".verdict")


def test_race_is_replayed_on_one_clock(page: Page, opened: Callable[..., Any]) -> None:
    opened(say("word " * 8))
    page.view(1280, 900, calm=False)
    page.click("#tab-race")
    page.fill(".race-form textarea", "Why?")
    page.click(".race-form .primary")
    page.wait("document.querySelector('.verdict') || document.querySelector('.inline select:disabled')")
    page.wait("document.querySelector('.verdict')")
    page.value("document.querySelector('#view-race .quiet:not(.verdict *)').click()")
    page.wait("document.querySelector('.verdict')")


def test_race_tells_that_the_server_was_busy(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say("abcdef"))
    page.value(
        "window.realFetch = fetch; window.fetch = async (url, ...more) => String(url).endsWith('/load')"
        " ? Response.json({server_load: 3, machine_busy: false}) : realFetch(url, ...more)"
    )
    race(page)
    assert "Other requests ran" in page.text(".verdict .warning")
    assert server.engine.submits()


def test_inside_shows_origins_and_the_tree_of_each_round(page: Page, opened: Callable[..., Any]) -> None:
    opened(say("abcdefgh"))
    ask(page, "go")
    answered(page)
    page.click("#tab-inside")
    assert page.value("document.querySelectorAll('.strip .token').length") == 8
    marked = page.value("[...document.querySelectorAll('.strip .source-0')].map(t => t.textContent).join('')")
    assert marked == "abdeg"
    assert "draft token of tiny" in page.text(".legend")
    round_of = "document.querySelector('#tree-text').textContent"
    assert page.value(round_of).startswith("Round 1: 3 draft tokens were verified, 2 accepted (“a”, “b”)")
    kinds = "[...document.querySelectorAll('.tree .node')].map(node => node.classList[1]).sort().join()"
    assert page.value(kinds) == "accepted,accepted,bonus,rejected,root"
    page.value("document.querySelector('.slider input').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "bonus token is “h”" in page.value(round_of)
    page.value("document.querySelector('.strip [tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    facts = page.text(".facts")
    assert "accepted draft token" in facts
    assert "90 %" in facts
    rejected = page.value("document.querySelector('#view-inside details').textContent")
    assert "#23suffix14 %2no" in rejected, "the page's own part of the prefix cache hides nothing"
    assert page.value("document.querySelectorAll('.timeline .growth').length") == 3


def test_figures_show_the_last_answer_and_the_server(page: Page, opened: Callable[..., Any]) -> None:
    server = opened(say("abcdefgh"))
    server.engine.tell(STATUS)
    ask(page, "go")
    answered(page)
    page.click("#tab-figures")
    page.wait("document.querySelector('#live-title')")
    assert "since the server started" in page.text("#live-title")
    live = "document.querySelector('[aria-labelledby=live-title]').textContent"
    for shown in ("Tokens a round3.00", "200of 800 verified", "draft180 of 700", "> 16100 %", "500 ms, 5 %"):
        assert shown in page.value(live), page.value(live)
    captions = page.value("[...document.querySelectorAll('.bars caption')].map(each => each.textContent)")
    assert captions.count("Acceptance by depth") == captions.count("Time of the rounds") == 2
    server.engine.tell(replace(STATUS, totals=replace(STATUS.totals, rounds=110, accepted=215)))
    page.wait("document.querySelector('#live-title').textContent.includes('last ')")
    assert "Tokens a round2.50" in page.value(live)


def test_key_is_asked_once_and_kept_in_the_tab(page: Page, opened: Callable[..., Any]) -> None:
    opened(say("abc"), Settings(api_key=KEY, drain_seconds=1))
    page.wait("document.querySelector('dialog[open]')")
    page.fill("dialog input", "wrong" * 8)
    page.press("Enter")
    page.wait("document.querySelector('dialog .problem')")
    page.fill("dialog input", KEY)
    page.press("Enter")
    page.wait("!document.querySelector('dialog[open]') && document.querySelector('.model span')")
    page.send("Page.reload")
    page.wait("document.querySelector('.model span')")
    assert page.value("document.querySelector('dialog[open]')") is None
    assert KEY not in page.value("JSON.stringify(localStorage) + document.cookie + document.body.innerHTML")
    ask(page, "go")
    answered(page)
    assert page.value("document.querySelector('.answer .problem')") is None
    assert "$SSD_API_KEY" in page.text(".snippets code")


@pytest.mark.parametrize(
    ("name", "command"),
    [("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])],
    ids=["curl", "Python"],
)
def test_request_as_code_runs(page: Page, opened: Callable[..., Any], name: str, command: list[str]) -> None:
    opened(say("it's so"))
    page.fill("#draft", 'What\'s "this"?\\')
    page.value(
        f"[...document.querySelectorAll('.snippets .chip')].find(b => b.textContent == '{name}').click()"
    )
    page.wait(f"document.querySelector('.snippets .chip[aria-pressed=true]').textContent == '{name}'")
    done = subprocess.run([*command, page.text(".snippets code")], capture_output=True, text=True, check=True)
    assert "it's so" in "".join(re.findall(r'"content":"([^"]*)"', done.stdout)) or done.stdout == "it's so"


@pytest.mark.parametrize("path", ["/llm/", "/llm"])
def test_page_works_below_a_root_path(page: Page, opened: Callable[..., Any], path: str) -> None:
    opened(say("abc"), Settings(root_path="/llm", drain_seconds=1), path)
    ask(page, "go")
    answered(page)
    assert page.text(".answer .markdown") == "abc"
    assert "/llm/v1/chat/completions" in page.text(".snippets code")


def test_tabs_are_used_by_keyboard(page: Page, opened: Callable[..., Any]) -> None:
    opened(say("abc"))
    page.value("document.querySelector('#tab-chat').focus()")
    seen: list[str] = []
    for _ in VIEWS:
        page.press("ArrowRight")
        seen.append(page.value(f"document.activeElement.id + ' ' + {SHOWN}.id"))
    assert seen == [f"tab-{view} view-{view}" for view in (*VIEWS[1:], "chat")]


def test_page_fits_every_width_and_has_no_serious_accessibility_finding(
    page: Page, opened: Callable[..., Any]
) -> None:
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core-python is not installed: pip install axe-core-python")
    axe = (Path(found.origin).parent / "axe.min.js").read_text()
    opened(say(ANSWER))
    ask(page, "go")
    answered(page)
    page.value("document.querySelectorAll('.drawers details').forEach(each => each.open = true)")
    race(page)
    page.value(f"{axe}; undefined")
    for view in VIEWS:
        page.click(f"#tab-{view}")
        for scheme in ("light", "dark"):
            page.view(1280, 900, scheme, calm=True)
            findings = page.value(
                "axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))"
            )
            assert [each for each in findings if each[0] in ("serious", "critical")] == [], (view, scheme)
        for width in (360, 768, 1600):
            page.view(width, 800, calm=True)
            page.wait("document.documentElement.scrollWidth <= innerWidth", 3)
