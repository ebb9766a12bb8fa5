"""Tests of `ssd bench serve` against an endpoint with known delays: figures, traffic, and requests."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.client import Answer
from ssd_serve.bench.client import Endpoint as Api
from ssd_serve.bench.serve import (
    ServePlan,
    arrival_times,
    as_requests,
    by_label,
    detailed,
    latency_rows,
    metric,
    most_at_once,
    run_serve,
    serve_keys,
)
from tests.bench.endpoint import Endpoint, listening

SLACK_MS = 1000.0
"""Allowed delay on a busy machine; a result may never be early."""


def measured(endpoint: Endpoint, count: int = 6, tokens: int = 6, **options: Any) -> dict[str, Any]:
    """Measure an endpoint; options of the API begin with `api_`."""
    fields = {
        name.removeprefix("api_"): options.pop(name) for name in list(options) if name.startswith("api_")
    }
    api: dict[str, Any] = {"exact": False, "token_ids": False, **fields}
    with listening(endpoint) as (_, url):
        wanted = as_requests(["a", "b", "c"], count, tokens, seed=5)
        plan = ServePlan(Api(url, **api), wanted, warm_ups=0, **options)
        return run_serve(plan)


@pytest.mark.parametrize(("chat", "line_end"), [(False, "\n"), (True, "\r\n")])
def test_latencies_are_those_of_the_server(chat: bool, line_end: str) -> None:
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


def test_token_counts_with_and_without_usage() -> None:
    found = measured(Endpoint(per_chunk=4, gap_s=0.04), tokens=12)
    assert found["total_output_tokens"] == 72
    assert 11 * found["mean_tpot_ms"] == pytest.approx(2 * found["mean_itl_ms"])
    found = measured(Endpoint(usage=False))
    assert found["total_output_tokens"] == 36
    assert found["total_input_tokens"] is None
    assert found["total_token_throughput"] is None


def test_goodput_of_a_slow_and_a_fast_server() -> None:
    slow = measured(Endpoint(first_s=0.3), limits={"ttft": 299.0})
    fast = measured(Endpoint(first_s=0.0, gap_s=0.0), limits={"ttft": 60_000.0, "tpot": 60_000.0})
    assert slow["request_goodput"] == 0.0
    assert fast["request_goodput"] == pytest.approx(fast["request_throughput"])


def test_requests_arrive_at_their_rate() -> None:
    endpoint = Endpoint(first_s=0.0, gap_s=0.0)
    before = time.perf_counter()
    measured(endpoint, count=20, rate=40.0)
    times = arrival_times(20, 40.0)
    assert all(seen >= before + at for seen, at in zip(endpoint.arrived_s, times, strict=True))
    assert sorted(body["seed"] for body in endpoint.bodies) == list(range(5, 25))


def test_concurrency_is_limited_by_the_client() -> None:
    held = measured(Endpoint(first_s=0.03), count=9, concurrency=3)
    assert held["max_concurrent_requests"] <= 3
    assert held["p99_client_queue_time_ms"] > 60
    assert measured(Endpoint(first_s=0.5), count=9)["max_concurrent_requests"] > 3


def test_request_bodies_default_and_with_every_option() -> None:
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
    api: dict[str, Any] = {"api_temperature": 0.6, "api_exact": True, "api_model": "mine", "api_chat": True}
    measured(endpoint, count=1, **api, api_more={"top_p": 0.9})
    body = endpoint.bodies[1]
    assert body["messages"] == [{"role": "user", "content": "a"}]
    fields = {name: body[name] for name in ("temperature", "ignore_eos", "model", "top_p")}
    assert fields == {"temperature": 0.6, "ignore_eos": True, "model": "mine", "top_p": 0.9}
    assert body["max_completion_tokens"] == 6
    assert not {"prompt", "max_tokens"} & body.keys()


def test_short_answers_fail_only_with_a_fixed_length() -> None:
    assert measured(Endpoint(short=3))["failed"] == 0
    with pytest.raises(SsdError, match="the stream ended after 3 of 6 tokens"):
        measured(Endpoint(short=3), api_exact=True)


def test_failed_requests_are_counted_with_their_error() -> None:
    found = measured(Endpoint(refuse=frozenset({6})))
    assert (found["completed"], found["failed"]) == (5, 1)
    assert found["errors"] == ['status 500: {"error": {"message": "as ordered"}}']


def test_metrics_are_summed_over_labels() -> None:
    samples = ('position="0",replica="x"} 2', 'position="0",replica="y"} 3', 'position="1"} 1')
    page = "".join(f"a_total{{{sample}\n" for sample in samples) + "b 4.0\n"
    assert (metric(page, "a_total"), metric(page, "b"), metric(page, "c")) == (6.0, 4.0, 0.0)
    assert by_label(page, "a_total", "position") == {"0": 5.0, "1": 1.0}
    assert by_label(page, "a_total", "engine") == {}


@pytest.mark.parametrize(
    ("prefix", "positions", "rates"),
    [
        ("vllm:", {0: 0.5, 1: 0.25, 2: 0.0}, [0.5, 0.25]),
        ("vllm:", {**dict.fromkeys(range(16), 1.0), 16: 0.5}, [*[1.0] * 16, 0.5]),
        ("ssd_", {**dict.fromkeys(range(16), 1.0), 16: 9.5}, [1.0] * 16),
    ],
)
def test_speculation_figures_are_differences_of_metrics(
    prefix: str, positions: dict[int, float], rates: list[float]
) -> None:
    """The last position of `ssd serve` sums all deeper ones, so it is not a rate."""
    found = measured(Endpoint(rounds=7, prefix=prefix, positions=positions), count=1)
    fields = {name: value for name, value in found.items() if name.startswith("spec_decode")}
    assert fields.pop("spec_decode_per_position_acceptance_rates") == pytest.approx(rates)
    assert fields == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 10,
    }


def test_unreachable_endpoint_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"names no model.*is a server there"):
        run_serve(ServePlan(Api("http://127.0.0.1:9"), as_requests(["a"], 1, 1, 0)))


def test_serve_command_writes_and_prints_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, result = tmp_path / "mine.jsonl", tmp_path / "result.json"
    file.write_text('{"prompt": "one"}\n{"question": "two"}\n', encoding="utf-8")
    with listening(Endpoint()) as (endpoint, url):
        words = ["bench", "serve", "--base-url", f"{url}/v1", "--prompts", str(file), "--num-prompts", "4"]
        words += ["--output-len", "5", "--max-concurrency", "2", "--request-rate", "50", "--seed", "3"]
        words += ["--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50", "99"]
        assert main([*words, "--save-detailed", "--backend", "openai-chat", "--json", str(result)]) == 0
    fields = json.loads(result.read_text())
    assert (fields["num_prompts"], fields["request_rate"], fields["max_concurrency"]) == (4, 50.0, 2)
    assert fields["request_goodput"] == pytest.approx(fields["request_throughput"])
    assert len(fields["ttfts"]) == 4
    assert [body["messages"][0]["content"] for body in endpoint.bodies[1:]] == ["one", "two"] * 2
    shown = capsys.readouterr().out
    assert "completed: 4" in shown
    assert "client_queue_time" in shown
    assert [answer["seed"] for answer in fields["answers"]] == [3, 4, 5, 6]
    assert max(answer["latency_s"] for answer in fields["answers"]) == pytest.approx(
        1e-3 * fields["p99_e2el_ms"], rel=0.1
    )


def test_latency_rows_have_every_statistic() -> None:
    rows = latency_rows(serve_keys(ANSWERS, (50.0, 99.0), {}))
    assert [row["ms"] for row in rows] == ["ttft", "tpot", "itl", "e2el", "client_queue_time"]
    assert all(set(row) == {"ms", "mean", "median", "std", "p50", "p99"} for row in rows)


@pytest.mark.parametrize("burstiness", [0.3, 8.0])
def test_arrival_times_end_at_the_rate_and_get_even_with_burstiness(burstiness: float) -> None:
    times = arrival_times(400, 20.0, burstiness, seed=2)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0)
    pauses = np.diff([0.0, *times])
    assert float(pauses.std() / pauses.mean()) == pytest.approx(burstiness**-0.5, rel=0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "speed:3"], "--goodput speed:3: give ttft, tpot or e2el"),
        (["--extra-body", "[1]"], "--extra-body is no JSON object"),
        (["--prompts", "not-there.jsonl"], "cannot read the prompts in not-there.jsonl"),
        (["--request-rate", "0"], "must be greater than 0"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *words]) == 2
    assert message in capsys.readouterr().err


VLLM = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests"),
    *(
        f"{which}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
        for which in ("mean", "median", "std", "p99")
    ),
}
"""Fields that `vllm bench serve` writes, without its lists and its peaks per second."""


def answer(
    sent_s: float,
    first_s: float,
    gap_s: float,
    chunks: int,
    counted: int | None = None,
    queued_s: float = 0.0,
) -> Answer:
    times = [sent_s + first_s + number * gap_s for number in range(chunks)]
    arrivals = tuple((at, 1) for at in times)
    return Answer(sent_s - queued_s, sent_s, times[-1], arrivals, counted=counted, prompt_tokens=20)


FAILED = Answer(0.0, 0.0, 4.0, (), "status 500: no")
ANSWERS = [answer(0.0, 0.5, 0.1, 11), answer(1.0, 0.3, 0.2, 11, queued_s=0.5), FAILED]


def test_result_fields_are_those_of_vllm() -> None:
    assert set(serve_keys(ANSWERS, (99,), {})) == VLLM
    assert {"p50_itl_ms", "p99.9_e2el_ms"} <= set(serve_keys(ANSWERS, (50, 99.9), {}))


def test_throughput_counts_complete_answers_over_the_whole_time() -> None:
    keys = serve_keys(ANSWERS, (99,), {})
    assert (keys["duration"], keys["completed"], keys["failed"]) == (4.0, 2, 1)
    assert keys["request_throughput"] == 0.5
    assert keys["output_throughput"] == 22 / 4
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (40, 22)
    assert keys["total_token_throughput"] == 62 / 4


def test_latencies_exclude_the_client_queue_time() -> None:
    keys = serve_keys(ANSWERS, (99,), {})
    assert keys["mean_ttft_ms"] == pytest.approx(400)
    assert keys["mean_tpot_ms"] == pytest.approx(150)
    assert keys["median_itl_ms"] == pytest.approx(150)
    assert keys["mean_e2el_ms"] == pytest.approx((1500 + 2300) / 2)
    assert keys["std_e2el_ms"] == pytest.approx(400)
    assert keys["p99_ttft_ms"] == pytest.approx(300 + 0.99 * 200)
    assert keys["mean_client_queue_time_ms"] == pytest.approx(250)


def test_time_per_token_counts_tokens_not_chunks() -> None:
    keys = serve_keys([answer(0.0, 0.2, 0.1, 11, counted=41)], (99,), {})
    assert keys["mean_tpot_ms"] == pytest.approx(25)
    assert keys["mean_itl_ms"] == pytest.approx(100)
    assert keys["total_output_tokens"] == 41


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 400.0}, 1),
        ({"tpot": 120.0}, 1),
        ({"ttft": 400.0, "tpot": 120.0}, 0),
        ({"ttft": 501.0, "tpot": 201.0, "e2el": 2400.0}, 2),
        ({"e2el": 1600.0}, 1),
    ],
)
def test_goodput_counts_answers_within_every_limit(limits: dict[str, float], good: int) -> None:
    assert serve_keys(ANSWERS, (99,), limits)["request_goodput"] == good / 4
    assert serve_keys(ANSWERS, (99,), {})["request_goodput"] is None


def test_single_token_has_no_time_per_token() -> None:
    keys = serve_keys([answer(0.0, 0.5, 0.0, 1)], (99,), {"tpot": 1.0})
    assert keys["mean_tpot_ms"] == 0.0
    assert keys["request_goodput"] == 2.0


def test_most_requests_at_once() -> None:
    assert most_at_once([answer(0.0, 1.0, 0.0, 1), answer(1.0, 1.0, 0.0, 1)]) == 1
    assert most_at_once([answer(at, 1.0, 0.0, 1) for at in (0.0, 0.5, 0.9, 1.2)]) == 3


def test_detailed_lists() -> None:
    fields = detailed(ANSWERS)
    assert fields["input_lens"] == [20, 20, None]
    assert fields["output_lens"] == [11, 11, 0]
    assert fields["ttfts"] == pytest.approx([0.5, 0.3, 0.0])
    assert fields["start_times"] == [0.0, 1.0, 0.0]
    assert fields["errors"] == ["", "", "status 500: no"]
