"""Tests of benchmark prompts: from held-out files without loops, and from files of users."""

import gzip
from pathlib import Path

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.prompts import (
    NEW_TOKENS,
    Prompt,
    Question,
    as_prompts,
    choose,
    held_out_prompts,
    read_questions,
    repeated_share,
    without_loops,
)
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.data import standard_library
from tests.end_to_end.tiny_pair import write_model

FINE, LOOP = list(range(NEW_TOKENS)), [1, 2, 3] * (NEW_TOKENS // 3)
POOL = [Prompt(f"file {number}", (number,), number) for number in range(100)]
HUMAN_EVAL = (
    '{"task_id": "HumanEval/0", "prompt": "def f():\\n", "entry_point": "f", "canonical_solution": ""}\n'
)
GSM8K = '{"question": "How many ducks?", "answer": "9 #### 9"}\n'
MT_BENCH = '{"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}\n'
QUESTIONS = [Question("a", "how", is_chat=True), Question("b", "def f", is_chat=False)]


def test_held_out_prompts_are_places_in_files_every_48_tokens() -> None:
    folder = resolve_model(EMBEDDED, "target")
    tokenizer = Tokenizer(folder)
    pool = held_out_prompts(folder, tokenizer)
    files = {prompt.path for prompt in pool}
    assert {prompt.path for prompt in pool[: len(files)]} == files
    assert all(96 <= len(prompt.tokens) <= 288 for prompt in pool)
    assert len({prompt.seed for prompt in pool}) == len(pool)
    path = min(files)
    text = tokenizer.encode((standard_library() / path).read_text(encoding="utf-8"))
    own = [prompt for prompt in pool if prompt.path == path]
    places = range(96, len(text) - NEW_TOKENS, NEW_TOKENS)
    assert len(own) == len(places)
    assert {prompt.tokens for prompt in own} == {tuple(text[max(0, end - 288) : end]) for end in places}


def test_chosen_prompts_have_no_loops_and_differ_from_tuning_prompts() -> None:
    found = choose(POOL, 4, 2, lambda some: [LOOP if each.seed % 2 else FINE for each in some])
    assert [prompt.seed for prompt in found.tuning] == [0, 2]
    assert [prompt.seed for prompt in found.prompts] == [4, 6, 8, 10]
    assert found.left_out == 0.5
    with pytest.raises(UserError, match="of 100 prompts 10 have continuations that do not loop, and 12 are"):
        choose(POOL, 8, 4, lambda some: [LOOP if each.seed % 10 else FINE for each in some])


def test_prompts_with_looping_texts_are_not_counted() -> None:
    some = POOL[:4]
    assert without_loops(some, {"ar": [FINE] * 4, "ssd": [FINE, FINE, LOOP, FINE]}) == [0, 1, 3]
    with pytest.raises(SsdError, match="the text after file 1 is a loop"):
        without_loops(some, {"ar": [FINE, LOOP, FINE, FINE], "ssd": [FINE, FINE, LOOP, FINE]})
    with pytest.raises(SsdError, match="is a loop"):
        without_loops(POOL[:1], {"ar": [LOOP]})
    many = [LOOP] * 3 + [FINE] * 27
    assert without_loops(POOL[:30], {"ar": many}) == list(range(3, 30))


def test_repeated_share_counts_8_grams() -> None:
    assert repeated_share(FINE) == 0.0
    assert repeated_share(LOOP) == pytest.approx(38 / 41)
    assert repeated_share([1, 2, 3]) == 0.0
    assert repeated_share([*FINE[:24], *FINE[:24]]) == pytest.approx(17 / 41)


def written(folder: Path, text: str, name: str = "file.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (HUMAN_EVAL, Question("HumanEval/0", "def f():\n", is_chat=False)),
        (GSM8K, Question("line 1", "How many ducks?", is_chat=True)),
        (MT_BENCH, Question("81", "Compose a post.", is_chat=True)),
        ('{"prompt": "mine"}\n', Question("line 1", "mine", is_chat=False)),
        ('{"text": "mine", "more": [1]}\n', Question("line 1", "mine", is_chat=False)),
    ],
)
def test_prompt_file_formats_are_recognised_by_fields(tmp_path: Path, text: str, question: Question) -> None:
    assert read_questions(written(tmp_path, text)) == [question]


def test_text_and_compressed_prompt_files(tmp_path: Path) -> None:
    found = read_questions(written(tmp_path, "one\n\n{two\n", "prompts.txt"))
    assert [(each.name, each.text) for each in found] == [("line 1", "one"), ("line 3", "{two")]
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((HUMAN_EVAL * 2).encode()))
    assert len(read_questions(path)) == 2
    path.write_bytes(path.read_bytes()[:40])
    for unreadable in (path, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match="cannot read the prompts"):
            read_questions(unreadable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "has no prompts"),
        (GSM8K + "{oops\n", "line 2: "),
        ('{"turns": []}\n', "line 1 has no prompt"),
        ('{"prompt": ["a"]}\n', "line 1: "),
    ],
)
def test_wrong_prompt_lines_are_refused_with_their_number(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_questions(written(tmp_path, text))


@pytest.mark.parametrize(
    ("chat", "texts"),
    [(None, ["[how]>", "def f"]), (True, ["[how]>", "[def f]>"]), (False, ["how", "def f"])],
)
def test_chat_template_applies_to_questions_or_as_chosen(
    tmp_path: Path, chat: bool | None, texts: list[str]
) -> None:
    write_model(tmp_path / "chat", seed=1, noise=0.0)
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}>"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tmp_path / "chat")
    found = as_prompts(QUESTIONS, tokenizer, 100, chat)
    assert [tokenizer.decode(prompt.tokens) for prompt in found] == texts


def test_prompts_without_a_chat_template_or_too_long(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", seed=1, noise=0.0)
    tokenizer = Tokenizer(tmp_path / "plain")
    prompts = as_prompts(QUESTIONS, tokenizer, 100)
    assert [tokenizer.decode(prompt.tokens) for prompt in prompts] == ["how", "def f"]
    assert len({prompt.seed for prompt in prompts}) == 2
    with pytest.raises(UserError, match="has no chat template: leave out --chat"):
        as_prompts(QUESTIONS, tokenizer, 100, chat=True)
    with pytest.raises(UserError, match="the prompt b has 5 tokens"):
        as_prompts(QUESTIONS, tokenizer, 4)
