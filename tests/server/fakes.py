"""A byte tokenizer and an engine that plays scripts, behind the real channel.

The tokenizer has a token for every byte, so that characters of several bytes are split over tokens. The
engine runs in a thread at the other end of a socket pair, as the verifier does in its process.
"""

import codecs
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssd_serve.base.draft_messages import PROTOCOL_VERSION, Message
from ssd_serve.base.errors import RequestError
from ssd_serve.base.messages import (
    Abort,
    AcceptanceHealth,
    Committed,
    Figures,
    Finish,
    Finished,
    PromptProgress,
    Ready,
    Refused,
    RequestOptions,
    RoundTrace,
    SamplingParameters,
    SourceFigures,
    Status,
    Submit,
    SubmitChoices,
    TokenLogprobs,
    TraceGrowth,
    TraceNode,
)
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.inflight import Deliver, InflightRequest
from ssd_serve.transport.channel import SocketChannel

BEGIN, END, OTHER_END = 256, 257, 258
VOCABULARY = 259
CONTEXT = 512
PATIENCE_S = 10.0
SPECIAL = {BEGIN: "<begin>", END: "<end>", OTHER_END: "<other-end>"}

READY = Ready(
    target="fake-target",
    draft="fake-draft",
    mode="ssd",
    target_device="cpu:0",
    draft_device="cpu:1",
    context=CONTEXT,
    vocabulary=VOCABULARY,
    slots=4096,
    target_step_ms=20.0,
    draft_step_ms=2.0,
    protocol=PROTOCOL_VERSION,
)
STATUS = Status(
    layout="async",
    attention="triton",
    attention_differences=2,
    health=AcceptanceHealth.COLLAPSED,
    layout_gains={1: {"async": 1.5, "off": 1.0}},
    running=1,
    waiting=2,
    slots_used=1024,
    slots=4096,
    prefix_queries=50,
    prefix_hits=20,
    prompt_tokens=100,
    generation_tokens=300,
    preemptions=0,
    drafters_alive=1,
    drafter_restarts=3,
    totals=Figures(
        rounds=100,
        tokens=300,
        drafted=800,
        accepted=200,
        hits=90,
        misses=10,
        ready_depth=400,
        verified_depths=[10, 0, 40, 48, *[0] * 14, 2],
        accepted_depths=[24, 14, 30, 30, *[0] * 14, 2],
        sources={"draft": SourceFigures(700, 180), "ngram": SourceFigures(150, 50)},
    ),
    forward_s=9.0,
    wait_s=0.5,
    host_s=0.25,
)
FIGURES = Figures(
    rounds=4,
    tokens=12,
    drafted=32,
    accepted=8,
    hits=3,
    misses=1,
    ready_depth=12,
    ready_nodes=40,
    verified_depths=[0, 0, 1, 3],
    accepted_depths=[1, 0, 1, 2],
    sources={"draft": SourceFigures(30, 8), "ngram": SourceFigures(4, 3)},
)


class ByteDetokenizer:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in SPECIAL:
            cut = self._decoder.decode(b"", final=True)
            self._decoder.reset()
            return cut if self._skip else cut + SPECIAL[token]
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    eos_token_ids = frozenset({END})
    special_token_ids = frozenset(SPECIAL)
    template = ""

    def chat_template(self, name: str | None = None, tools: bool = False) -> str:
        if name not in (None, "default"):
            raise RequestError("chat_template: names one of the model's templates", "chat_template")
        return self.template

    def token_bytes(self, token: int) -> bytes:
        return SPECIAL[token].encode() if token in SPECIAL else bytes([token])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = self.stream((), skip_special_tokens)
        return "".join(stream.push(token) for token in ids) + stream.flush()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: object,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise RequestError("the conversation must begin with the user")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: " * add_generation_prompt + "(thinking)" * bool(variables)

    def stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens)


@dataclass(frozen=True)
class Script:
    groups: tuple[tuple[int, ...], ...]
    refused: Refused | None = None
    error: str = ""
    hold_after: int | None = None
    """Play so many groups, then wait until the test releases."""


def say(text: str, *, group: int = 3, hold_after: int | None = None) -> Script:
    return tokens(list(text.encode()), group=group, hold_after=hold_after)


def tokens(ids: Sequence[int], *, group: int = 3, hold_after: int | None = None) -> Script:
    groups = tuple(tuple(ids[i : i + group]) for i in range(0, len(ids), group))
    return Script(groups, hold_after=hold_after)


ScriptOf = Callable[[Submit], Script]


@dataclass
class _Play:
    submit: Submit
    script: Script
    groups: deque[tuple[int, ...]]
    played: int = 0
    tokens: int = 0


def _trace_of(play: _Play, kept: Sequence[int]) -> RoundTrace:
    """A round that accepted a chain and rejected one more node of a source that reads other requests."""
    chain = tuple(TraceNode(token, n - 1, n + 1, ("tiny",), -0.1, 0) for n, token in enumerate(kept[:-1]))
    wrong = TraceNode(ord("#"), len(chain) - 1, len(chain) + 1, ("suffix",), -2.0, 1)
    at_s = 0.05 * play.played
    return RoundTrace(
        start_s=at_s,
        end_s=at_s + 0.04,
        forward_at_s=at_s + 0.01,
        forward_s=0.02,
        waited_s=0.005,
        context=len(play.submit.prompt) + play.tokens - len(kept),
        nodes=(*chain, wrong),
        accepted=tuple(range(len(chain))),
        bonus=kept[-1],
        growth=(TraceGrowth(at_s + 0.015, "tiny", 2),),
        first=play.played == 1,
    )


