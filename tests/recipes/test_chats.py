"""Conversations as training text: which tokens count, and the target's outputs that are kept in a file."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import UserError
from ssd_serve.models.heads.load import target_head
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.chats import ChatLessons, prepare_chats, read_conversations
from ssd_serve.recipes.data import Workspace
from ssd_serve.recipes.heads import head_loss, train_head
from ssd_serve.recipes.training import Lesson, Teacher
from tests.recipes.test_eagle3 import RECIPE, SHAPE, guesses_of, random_pair

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAYERS = (0, 1)


@pytest.fixture
def chat_target(target: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chats_file(folder: Path, count: int = 40) -> Path:
    lines: list[object] = [
        {
            "messages": [
                {"role": "user", "content": f"{index} and {index}?"},
                {"role": "assistant", "content": f"{2 * index}"},
                {"role": "user", "content": "More?"},
                {"role": "assistant", "content": f"Also {3 * index}."},
            ]
        }
        for index in range(count - 1)
    ]
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "One, two", "completion": ", three"}])))
    return file


@pytest.fixture
def prepared(chat_target: Path, tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "chats")
    conversations = read_conversations([chats_file(tmp_path)], Tokenizer(chat_target))
    prepare_chats(workspace, conversations, chat_target, 100)
    return workspace


@pytest.fixture
def lessons(prepared: Workspace, chat_target: Path) -> Callable[[], ChatLessons]:
    def read() -> ChatLessons:
        matrix = target_head(chat_target, Tokenizer(chat_target).vocabulary, 32)
        return ChatLessons(prepared, Teacher(chat_target, 160, (*LAYERS, FINAL), dtype="fp32"), matrix)

    return read


def test_answers_and_their_end_are_what_counts(chat_target: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(chat_target)
    first, *_, last = read_conversations([chats_file(tmp_path)], tokenizer)
    written = tokenizer.decode(first.ids[first.answers].tolist(), skip_special_tokens=False)
    assert written == "0<end>Also 0.<end>"
    whole = tokenizer.decode(first.ids.tolist(), skip_special_tokens=False)
    assert whole == "<user>0 and 0?<end>\n<assistant>0<end>\n<user>More?<end>\n<assistant>Also 0.<end>"
    assert tokenizer.decode(last.ids[last.answers].tolist()) == ", three"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1 has no answer: give messages"),
        ('{"prompt": "a"}', "line 1 has no answer"),
    ],
)
def test_lines_without_an_answer_are_refused(
    line: str, message: str, chat_target: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_conversations([tmp_path / "wrong.jsonl"], Tokenizer(chat_target))


def test_kept_lessons_are_those_of_each_conversation_alone(
    lessons: Callable[[], ChatLessons], prepared: Workspace, chat_target: Path
) -> None:
    kept = lessons()
    teacher = Teacher(chat_target, 160, LAYERS, dtype="fp32")
    lengths = np.diff(np.load(prepared.folder / "ends.npy"), prepend=0).tolist()
    assert len(lengths) == 40
    assert sum(map(len, kept.held_out())) == sum(lengths[38:])
    start = 0
    for length in lengths:
        tokens, lesson = kept.read(torch.arange(start, start + length)[None])
        alone = teacher.read(tokens)
        torch.testing.assert_close(lesson.logits, alone.logits, atol=0.05, rtol=0.05)
        assert lesson.features is not None
        assert alone.features is not None
        torch.testing.assert_close(lesson.features.float(), alone.features, atol=0.05, rtol=0.02)
        start += length
    ids = torch.tensor([3, 40])
    places = torch.arange(50)[None]
    torch.testing.assert_close(kept.read(places, ids)[1].logits, kept.read(places)[1].logits[..., ids])


def test_half_written_file_of_outputs_is_completed(
    lessons: Callable[[], ChatLessons], prepared: Workspace
) -> None:
    places = torch.arange(500)[None]
    whole = lessons().read(places)[1].logits
    file = prepared.folder / "outputs-0-1.bin"
    size = file.stat().st_size
    with file.open("ab") as half:
        half.truncate(size // 2 + 5)
    again = lessons().read(places)[1].logits
    assert file.stat().st_size == size
    torch.testing.assert_close(again, whole, atol=0.02, rtol=0.02)


def test_loss_is_the_mean_over_the_places_that_count() -> None:
    head, target = random_pair(steps=2)
    tokens = torch.randint(0, SHAPE.vocabulary, (2, 12))
    counted = torch.rand(2, 12) < 0.5
    lesson = Lesson(torch.randn(2, 12, len(head.ids)), torch.randn(2, 12, 2 * SHAPE.hidden), counted)
    embedding = target.model.embed_tokens.weight.detach()
    found = head_loss(head, embedding, tokens, lesson, head.anchors(counted))
    expected = torch.zeros(())
    for step, guesses in enumerate(guesses_of(head, embedding, tokens, lesson)):
        truth = lesson.logits[:, 1 + step :].softmax(-1)
        each = [
            functional.cross_entropy(guesses[text, row][None], truth[text, row][None])
            for text in range(2)
            for row in range(10)
            if counted[text, row + 1 + step]
        ]
        expected += 0.8**step * torch.stack(each).mean()
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_head_learns_from_conversations(prepared: Workspace, chat_target: Path) -> None:
    recipe = dataclasses.replace(RECIPE, chats=True, tokens=20_000)
    training = train_head(recipe, prepared, chat_target, lambda _line: None)
    first, last = training.history[0], training.history[-1]
    assert last["agreement_0"] > first["agreement_0"] + 0.1
