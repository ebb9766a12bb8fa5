"""Conversations as training text, and the target's outputs for them, which are computed once and kept in a file.

A head learns only where the target answers. Knows JSON lines and the chat template; knows nothing of heads.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import UserError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.data import Ids, Stream, Workspace, load_tokenizer
from ssd_serve.recipes.training import Lesson, Teacher

Flags = npt.NDArray[np.bool_]
LONGEST = 2048
"""Tokens after which a conversation is cut."""
_HELD_OUT = 20
"""One conversation of this number is held out."""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Line(msgspec.Struct, frozen=True):
    """A conversation, or a text and its continuation."""

    messages: list[_Message] = msgspec.field(default_factory=list[_Message])
    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation int64 [n], and which of them the target wrote."""

    ids: Ids
    answers: Flags


def read_conversations(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Conversation]:
    """Read JSON lines with `messages`, or with `prompt` and `completion`. Raises `UserError` for others."""
    found: list[Conversation] = []
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        for number, line in enumerate(lines, 1):
            try:
                record = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise UserError(f"{path}, line {number}: {error}") from error
            parts = list(_parts(record, tokenizer))
            if not any(answer for _, answer in parts):
                raise UserError(
                    f"{path}, line {number} has no answer: give messages with one of the role assistant, or "
                    "prompt and completion"
                )
            ids = np.concatenate([np.asarray(part, np.int64) for part, _ in parts])
            answers = np.concatenate([np.full(len(part), answer) for part, answer in parts])
            found.append(Conversation(ids[:LONGEST], answers[:LONGEST]))
    return found


def _parts(record: _Line, tokenizer: Tokenizer) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each part and whether it is an answer; a server encodes them apart, too."""
    if record.completion:
        yield tokenizer.encode(record.prompt), False
        yield tokenizer.encode(record.completion, add_special_tokens=False), True
    messages: list[Mapping[str, Any]] = [msgspec.to_builtins(each) for each in record.messages]
    done = 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:index])
            # Only white space follows the end token of an answer.
            whole = tokenizer.apply_chat_template(messages[: index + 1], False).rstrip()
            yield tokenizer.encode(prompt[done:], add_special_tokens=False), False
            yield tokenizer.encode(whole[len(prompt) :], add_special_tokens=False), True
            done = len(whole)


def prepare_chats(
    workspace: Workspace, conversations: Sequence[Conversation], target: Path, min_tokens: int
) -> None:
    """Write the token streams. Every twentieth conversation is held out."""
    held_out, train = conversations[_HELD_OUT - 1 :: _HELD_OUT], list(conversations)
    del train[_HELD_OUT - 1 :: _HELD_OUT]
    both, tokenizer, digest = (*train, *held_out), load_tokenizer(target), hashlib.sha256()
    for each in both:
        digest.update(each.ids.tobytes() + each.answers.tobytes())
    if workspace.is_prepared(tokenizer, digest.hexdigest()):
        return
    workspace.folder.mkdir(parents=True, exist_ok=True)
    np.save(workspace.folder / "answers.npy", np.concatenate([each.answers for each in both]))
    np.save(workspace.folder / "ends.npy", np.cumsum([len(each.ids) for each in both]))
    texts = [[each.ids for each in part] for part in (train, held_out)]
    workspace.write(texts[0], texts[1], tokenizer, digest.hexdigest(), min_tokens)


class ChatLessons:
    """The target's outputs for each token of the conversations, from a file that is completed first.

    Windows are cut from places of the stream instead of tokens. The last vector of a place is the input of the
    target's LM head.
    """

    def __init__(
        self, workspace: Workspace, teacher: Teacher, head: Tensor, features: Sequence[int] | None = None
    ) -> None:
        """`head` is the matrix of the target's LM head, [vocabulary, hidden]; `features` are the layers that lessons
        give the outputs of, all of the teacher's but the last if None."""
        self._head, self._hidden, folder = head, head.shape[1], workspace.folder
        train = workspace.stream().astype(np.int64)
        self._trained, tokens = len(train), np.concatenate([train, *workspace.held_out()])
        self._tokens = torch.from_numpy(tokens)
        # The target's distribution at a place counts where an answer's token follows.
        answers: Flags = np.load(folder / "answers.npy")
        self._counted = torch.from_numpy(np.append(answers[1:], False))
        layers = teacher.layers[:-1]
        ends, file = np.load(folder / "ends.npy"), folder / f"outputs-{'-'.join(map(str, layers))}.bin"
        for other in folder.glob("outputs-*.bin"):  # with more layers, for another head
            kept = tuple(int(each) for each in other.stem.split("-")[1:] if each)
            whole = len(tokens) * (len(kept) + 1) * self._hidden * torch.bfloat16.itemsize
            if set(layers) < set(kept) and other.stat().st_size == whole:
                layers, file = kept, other
        places = (*layers, FINAL)
        self._outputs = _completed(file, tokens, ends, teacher, len(places) * self._hidden)
        self._columns = [places.index(each) for each in (features or teacher.layers[:-1])]

    def stream(self) -> Stream:
        """Return the places of the training conversations."""
        return np.arange(self._trained, dtype=np.uint32)

    def held_out(self) -> list[Ids]:
        """Return the places of the held-out conversations, as one text: conversations are short."""
        return [np.arange(self._trained, len(self._tokens))]

    def counts(self, vocabulary: int) -> Ids:
        """Return how often each token follows in an answer: int64 [vocabulary]."""
        following = self._tokens[1 : self._trained][self._counted[: self._trained - 1]]
        return np.bincount(following.numpy(), minlength=vocabulary)

    def read(self, places: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Lesson]:
        """Return the tokens at places int64 [texts, length], and their lesson over the tokens `ids`."""
        device, places = places.device, places.cpu()
        outputs = self._outputs[places].to(device)
        head = self._head if ids is None else self._head[ids]
        logits = (outputs[..., -self._hidden :].to(head.dtype) @ head.T).float()
        parts = torch.split(outputs, self._hidden, dim=-1)
        features = torch.cat([parts[each] for each in self._columns], dim=-1) if self._columns else None
        lesson = Lesson(logits, features, self._counted[places].to(device))
        return self._tokens[places].to(device), lesson


def _completed(file: Path, tokens: Ids, ends: Ids, teacher: Teacher, width: int) -> Tensor:
    """Return the outputs bf16 [tokens, width], mapped from `file`, after those that it lacks are computed."""
    row = width * torch.bfloat16.itemsize
    with file.open("ab") as written:
        first = int(np.searchsorted(ends, written.tell() // row, side="right"))
        written.truncate((int(ends[first - 1]) if first else 0) * row)
        for document in np.split(tokens, ends[:-1])[first:]:
            outputs = teacher.outputs(document).to("cpu", torch.bfloat16)
            written.write(outputs.view(torch.int16).numpy().tobytes())
    kept = torch.from_file(str(file), shared=False, size=len(tokens) * width, dtype=torch.bfloat16)
    return kept.view(len(tokens), width)
