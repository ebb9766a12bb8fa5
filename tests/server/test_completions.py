"""`/v1/completions`: text, choices, usage, seeds, echo, logprobs, streams."""

import pytest

from ssd_serve.base.messages import Refused, Submit
from ssd_serve.base.seeds import choice_seed
from tests.server.fakes import BEGIN, CONTEXT, END, OTHER_END, ByteTokenizer, Script, say, tokens
from tests.server.running_server import events, post, running_server

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
ASK = [{"role": "user", "content": "Hi"}]


async def test_completion_response_with_speculation_figures() -> None:
    async with running_server(lambda _: say("Hello, world!")) as server:
        found = await post(server, PATH, prompt="Say it", max_tokens=13, seed=7, model="ssd-embedded")
    assert found["id"].startswith("cmpl-")
    assert found["system_fingerprint"].startswith("fp_")
    assert (found["object"], found["model"], found["seed"]) == ("text_completion", "ssd-embedded", 7)
    end = {"finish_reason": "length", "stop_reason": None}
    assert found["choices"] == [{"index": 0, "text": "Hello, world!", "logprobs": None, **end}]
    counts = {"prompt_tokens": 7, "completion_tokens": 13, "total_tokens": 20}
    assert found["usage"] == {**counts, "prompt_tokens_details": None}
    figures = found["metrics"]["speculative_decoding"]
    assert (figures["num_spec_steps"], figures["mean_acceptance_length"]) == (4, 3.0)
    assert (figures["draft_acceptance_rate"], figures["cache_hit_rate"]) == (0.25, 0.75)
    assert figures["acceptance_histogram"] == [1, 0, 1, 2]
    assert figures["acceptance_by_depth"] == [0.75, 0.75, pytest.approx(2 / 3)]
    assert figures["sources"] == {
        "draft": {"num_draft_tokens": 30, "num_accepted_draft_tokens": 8},
        "ngram": {"num_draft_tokens": 4, "num_accepted_draft_tokens": 3},
    }


async def test_streamed_choices_with_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_server(lambda submit: say(f"seed {submit.seed % 1000}", group=2)) as server:
        found = await events(server, PATH, prompt="Say it", n=2, seed=5, stream_options=options)
    texts = {0: "", 1: ""}
    for chunk in found[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {i: f"seed {choice_seed(5, i) % 1000}" for i in range(2)}
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, sum(map(len, texts.values())))
    assert all(chunk["usage"]["prompt_tokens"] == 7 for chunk in found)


async def test_completion_stream_with_final_usage() -> None:
    options = {"include_usage": True}
    async with running_server(lambda _: say("Hello, world!")) as server:
        found = await events(server, PATH, prompt="Say it", max_tokens=13, stream_options=options)
        plain = await events(server, PATH, prompt="Say it", max_tokens=13)
    assert all("usage" not in chunk for chunk in plain)
    *chunks, last = found
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world!"
    assert isinstance(chunks[0]["seed"], int)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 13
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 4
    assert len({chunk["id"] for chunk in found}) == 1


async def test_random_seed_is_reported_and_repeats_output() -> None:
    async with running_server(lambda _: say("Hi")) as server:
        first = await post(server, PATH, prompt="x")
        second = await post(server, PATH, prompt="x")
        await post(server, PATH, prompt="x", seed=first["seed"])
        submits = server.engine.submits()
    assert first["seed"] != second["seed"]
    assert submits[2].seed == submits[0].seed == first["seed"]


