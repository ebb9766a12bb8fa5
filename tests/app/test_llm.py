"""Tests of the Python API: equal texts in every mode, equal to those of the server, and clear errors."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.app.llm.llm import Prompt
from ssd_serve.base.errors import CheckpointError, EngineDeadError, RequestError, SettingsError

TEXT = "def read_lines(path):"
SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "native_kernels": False,
    "kv_memory_mb": 64,
    "budget": 8,
    "context": 256,
    "prefill_chunk": 32,
}
SAMPLED = SamplingParams(seed=5, temperature=0.8, max_tokens=16)


@pytest.fixture(scope="module")
def llm(cache_dir: Path) -> Iterator[LLM]:
    with LLM(cache_dir=cache_dir, **SETTINGS) as made:
        yield made


def _workers() -> list[psutil.Process]:
    """Return this process's children that hold models; an ended process has no command line."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_output_has_text_tokens_and_figures(llm: LLM) -> None:
    assert llm.ready.mode == "sd"
    assert not _workers()
    (output,) = llm.generate(TEXT, SAMPLED)
    assert len(output.token_ids) == output.figures.tokens == 16
    assert output.text == llm.tokenizer.decode((*output.prompt_token_ids, *output.token_ids))[len(TEXT) :]
    assert (output.finish_reason, output.stop_reason, output.seed) == ("length", None, 5)
    assert output.logprobs is None
    assert 0 < output.first_token_s < output.seconds


def test_plain_decoding_gives_the_same_text(llm: LLM, cache_dir: Path) -> None:
    with LLM(cache_dir=cache_dir, mode="ar", **SETTINGS) as plain:
        assert plain.ready.mode == "ar"
        assert plain.generate(TEXT, SAMPLED)[0].token_ids == llm.generate(TEXT, SAMPLED)[0].token_ids


@pytest.mark.slow
def test_mode_ssd_gives_the_same_text_and_ends_its_processes(llm: LLM, cache_dir: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with LLM(cache_dir=cache_dir, mode="ssd", **SETTINGS) as far:
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 2
        assert far.ready.mode == "ssd"
        assert far.generate(TEXT, SAMPLED)[0].token_ids == llm.generate(TEXT, SAMPLED)[0].token_ids
        stopped = SAMPLED.model_copy(update={"stop": (":",), "max_tokens": 60})
        assert far.generate(TEXT, stopped)[0].text == llm.generate(TEXT, stopped)[0].text
    assert not [each for each in started if each.is_running()]


@pytest.mark.slow
def test_ssd_generate_gives_the_same_text(llm: LLM, cache_dir: Path) -> None:
    program = [sys.executable, "-m", "ssd_serve", "generate", TEXT]
    command = [*program, "--json", "--mode", "sd", "--dtype", "fp32"]
    # Options that the command leaves out come from the model; parameters that are left out are off.
    sampling = ["--seed", "5", "--temperature", "0.8", "--top-p", "1", "--max-tokens", "16"]
    sampling += ["--no-native-kernels"]
    done = subprocess.run(
        [*command, *sampling, "--cache-dir", str(cache_dir)], capture_output=True, timeout=120, check=True
    )
    assert tuple(json.loads(done.stdout)["token_ids"]) == llm.generate(TEXT, SAMPLED)[0].token_ids


def test_batched_prompts_give_the_texts_of_single_ones(llm: LLM) -> None:
    prompts = [TEXT, "import os\n", "class Node:"]
    together = [output.token_ids for output in llm.generate(prompts, SAMPLED)]
    assert together == [llm.generate(prompt, SAMPLED)[0].token_ids for prompt in prompts]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=6, seed=1), SamplingParams(max_tokens=9, temperature=0.0)]
    alone = [llm.generate(TEXT, each)[0] for each in params]
    assert [each.text for each in llm.generate([TEXT, TEXT], params)] == [each.text for each in alone]
    with pytest.raises(RequestError, match=r"^params: there are 2 for 1 prompts"):
        llm.generate(TEXT, params)
    for wrong in ({"temperature": 1}, [{"temperature": 1}]):
        with pytest.raises(RequestError, match=r"^params: must be SamplingParams"):
            llm.generate(TEXT, wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_self_draft_gives_the_same_text(llm: LLM, cache_dir: Path) -> None:
    expected = llm.generate(TEXT, SAMPLED)[0].token_ids
    with LLM(cache_dir=cache_dir, draft=["self:3", "ngram"], **SETTINGS) as own:
        assert own.ready.draft == "self:3, ngram"
        assert own.generate(TEXT, SAMPLED)[0].token_ids == expected


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("self:5", "self:5 must have fewer layers than the target, which has 5"),
        ("self:two", "no number of layers"),
    ],
)
def test_self_draft_of_no_layers_or_all_is_refused(draft: str, message: str, cache_dir: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        LLM(cache_dir=cache_dir, draft=draft, **SETTINGS)


@pytest.mark.slow
def test_prompts_beyond_the_engine_limits_wait_until_close(cache_dir: Path) -> None:
    with LLM(cache_dir=cache_dir, mode="ar", max_running=2, max_waiting=1, **SETTINGS) as small:
        outputs = small.generate(["a", "b", "c", "d", "e", "f"], SamplingParams(max_tokens=2), progress=False)
    small.close()  # a second time
    with pytest.raises(EngineDeadError, match="has been closed"):
        small.generate(TEXT)
    assert [output.prompt for output in outputs] == list(range(6))
    assert all(len(output.token_ids) == 2 for output in outputs)


def test_progress_bar_is_shown_on_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    one = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], one)
    assert capfd.readouterr().err == ""  # no terminal
    llm.generate("a", one, progress=True)
    assert "100%" in capfd.readouterr().err


