"""`ssd bench serve` against an endpoint whose delays are known: figures, traffic, and what it asks for."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.load.arrivals import arrival_times
from ssd_serve.bench.load.client import Endpoint as Api
from ssd_serve.bench.load.serve import ServePlan, as_requests, run_serve, serve_table
from tests.bench.load.endpoint import Endpoint, listening

SLACK_MS = 1000.0
"""A busy machine may be as late as that; never early."""


def measured(endpoint: Endpoint, count: int = 6, tokens: int = 6, **options: Any) -> dict[str, Any]:
    """Its figures, of as many requests; options of the API begin with `api_`."""
    told = {name.removeprefix("api_"): options.pop(name) for name in list(options) if name.startswith("api_")}
    api: dict[str, Any] = {"exact": False, "token_ids": False, **told}
    with listening(endpoint) as (_, url):
        wanted = as_requests(["a", "b", "c"], count, tokens, seed=5)
        plan = ServePlan(Api(url, **api), wanted, warm_ups=0, **options)
        return run_serve(plan)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_latencies_are_the_servers(chat: bool, line_end: str) -> None:
    endpoint = Endpoint(first_s=0.06, gap_s=0.02, line_end=line_end)
    found = measured(endpoint, api_chat=chat)
    assert (found["completed"], found["failed"]) == (6, 0)
    assert 60 <= found["median_ttft_ms"] < 60 + SLACK_MS
    assert found["median_tpot_ms"] < 20 + SLACK_MS
    assert found["mean_e2el_ms"] - found["mean_ttft_ms"] == pytest.approx(5 * found["mean_tpot_ms"])
    assert 160 <= found["median_e2el_ms"] < 160 + SLACK_MS
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (42, 36)
    assert found["output_throughput"] == pytest.approx(36 / found["duration"])
    assert set(endpoint.paths) == {"/v1/chat/completions" if chat else "/v1/completions"}


def test_the_server_says_how_many_tokens_its_chunks_were() -> None:
    found = measured(Endpoint(per_chunk=4, gap_s=0.04), tokens=12)
    assert found["total_output_tokens"] == 72
    assert 11 * found["mean_tpot_ms"] == pytest.approx(2 * found["mean_itl_ms"])


def test_a_server_that_counts_nothing_is_measured_by_its_chunks() -> None:
    found = measured(Endpoint(usage=False))
    assert found["total_output_tokens"] == 36
    assert found["total_input_tokens"] is None


def test_limits_between_the_delays_of_two_servers_tell_them_apart() -> None:
    slow = measured(Endpoint(first_s=0.3), limits={"ttft": 299.0})
    fast = measured(Endpoint(first_s=0.0, gap_s=0.0), limits={"ttft": 60_000.0, "tpot": 60_000.0})
    assert slow["request_goodput"] == 0.0
    assert fast["request_goodput"] == pytest.approx(fast["request_throughput"])


def test_arrivals_come_at_their_rate() -> None:
    endpoint = Endpoint(first_s=0.0, gap_s=0.0)
    before = time.perf_counter()
    measured(endpoint, count=20, rate=40.0)
    times = arrival_times(20, 40.0)
    assert all(seen >= before + at for seen, at in zip(endpoint.arrived_s, times, strict=True))
    assert sorted(body["seed"] for body in endpoint.bodies) == list(range(5, 25))


def test_no_more_than_the_concurrency_run_at_once() -> None:
    held = measured(Endpoint(first_s=0.03), count=9, concurrency=3)
    assert held["max_concurrent_requests"] <= 3
    assert held["p99_client_queue_time_ms"] > 60
    assert measured(Endpoint(first_s=0.5), count=9)["max_concurrent_requests"] > 3


def test_a_request_asks_for_what_any_openai_server_knows() -> None:
    endpoint = Endpoint()
    measured(endpoint, count=1)
    assert endpoint.bodies == [
        {
            "model": "model-of-truth",
            "prompt": "a",
            "max_tokens": 6,
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_what_is_said_of_requests_reaches_the_server() -> None:
    endpoint = Endpoint()
    api: dict[str, Any] = {"api_temperature": 0.6, "api_exact": True, "api_model": "mine", "api_chat": True}
    measured(endpoint, count=1, **api, api_more={"top_p": 0.9})
    (body,) = endpoint.bodies
    assert body["messages"] == [{"role": "user", "content": "a"}]
    told = {name: body[name] for name in ("temperature", "ignore_eos", "model", "top_p")}
    assert told == {"temperature": 0.6, "ignore_eos": True, "model": "mine", "top_p": 0.9}
    assert body["max_completion_tokens"] == 6
    assert "prompt" not in body
    assert "max_tokens" not in body


def test_answers_may_end_sooner_unless_their_length_was_fixed() -> None:
    assert measured(Endpoint(short=3))["failed"] == 0
    with pytest.raises(SsdError, match="the stream ended after 3 of 6 tokens"):
        measured(Endpoint(short=3), api_exact=True)


def test_single_failures_are_counted_and_told() -> None:
    found = measured(Endpoint(refuse=frozenset({6})))
    assert (found["completed"], found["failed"]) == (5, 1)
    assert found["errors"] == ['status 500: {"error": {"message": "as ordered"}}']


def test_what_the_page_of_metrics_tells_of_speculation_is_the_difference() -> None:
    found = measured(Endpoint(rounds=7), count=1)
    told = {name: value for name, value in found.items() if name.startswith("spec_decode")}
    assert told == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 10,
    }


@pytest.mark.parametrize(
    ("prefix", "positions", "rates"),
    [
        ("vllm:", {0: 0.5, 1: 0.25, 2: 0.0}, [0.5, 0.25]),
        ("vllm:", {**dict.fromkeys(range(16), 1.0), 16: 0.5}, [*[1.0] * 16, 0.5]),
        ("ssd_", {**dict.fromkeys(range(16), 1.0), 16: 9.5}, [1.0] * 16),
    ],
)
def test_acceptance_by_position_is_told_down_to_the_deepest(
    prefix: str, positions: dict[int, float], rates: list[float]
) -> None:
    """This server's last position stands for all deeper ones together, which is no rate."""
    found = measured(Endpoint(rounds=7, prefix=prefix, positions=positions), count=1)
    assert found["spec_decode_per_position_acceptance_rates"] == pytest.approx(rates)
    shown = serve_table(found).splitlines()[1]
    assert shown.startswith(f"speculation: 2.00 tokens a round, accepted by position: {100 * rates[0]:.1f} %")


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"names no model.*is a server there"):
        run_serve(ServePlan(Api("http://127.0.0.1:9"), as_requests(["a"], 1, 1, 0)))