@dataclass
class FakeEngine:
    channel: SocketChannel
    script_of: ScriptOf
    received: list[Message] = field(default_factory=list[Message])
    released: threading.Event = field(default_factory=threading.Event)
    mute: bool = False
    """Take `Finish` without an answer."""
    prompt_chunk: int = 0
    """Scored prompt tokens per message; 0: half of them."""

    def __post_init__(self) -> None:
        self._plays: dict[int, _Play] = {}
        self._changed = threading.Condition()
        self._outbox: deque[Message] = deque()
        self._over = False
        self._thread = threading.Thread(target=self._live, name="fake engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, message: Message) -> None:
        self._outbox.append(message)

    def die(self) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)

    def sent(self, kind: type[Message]) -> list[Message]:
        with self._changed:
            return [message for message in self.received if isinstance(message, kind)]

    def submits(self) -> list[Submit]:
        return [message for message in self.sent(Submit) if isinstance(message, Submit)]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"did not happen; received: {self.received}")
            time.sleep(0.005)

    @property
    def running(self) -> int:
        return len(self._plays)

    def _live(self) -> None:
        while not self._over and not self.channel.closed:
            self.channel.wait(0.005 if self._plays or self._outbox else 0.02)
            for message in self.channel.receive():
                self._take(message)
            while self._outbox:
                self.channel.send(self._outbox.popleft())
            for play in list(self._plays.values()):
                self._continue(play)
        self.channel.close()

    def _take(self, message: Message) -> None:
        with self._changed:
            self.received.append(message)  # before any answer: who has the answer finds what it answers
        if isinstance(message, SubmitChoices):
            for each in message.each():
                self._take(each)
        elif isinstance(message, Submit):
            script, had = self.script_of(message), len(message.output)
            play = _Play(message, script, deque(script.groups), tokens=had)
            self._plays[message.request] = play
            if had:
                self._end_if_over(play, list(message.output))
        elif isinstance(message, Abort | Finish):
            known = self._plays.pop(message.request, None)
            if known is not None and isinstance(message, Finish) and not self.mute:
                self.channel.send(Finished(message.request, "stop", FIGURES))

    def _continue(self, play: _Play) -> None:
        request, script = play.submit.request, play.script
        if script.refused is not None:
            self._end(
                Refused(request, script.refused.message, script.refused.field, script.refused.retry_after_s)
            )
        elif (
            script.hold_after is not None and play.played >= script.hold_after and not self.released.is_set()
        ):
            return
        elif play.groups:
            self._commit(play, play.groups.popleft())
        elif script.error:
            self._end(Finished(request, "error", FIGURES, message=script.error))
        else:
            self._end(Finished(request, "length", FIGURES))

    def _commit(self, play: _Play, group: tuple[int, ...]) -> None:
        parameters, request = play.submit.parameters, play.submit.request
        kept: list[int] = []
        for token in group[: parameters.max_tokens - play.tokens]:
            kept.append(token)
            if self._ends(play, token, len(kept)):
                break
        of_prompt = self._prompt_logprobs(play) if play.played == 0 else ()
        play.played += 1
        play.tokens += len(kept)
        size = self.prompt_chunk or -(-len(of_prompt) // 2) or 1
        while len(of_prompt) > size:  # a prompt is read in chunks; the last one brings the first token
            self.channel.send(Committed(request, (), prompt_logprobs=of_prompt[:size]))
            of_prompt = of_prompt[size:]
        trace = _trace_of(play, kept) if play.submit.options.trace else None
        if play.submit.options.return_progress and play.played == 1:
            progress = PromptProgress(5, len(play.submit.prompt), 2, 500)
            self.channel.send(Committed(request, (), progress=progress))
        self.channel.send(Committed(request, tuple(kept), self._logprobs(play, kept), of_prompt, trace))
        self._end_if_over(play, kept)

    @staticmethod
    def _ends(play: _Play, token: int, more: int = 0) -> bool:
        parameters = play.submit.parameters
        ending = set(parameters.stop_token_ids) | (set() if parameters.ignore_eos else {END})
        return token in ending and play.tokens + more > parameters.min_tokens

    def _end_if_over(self, play: _Play, newest: Sequence[int]) -> None:
        request = play.submit.request
        if newest and self._ends(play, newest[-1]):
            self._end(Finished(request, "stop", FIGURES, stop_token=newest[-1]))
        elif play.tokens >= play.submit.parameters.max_tokens:
            self._end(Finished(request, "length", FIGURES))

    def _prompt_logprobs(self, play: _Play) -> tuple[TokenLogprobs, ...]:
        if play.submit.parameters.prompt_logprobs is None:
            return ()
        return tuple(
            TokenLogprobs(-float(place), ((122, -0.1),)) for place in range(1, len(play.submit.prompt))
        )

    def _logprobs(self, play: _Play, kept: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        count = play.submit.parameters.logprobs
        if count is None:
            return ()
        top = ((ord("a"), -0.25), (ord("b"), -1.5), (ord("c"), float("-inf")))[:count]
        return tuple(TokenLogprobs(-0.5, top) for _ in kept)

    def _end(self, message: Finished | Refused) -> None:
        self._plays.pop(message.request, None)
        self.channel.send(message)


def channel_pair() -> tuple[SocketChannel, SocketChannel]:
    ours, theirs = socket.socketpair()
    return SocketChannel(ours), SocketChannel(theirs)


def submit(
    client: EngineClient,
    prompt: tuple[int, ...],
    parameters: SamplingParameters,
    seed: int,
    deliver: Deliver,
    options: RequestOptions = RequestOptions(),
) -> int:
    number = client.next_number()
    client.submit([InflightRequest(Submit(number, prompt, parameters, seed, options=options), deliver)])
    return number