def test_choices_of_a_prompt_have_seeds_of_their_own(llm: LLM) -> None:
    params = SAMPLED.model_copy(update={"n": 3})
    outputs = llm.generate([TEXT, "import os\n"], params)
    assert [(output.prompt, output.choice) for output in outputs] == [
        (p, c) for p in (0, 1) for c in range(3)
    ]
    assert len({output.token_ids for output in outputs[:3]}) == 3
    assert outputs[0].seed == 5
    again = SAMPLED.model_copy(update={"seed": outputs[2].seed})
    assert llm.generate(TEXT, again)[0].token_ids == outputs[2].token_ids


def test_token_ids_are_accepted_as_prompts(llm: LLM) -> None:
    (text,) = llm.generate(TEXT, SAMPLED)
    (one,) = llm.generate(list(text.prompt_token_ids), SAMPLED)
    both: list[Prompt] = [list(text.prompt_token_ids), TEXT]
    (first, second) = llm.generate(both, SAMPLED)
    assert text.token_ids == one.token_ids == first.token_ids == second.token_ids
    assert llm.generate([]) == []


def test_streamed_pieces_add_up_to_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, SAMPLED)
    pieces = list(llm.stream(TEXT, SAMPLED))
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    last = pieces[-1].output
    assert last is not None
    assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
    assert all(piece.output is None for piece in pieces[:-1])


def test_streamed_chat_reports_the_progress_of_its_prompt(llm: LLM) -> None:
    asked = [{"role": "user", "content": " ".join(f"x{n}" for n in range(60))}]
    pieces = list(llm.stream_chat(asked, SAMPLED, progress=True))
    progress = [piece.progress for piece in pieces if piece.progress is not None]
    (whole,) = llm.chat(asked, SAMPLED)
    size = len(whole.prompt_token_ids)
    assert [(each.processed, each.total) for each in progress] == [
        (done, size) for done in range(32, size, 32)
    ]
    assert "".join(piece.text for piece in pieces) == whole.text


def test_abandoned_and_concurrent_streams_are_independent(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, SAMPLED)
    left, read = llm.stream(TEXT, SAMPLED), llm.stream(TEXT, SAMPLED)
    next(left)
    pieces = [next(read)]
    assert llm.generate(TEXT, SAMPLED)[0].text == whole.text
    del left
    pieces += read
    assert "".join(piece.text for piece in pieces) == whole.text


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, SAMPLED)
    stop = whole.text[10:13]
    (cut,) = llm.generate(TEXT, SAMPLED.model_copy(update={"stop": (stop,)}))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.token_ids) < 16
    assert SamplingParams(stop="a").stop_strings == SamplingParams(stop=["a"]).stop_strings == ("a",)
    with_it = SAMPLED.model_copy(update={"stop": (stop,), "include_stop_str_in_output": True})
    assert llm.generate(TEXT, with_it)[0].text == cut.text + stop


def test_stop_token_ends_the_text_and_is_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, SAMPLED)
    end = whole.token_ids[3]
    (cut,) = llm.generate(TEXT, SAMPLED.model_copy(update={"stop_token_ids": (end,)}))
    at = whole.token_ids.index(end)
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", end)
    assert whole.text.startswith(cut.text)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    (free,) = llm.generate(TEXT, SAMPLED)
    word = free.text.split()[0]
    (without,) = llm.generate(TEXT, SAMPLED.model_copy(update={"bad_words": (word,)}))
    assert word in free.text
    assert word not in without.text


