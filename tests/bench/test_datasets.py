"""Tests of prompt files: published formats, custom formats, and refused files."""

import gzip
from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.datasets import Question, as_prompts, read_questions
from ssd_serve.models.text.tokenizer import Tokenizer
from tests.end_to_end.tiny_pair import write_model

HUMAN_EVAL = (
    '{"task_id": "HumanEval/0", "prompt": "def f():\\n", "entry_point": "f", "canonical_solution": ""}\n'
)
GSM8K = '{"question": "How many ducks?", "answer": "9 #### 9"}\n'
MT_BENCH = '{"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}\n'


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
def test_records_are_known_by_their_fields(tmp_path: Path, text: str, question: Question) -> None:
    assert read_questions(written(tmp_path, text)) == [question]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    found = read_questions(written(tmp_path, "one\n\n{two\n", "prompts.txt"))
    assert [(each.name, each.text) for each in found] == [("line 1", "one"), ("line 3", "{two")]


def test_compressed_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((HUMAN_EVAL * 2).encode()))
    assert len(read_questions(path)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "has no prompts"),
        (GSM8K + "{oops\n", "line 2: "),
        ('{"answer": "42"}\n', "line 1 has no prompt"),
        ('{"turns": []}\n', "line 1 has no prompt"),
        ('{"prompt": ["a"]}\n', "line 1: "),
    ],
)
def test_anything_else_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_questions(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the prompts"):
        read_questions(tmp_path / "none.jsonl")


def test_half_of_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl.gz"
    path.write_bytes(gzip.compress(HUMAN_EVAL.encode())[:40])
    with pytest.raises(UserError, match="cannot read the prompts"):
        read_questions(path)


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    write_model(tmp_path / "plain", seed=1, noise=0.0)
    return Tokenizer(tmp_path / "plain")


@pytest.fixture
def chatting(tmp_path: Path) -> Tokenizer:
    write_model(tmp_path / "chat", seed=1, noise=0.0)
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}>"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    return Tokenizer(tmp_path / "chat")


QUESTIONS = [Question("a", "how", is_chat=True), Question("b", "def f", is_chat=False)]


def test_questions_are_asked_by_the_template_and_texts_are_continued(chatting: Tokenizer) -> None:
    texts_found = [chatting.decode(prompt.tokens) for prompt in as_prompts(QUESTIONS, chatting, 100)]
    assert texts_found == ["[how]>", "def f"]


@pytest.mark.parametrize(("chat", "texts"), [(True, ["[how]>", "[def f]>"]), (False, ["how", "def f"])])
def test_who_decides_about_the_template_is_heard(chatting: Tokenizer, chat: bool, texts: list[str]) -> None:
    texts_found = [chatting.decode(prompt.tokens) for prompt in as_prompts(QUESTIONS, chatting, 100, chat)]
    assert texts_found == texts


def test_without_a_template_questions_are_plain_texts(plain: Tokenizer) -> None:
    prompts = as_prompts(QUESTIONS, plain, 100)
    assert [plain.decode(prompt.tokens) for prompt in prompts] == ["how", "def f"]
    assert len({prompt.seed for prompt in prompts}) == 2
    with pytest.raises(UserError, match="has no chat template: leave out --chat"):
        as_prompts(QUESTIONS, plain, 100, chat=True)


def test_prompts_that_do_not_fit_are_named(plain: Tokenizer) -> None:
    with pytest.raises(UserError, match="the prompt b has 5 tokens"):
        as_prompts(QUESTIONS, plain, 4)
