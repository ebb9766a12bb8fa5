"""The first screen: honest about the model, devices, measured and estimated figures; plain off a terminal."""

import io
import json
import shlex

import msgspec
import pytest
from rich.console import Console

from ssd_serve.base.messages import Ready
from ssd_serve.base.settings import Settings
from ssd_serve.server.banner import QUESTION, busy_line, commands, estimate, show_banner
from tests.server.fakes import READY

URL = "http://127.0.0.1:8000"


def screen(ready: Ready, settings: Settings | None = None, others: float = 0.0) -> str:
    out = io.StringIO()
    show_banner(Console(file=out, width=400), ready, settings or Settings(), URL, others=others, cores=2)
    return out.getvalue()


def changed(**fields: object) -> Ready:
    return msgspec.structs.replace(READY, **fields)


def test_banner_shows_mode_devices_and_the_embedded_model() -> None:
    text = screen(READY)
    for told in (URL, "ssd: the draft model drafts on its own device", "cpu:0", "cpu:1", "20.0 ms", "2.0 ms"):
        assert told in text
    assert "not a chatbot" in text
    assert "an estimate" in text
    assert "\x1b" not in text


def test_banner_names_the_page_unless_it_is_off() -> None:
    assert f"{URL}/ in a browser" in screen(READY)
    assert "browser" not in screen(READY, Settings(page=False))


def test_banner_of_another_model() -> None:
    assert "chatbot" not in screen(READY, Settings(target="/data/llama"))


def test_banner_of_plain_decoding_has_no_speed_up() -> None:
    text = screen(changed(mode="ar", draft="", draft_device="", draft_step_ms=0.0))
    assert "at most 50 tokens/s" in text
    assert "tokens a round" not in text


def test_banner_without_draft_step_time_has_no_speed_up() -> None:
    text = screen(changed(mode="sd", draft="ngram", draft_device="", draft_step_ms=0.0))
    assert "ngram on cpu:0 " in text
    assert "sd: a lookup in the text so far drafts, then the target verifies" in text
    assert "draft model" not in text
    assert " 0.0 ms" not in text
    assert "The gain of drafts is not known yet" in " ".join(text.split())
    assert "tokens a round" not in text


def test_banner_says_that_other_programs_use_the_cores() -> None:
    told = "this machine is busy: other programs use 1.0 of the 2 cores, which makes answers slower"
    assert told in screen(READY, others=1.0)
    assert "other programs" not in screen(READY, others=0.1)
    assert "use 2.0 of the 2 cores" in busy_line(2.04, 2)


def test_banner_marks_wrapped_models() -> None:
    text = screen(READY, Settings(model_wrapper="server.slow:twice"))
    assert "models are wrapped by server.slow:twice; step times are not their own" in text
    assert "ms a step (wrapped)" in text


def test_banner_caution_by_device_and_step_time() -> None:
    assert "less here, where each verified token costs time and target and drafter share" in screen(READY)
    assert "so short" in screen(changed(target_step_ms=1.5))
    on_gpus = screen(changed(target_device="cuda:0", draft_device="cuda:1"))
    assert "less here" not in on_gpus


def test_estimate_from_step_times() -> None:
    fast, slow = estimate(READY), estimate(changed(draft_step_ms=10.0))
    inline = estimate(changed(mode="sd"))
    assert fast is not None
    assert slow is not None
    assert inline is not None
    assert fast.speed_up == pytest.approx((1 - 0.7**11) / 0.3)
    assert 1.0 < slow.speed_up < fast.speed_up
    assert 1.0 < inline.speed_up < fast.speed_up
    assert estimate(changed(target_step_ms=0.0)) is None


def test_estimate_of_a_slow_inline_draft() -> None:
    found = estimate(changed(mode="sd", draft_step_ms=40.0))
    assert found is not None
    assert found.speed_up == 1.0


def test_banner_commands_use_the_program_name() -> None:
    lines = commands(Settings(), URL, ".venv/bin/ssd")
    assert any(line.startswith(".venv/bin/ssd generate 'def fibonacci(n):'") for line in lines)


def test_banner_curl_line_works() -> None:
    words = shlex.split(commands(Settings(), URL)[0])
    assert words[:2] == ["curl", "-N"]
    assert json.loads(words[-1])["prompt"] == "def fibonacci(n):"
    assert "$SSD_API_KEY" in commands(Settings(api_key="x"), URL)[0]


def test_banner_of_a_chat_model_asks_a_question() -> None:
    curl, chat, *_ = commands(Settings(target="smollm2"), URL, chats=True)
    assert f"{URL}/v1/chat/completions" in curl
    assert json.loads(shlex.split(curl)[-1])["messages"][0]["content"] == QUESTION
    assert chat.startswith(f"ssd chat --url {URL} ")
    assert "/v1/completions" in commands(Settings(), URL, chats=True)[0]