async def test_choices_have_own_seeds_and_prompt_counts_once() -> None:
    async with running_server(lambda submit: say(f"seed {submit.seed % 1000}")) as server:
        found = await post(server, PATH, prompt=["ab", "c"], n=3, best_of=3, seed=5)
        submits = server.engine.submits()
    expected = [choice_seed(5, i) for i in range(3)]
    assert [submit.seed for submit in submits] == expected * 2
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in found["choices"]] == [f"seed {seed % 1000}" for seed in expected] * 2
    # Each prompt counts once, not once a choice.
    assert found["usage"]["prompt_tokens"] == 3 + 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(BEGIN, 97, 98)]),
        (["ab", "c"], [(BEGIN, 97, 98), (BEGIN, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
async def test_prompt_forms_text_texts_ids_id_lists(prompt: object, expected: list[tuple[int, ...]]) -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, prompt=prompt)
        assert [submit.prompt for submit in server.engine.submits()] == expected


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "min_tokens": 2,
        "max_tokens": 20,
        "ignore_eos": True,
        "logprobs": 2,
    }
    ids = {"allowed_token_ids": [97, 98, 99], "stop_token_ids": [99]}
    biases = {"97": -100, "98": 5}
    async with running_server(lambda _: say("x")) as server:
        await post(
            server, PATH, prompt="a", top_k=-1, bad_words=["ab", " c"], logit_bias=biases, **same, **ids
        )
        parameters = server.engine.submits()[0].parameters
    assert {name: getattr(parameters, name) for name in same} == same
    assert {name: getattr(parameters, name) for name in ids} == {name: tuple(ids[name]) for name in ids}
    assert parameters.top_k == 0
    assert parameters.logit_bias == {97: -100.0, 98: 5.0}
    assert parameters.bad_words == ((97, 98), (99,))


class WordTokenizer(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        known = {
            " cat": [200],
            "cat": [201],
            " dog": [202, 203],
            "dog": [204],
            " eel": [205],
            "eel": [101, 108],
        }
        return known[text] if text in known else super().encode(text, add_special_tokens)


async def test_bad_words_are_banned_with_and_without_leading_space() -> None:
    async with running_server(lambda _: say("x"), tokenizer=WordTokenizer()) as server:
        await post(server, PATH, prompt="a", bad_words=[" cat", "dog", "eel", "ox", "cat"])
        parameters = server.engine.submits()[0].parameters
    assert parameters.bad_words == ((201,), (200,), (204,), (202, 203), (101, 108), (205,), (111, 120))


async def test_null_means_the_default_and_max_tokens_fit_the_context() -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, prompt="a")
        await post(
            server, PATH, prompt="a", temperature=None, max_tokens=None, n=None, stop=None, suffix=None
        )
        await post(server, PATH, prompt=[97] * (CONTEXT - 5))
        first, second, long = (submit.parameters for submit in server.engine.submits())
    assert first == second
    assert long.max_tokens == 5
    assert (first.temperature, first.max_tokens) == (1.0, 16)


async def test_echo_returns_prompt_before_output() -> None:
    async with running_server(lambda _: say("!")) as server:
        assert (await post(server, PATH, prompt="Hé", echo=True))["choices"][0]["text"] == "Hé!"
        assert (await post(server, PATH, prompt=[97, 98], echo=True))["choices"][0]["text"] == "ab!"
        found = await events(server, PATH, prompt=["a", "b"], echo=True)
    texts = ["", ""]
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["a!", "b!"]


async def test_echo_with_logprobs_returns_prompt_logprobs_first() -> None:
    async with running_server(lambda _: say("xyz", group=2)) as server:
        found = await post(server, PATH, prompt=["Hé!", "ab"], echo=True, logprobs=1, max_tokens=3, n=2)
        plain = await post(server, PATH, prompt="Hé!", logprobs=1, max_tokens=3)
        asked = [submit.parameters.prompt_logprobs for submit in server.engine.submits()]
    assert asked == [1, 1, 1, 1, None]
    assert [choice["text"] for choice in found["choices"]] == ["Hé!xyz"] * 2 + ["abxyz"] * 2
    told = found["choices"][1]["logprobs"]
    assert told["tokens"] == ["<begin>", "H", r"bytes:\xc3", r"bytes:\xa9", "!", "x", "y", "z"]
    assert told["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -0.5, -0.5, -0.5]
    assert told["top_logprobs"][:2] == [None, {"H": -1.0, "z": -0.1}]
    assert told["text_offset"] == [0, 0, 1, 1, 2, 3, 4, 5]
    assert found["usage"]["completion_tokens"] == 12
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] == 16
    assert plain["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]


@pytest.mark.parametrize("said", [[120], [END]])
async def test_max_tokens_0_scores_the_prompt_only(said: list[int]) -> None:
    body: dict[str, object] = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    async with running_server(lambda _: tokens(said)) as server:
        found = await post(server, PATH, **body)
        assert server.engine.submits()[0].parameters.max_tokens == 1
        streamed = await events(server, PATH, prompt="ab", max_tokens=0, return_token_ids=True)
        refused = await server.http.post(PATH, json={**body, "min_tokens": 1})
    for choice in found["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "length", None)
        assert choice["logprobs"]["tokens"] == ["<begin>", "a", "b"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert (found["usage"]["completion_tokens"], found["usage"]["total_tokens"]) == (0, 3)
    assert found["metrics"]["speculative_decoding"]["num_tokens"] == 0
    assert [chunk["choices"][0]["token_ids"] for chunk in streamed if "token_ids" in chunk["choices"][0]] == [
        []
    ]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


async def test_completion_logprobs_have_tokens_values_and_offsets() -> None:
    async with running_server(lambda _: say("xyz")) as server:
        whole = await post(server, PATH, prompt="a", logprobs=3)
        pieces = await events(server, PATH, prompt="a", logprobs=3)
    # The chosen token is always among them; minus infinity becomes a number that JSON has.
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["x", "y", "z"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{token: -0.5, "a": -0.25, "b": -1.5, "c": -9999.0} for token in "xyz"],
        "text_offset": [0, 1, 2],
    }
    streamed = [chunk["choices"][0]["logprobs"] for chunk in pieces if chunk["choices"][0]["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == ["x", "y", "z"]


async def test_return_token_ids() -> None:
    async with running_server(lambda _: say("xyz")) as server:
        whole = await post(server, PATH, prompt="a", return_token_ids=True)
        pieces = await events(server, PATH, prompt="a", return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == list(b"xyz")
    assert whole["choices"][0]["prompt_token_ids"] == [BEGIN, 97]
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [BEGIN, 97]
    assert [i for chunk in pieces for i in chunk["choices"][0].get("token_ids", [])] == list(b"xyz")


async def test_eos_token_counts_but_its_text_is_hidden() -> None:
    async with running_server(lambda _: tokens([*b"done", END, *b"beyond"])) as server:
        found = await post(server, PATH, prompt="a")
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("done", "stop", END)
    assert found["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("said", "fields", "text"),
    [
        ([*b"done", OTHER_END], {"stop_token_ids": [OTHER_END]}, "done"),
        (
            [*b"done", OTHER_END],
            {"stop_token_ids": [OTHER_END], "include_stop_str_in_output": True},
            "done<other-end>",
        ),
        ([*b"a", END, *b"b"], {"ignore_eos": True}, "a<end>b"),
        ([*b"a", END, *b"b"], {"min_tokens": 3}, "a<end>b"),
        ([*b"a", END, *b"b"], {"ignore_eos": True, "skip_special_tokens": True}, "ab"),
    ],
)
async def test_text_of_stop_and_eos_tokens(said: list[int], fields: dict[str, object], text: str) -> None:
    async with running_server(lambda _: tokens(said)) as server:
        found = await post(server, PATH, **{"prompt": "a", "skip_special_tokens": False, **fields})
    assert found["choices"][0]["text"] == text


async def test_engine_refusal_returns_400_with_field() -> None:
    def refuse(_submit: Submit) -> Script:
        return Script((), refused=Refused(0, "min_p is not for this model", "min_p"))

    async with running_server(refuse) as server:
        for stream in (False, True):
            answer = await server.http.post(PATH, json={"prompt": "a", "stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "min_p"


async def test_engine_error_returns_500_or_error_event() -> None:
    async with running_server(lambda _: Script((tuple(b"ab"),), error="out of luck")) as server:
        whole = await server.http.post(PATH, json={"prompt": "a"})
        stream = await server.http.post(PATH, json={"prompt": "a", "stream": True})
    assert whole.status_code == 500
    assert "out of luck" in whole.json()["error"]["message"]
    assert stream.status_code == 200
    assert '"code":"engine_error"' in stream.text
    assert "[DONE]" not in stream.text


async def test_truncate_prompt_tokens_keeps_end_of_prompt() -> None:
    async with running_server(lambda _: say("x")) as server:
        for prompt, most, kept in [
            ("abcdef", 4, [BEGIN, *b"def"]),
            ("abcdef", 1, [*b"f"]),
            ("abc", 9, [BEGIN, *b"abc"]),
            ([1, 2, 3], 2, [2, 3]),
            ("ab" * 100_000, 3, [BEGIN, *b"ab"]),
            ([7] * CONTEXT * 2, 2, [7, 7]),
        ]:
            await post(server, PATH, prompt=prompt, truncate_prompt_tokens=most)
            assert list(server.engine.submits()[-1].prompt) == kept
        await post(server, PATH, prompt=[7] * CONTEXT * 2, truncate_prompt_tokens=-1, max_tokens=10)
        assert len(server.engine.submits()[-1].prompt) == CONTEXT - 10
        wrong = await server.http.post(PATH, json={"prompt": "a", "truncate_prompt_tokens": 0})
    assert wrong.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_prompt_logprobs_without_echo() -> None:
    async with running_server(lambda _: say("x")) as server:
        told = await post(server, PATH, prompt="ab", prompt_logprobs=1, add_special_tokens=False)
        chat = await post(server, "/v1/chat/completions", messages=ASK, prompt_logprobs=0)
        streamed = await server.http.post(PATH, json={"prompt": "a", "stream": True, "prompt_logprobs": 1})
    assert told["choices"][0]["text"] == "x"
    assert told["choices"][0]["prompt_logprobs"] == [
        None,
        {
            str(ord("b")): {"logprob": -1.0, "rank": None, "decoded_token": "b"},
            str(ord("z")): {"logprob": -0.1, "rank": 1, "decoded_token": "z"},
        },
    ]
    assert len(chat["choices"][0]["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert streamed.status_code == 400


async def test_priority_reaches_engine() -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, prompt=["a", "b"], n=2, priority=-3)
        await post(server, PATH, prompt="a")
        assert [each.options.priority for each in server.engine.submits()] == [-3] * 4 + [0]