def test_thinking_token_budget_ends_the_thoughts(llm: LLM) -> None:
    params = SamplingParams(seed=5, temperature=0.8, max_tokens=24, thinking_token_budget=4)
    bounded = llm.generate("<think>", params)[0]
    free = llm.generate("<think>", SamplingParams(seed=5, temperature=0.8, max_tokens=24))[0]
    end = tuple(llm.tokenizer.encode("</think>", add_special_tokens=False))
    assert bounded.token_ids[: 4 + len(end)] == (*free.token_ids[:4], *end)


def test_logprobs_are_reported_for_each_token(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, SAMPLED.model_copy(update={"logprobs": 2, "temperature": 0.0}))
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, told in zip(output.token_ids, output.logprobs, strict=True):
        assert told.top[0] == (token, told.chosen)
        assert len(told.top) == 2


def test_chat_is_the_completion_of_its_rendered_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write a loop."}]
    (answer,) = llm.chat(messages, SAMPLED)
    ids = llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), False)
    assert answer.prompt_token_ids == tuple(ids)
    assert answer.token_ids == llm.generate(ids, SAMPLED)[0].token_ids


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    chats = [
        [{"role": "user", "content": text}] for text in ("Write a loop.", "Write a class.", "Write a test.")
    ]
    params = [SAMPLED.model_copy(update={"seed": seed}) for seed in range(3)]
    together = [output.token_ids for output in llm.chat(chats, params)]
    assert together == [llm.chat(chat, one)[0].token_ids for chat, one in zip(chats, params, strict=True)]


@pytest.mark.parametrize("messages", ["hello", [["hello"]], [{"role": "user", "content": "a"}, "b"]])
def test_messages_of_another_form_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages: must be a list"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"top_k": 2**31}, "top_k"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["\udc00"]}, "bad_words"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_invalid_parameters_are_named(params: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}") as error:
        SamplingParams.model_validate(params)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1] * 3000, SamplingParams(), "prompt"),
        ([1] * 100, SamplingParams(max_tokens=3000), "max_tokens"),
        ([999_999], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ("\ud800", SamplingParams(), "prompt"),
        (TEXT, SamplingParams(logit_bias={999_999: 1.0}), "logit_bias"),
        (TEXT, SamplingParams(min_tokens=9, max_tokens=8), "min_tokens"),
        (TEXT, SamplingParams(bad_words=["a", "  "]), "bad_words"),
        (TEXT, SamplingParams(allowed_token_ids=[0], min_tokens=1, stop_token_ids=[0]), "allowed_token_ids"),
    ],
)
def test_impossible_requests_are_named_and_leave_others_alone(
    llm: LLM, prompt: str | list[int], params: SamplingParams, field: str
) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as error:
        llm.generate(["fine", prompt], params)
    assert error.value.field == field
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].finish_reason == "length"


def test_default_max_tokens_is_limited_by_the_context(llm: LLM) -> None:
    prompt = [5] * (llm.ready.context - 3)
    assert len(llm.generate(prompt, SamplingParams(ignore_eos=True))[0].token_ids) == 3


def test_max_tokens_is_0_or_fills_the_context(llm: LLM) -> None:
    prompt = [5] * (llm.ready.context - 3)
    assert len(llm.generate(prompt, SamplingParams(max_tokens=-1, ignore_eos=True))[0].token_ids) == 3
    none = llm.generate("a", SamplingParams(max_tokens=0, logprobs=1))[0]
    assert (none.text, none.token_ids, none.logprobs, none.finish_reason) == ("", (), (), "length")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_runing": 3}, "there is no setting max_runing; did you mean max_running?"),
        ({"max_running": 0}, "the argument max_running: input should be greater than or equal to 1"),
        ({"mode": "fast"}, "the argument mode: input should be 'ar', 'sd', 'ssd' or 'auto'"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        LLM(**settings)
    assert str(error.value) == message


def test_missing_model_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="/nowhere/at/all"):
        LLM("/nowhere/at/all")


def test_importing_the_package_imports_no_torch() -> None:
    said = "import sys, ssd_serve; print(sorted({'torch', 'pydantic', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(ImportError, match="Nothing"):
        exec("from ssd_serve import Nothing")