def test_the_command_writes_the_result_and_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, result = tmp_path / "mine.jsonl", tmp_path / "result.json"
    file.write_text('{"prompt": "one"}\n{"question": "two"}\n', encoding="utf-8")
    with listening(Endpoint()) as (endpoint, url):
        words = ["bench", "serve", "--base-url", f"{url}/v1", "--prompts", str(file), "--num-prompts", "4"]
        words += ["--output-len", "5", "--max-concurrency", "2", "--request-rate", "50", "--seed", "3"]
        words += ["--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50", "99"]
        assert main([*words, "--save-detailed", "--backend", "openai-chat", "--json", str(result)]) == 0
    told = json.loads(result.read_text())
    assert (told["num_prompts"], told["request_rate"], told["max_concurrency"]) == (4, 50.0, 2)
    assert told["request_goodput"] == pytest.approx(told["request_throughput"])
    assert len(told["ttfts"]) == 4
    assert [body["messages"][0]["content"] for body in endpoint.bodies[1:]] == ["one", "two"] * 2
    assert "4 requests in" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_latency() -> None:
    text = serve_table(measured(Endpoint(), limits={"ttft": 1e6}, percents=(50.0, 99.0), rate=math.inf))
    assert "good requests/s" in text
    for row in ("time to the first token", "time per token after it", "whole request"):
        assert row in text
    assert "p99" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "speed:3"], "--goodput speed:3: give ttft, tpot or e2el"),
        (["--goodput", "ttft"], "--goodput ttft: give"),
        (["--extra-body", "[1]"], "--extra-body is no JSON object"),
        (["--prompts", "not-there.jsonl"], "cannot read the prompts in not-there.jsonl"),
        (["--request-rate", "0"], "must be greater than 0"),
    ],
)
def test_wrong_words_are_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *words]) == 2
    assert message in capsys.readouterr().err
