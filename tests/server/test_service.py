"""Health, models, metrics and the rest; loading, engine death, shutting down."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from ssd_serve.base.messages import (
    CostEstimate,
    DecisionMessage,
    DecisionReason,
    Progress,
    Ready,
    Status,
)
from ssd_serve.base.settings import Settings
from ssd_serve.bench.serve import metric
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.information import Load
from ssd_serve.server.limits import Limits
from ssd_serve.server.observability.metrics import ServerMetrics, join_pages
from ssd_serve.server.service import model_name
from tests.server.fakes import CONTEXT, FIGURES, READY, STATUS, say
from tests.server.running_server import RunningServer, post, running_server

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


async def until_told(server: RunningServer, message: Progress | Status | Ready) -> None:
    server.engine.tell(message)
    client = server.client
    while message not in (client.status, client.ready) and client.progress != getattr(message, "text", None):
        await asyncio.sleep(0.002)


async def test_health_is_503_until_ready() -> None:
    async with running_server(lambda _: say("x"), ready=False) as server:
        await until_told(server, Progress("reading weights"))
        loading = await server.http.get("/health")
        refused = await server.http.post(COMPLETIONS, json={"prompt": "a"})
        await until_told(server, READY)
        ready = await server.http.get("/health")
        pinged = await server.http.get("/ping")
    assert (loading.status_code, refused.status_code) == (503, 503)
    assert "reading weights" in loading.json()["error"]["message"]
    assert loading.json()["error"]["code"] == "loading"
    assert "retry-after" in refused.headers
    assert (ready.status_code, pinged.status_code) == (200, 200)
    assert ready.json() == {"status": "ok", "model": "ssd-embedded", "mode": "ssd"}


async def test_engine_death_ends_requests_and_health() -> None:
    async with running_server(lambda _: say("abcdef", hold_after=1)) as server:
        bodies = [{"prompt": "a", "stream": stream} for stream in (False, True)]
        held = [asyncio.ensure_future(server.http.post(COMPLETIONS, json=body)) for body in bodies]
        while server.client.active < 2:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.engine.die)
        whole, stream = [await one for one in held]
        health = await server.http.get("/health")
        later = await server.http.post(COMPLETIONS, json={"prompt": "a"})
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_dead"
    assert stream.status_code == 200
    assert "abc" in stream.text
    assert '"code":"engine_dead"' in stream.text.split("\n\n")[-2]
    assert "[DONE]" not in stream.text
    assert (health.status_code, later.status_code) == (503, 503)
    assert "engine process ended" in health.json()["error"]["message"]


async def test_silent_engine_makes_health_503() -> None:
    async with running_server(lambda _: say("x"), limits=Limits(engine_silence_s=0.05)) as server:
        await asyncio.sleep(0.1)
        answer = await server.http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_silent"


async def test_shutdown_refuses_new_requests() -> None:
    async with running_server(lambda _: say("abc", hold_after=0)) as server:
        held = asyncio.ensure_future(post(server, COMPLETIONS, prompt="a"))
        while server.client.active < 1:
            await asyncio.sleep(0.002)
        server.gate.closed = True
        refused = await server.http.post(COMPLETIONS, json={"prompt": "a"})
        health = await server.http.get("/health")
        server.engine.released.set()
        assert (await held)["choices"][0]["text"] == "abc"
    assert (refused.status_code, health.status_code) == (503, 503)
    assert refused.json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_server_does_not_import_torch() -> None:
    program = (
        "import sys, ssd_serve.server.http.serving, ssd_serve.server.banner; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_models_version_and_load() -> None:
    async with running_server(lambda _: say("x"), Settings(served_model_name="mine")) as server:
        models = (await server.http.get("/v1/models")).json()
        one = await server.http.get("/v1/models/mine")
        other = await server.http.get("/v1/models/org/other")
        version = (await server.http.get("/version")).json()
        load = (await server.http.get("/load")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["mine"]
    assert models["data"][0]["max_model_len"] == CONTEXT
    assert (models["data"][0]["root"], models["data"][0]["revision"]) == ("embedded", None)
    assert one.json() == models["data"][0]
    assert other.status_code == 404
    assert version["version"]
    assert load == {"server_load": 0, "machine_busy": False, "other_cores": 0.0}


async def test_model_card_has_the_commit_of_the_engine() -> None:
    async with running_server(lambda _: say("x"), Settings(target="org/model")) as server:
        before = (await server.http.get("/v1/models")).json()["data"][0]
        server.client.target = f"org/model@{'a' * 40}"
        card = (await server.http.get("/v1/models")).json()["data"][0]
    assert (before["root"], before["revision"]) == ("org/model", None)
    assert (card["root"], card["revision"]) == ("org/model", "a" * 40)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("embedded", "ssd-embedded"),
        ("org/model-7b", "org/model-7b"),
        ("/data/models/model-7b/", "model-7b"),
        ("./model", "model"),
    ],
)
def test_model_name_from_target(target: str, name: str) -> None:
    assert model_name(Settings(target=target)) == name


async def test_load_has_the_last_decision() -> None:
    decided = DecisionMessage(
        "off", DecisionReason.SLOWER, 0, 0.0, CostEstimate(0, 3.0, 0.02), CostEstimate(None, 3.0, 0.024)
    )
    async with running_server(lambda _: say("x")) as server:
        await until_told(server, replace(STATUS, decision=decided, machine_busy=True, other_cores=0.9))
        load = (await server.http.get("/load")).json()
    assert load == {
        "server_load": 0,
        "machine_busy": True,
        "other_cores": 0.9,
        "speculation": {
            "layout": "off",
            "why": "drafting gives less than plain decoding at this load",
            "nodes": 0,
            "waited_s": 0.0,
            "chosen": {"nodes": 0, "seconds": 0.02, "tokens_per_second": pytest.approx(150.0)},
            "other": {"nodes": None, "seconds": 0.024, "tokens_per_second": pytest.approx(125.0)},
        },
    }
    TypeAdapter(Load).validate_python(load)


async def test_metrics_of_server_and_engine() -> None:
    async with running_server(lambda _: say("abcdef", group=3)) as server:
        before = (await server.http.get("/metrics")).text
        await until_told(server, STATUS)
        await post(server, COMPLETIONS, prompt="a")
        await post(server, COMPLETIONS, prompt="a", stop="cd")
        page = (await server.http.get("/metrics")).text
    assert 'ssd_engine_up{model_name="ssd-embedded"} 1.0' in before
    assert "ssd_num_requests_running" not in before
    named = ',model_name="ssd-embedded"|model_name="ssd-embedded",?'
    lines = re.sub(named, "", page).replace("{}", "").splitlines()
    for line in (
        "ssd_num_requests_running 1.0",
        "ssd_num_requests_waiting 2.0",
        "ssd_kv_cache_usage_perc 0.25",
        "ssd_prefix_cache_hits_total 20.0",
        "ssd_generation_tokens_total 300.0",
        "ssd_spec_decode_num_drafts_total 100.0",
        "ssd_spec_decode_num_draft_tokens_total 800.0",
        "ssd_spec_decode_num_accepted_tokens_total 200.0",
        'ssd_spec_decode_num_drafts_per_pos_total{position="0"} 90.0',
        'ssd_spec_decode_num_drafts_per_pos_total{position="2"} 50.0',
        'ssd_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 76.0',
        'ssd_spec_decode_num_accepted_tokens_per_pos_total{position="2"} 32.0',
        'ssd_spec_decode_num_accepted_tokens_per_pos_total{position="15"} 2.0',
        'ssd_spec_decode_num_accepted_tokens_per_pos_total{position="16"} 4.0',
        'ssd_spec_decode_source_draft_tokens_total{source="draft"} 700.0',
        'ssd_spec_decode_source_accepted_tokens_total{source="ngram"} 50.0',
        "ssd_speculation_cache_hits_total 90.0",
        "ssd_speculation_cache_misses_total 10.0",
        "ssd_speculation_ready_depth_total 400.0",
        "ssd_engine_forward_seconds_total 9.0",
        "ssd_drafters_alive 1.0",
        'ssd_mode{mode="ssd"} 1.0',
        'ssd_layout{layout="async"} 1.0',
        'ssd_layout_gain{layout="async",requests="1"} 1.5',
        'ssd_tree_decode_backend{backend="triton"} 1.0',
        "ssd_tree_decode_differences_total 2.0",
        'ssd_speculation_unhealthy{reason="acceptance collapsed"} 1.0',
        'ssd_speculation_unhealthy{reason="never hits"} 0.0',
        "ssd_drafter_restarts_total 3.0",
        'ssd_request_success_total{finished_reason="length"} 1.0',
        'ssd_request_success_total{finished_reason="stop"} 1.0',
        "ssd_time_to_first_token_seconds_count 2.0",
        "ssd_e2e_request_latency_seconds_count 2.0",
        "ssd_request_generation_tokens_sum 10.0",
    ):
        assert line in lines, line


async def test_metrics_prefix_and_model_label() -> None:
    settings = Settings(metrics_prefix="vllm:", served_model_name="mine")
    async with running_server(lambda _: say("abcdef", group=3), settings) as server:
        await until_told(server, STATUS)
        page = (await server.http.get("/metrics")).text
    assert 'vllm:num_requests_running{model_name="mine"} 1.0' in page.splitlines()
    assert 'vllm:spec_decode_num_drafts_total{model_name="mine"} 100.0' in page.splitlines()
    assert "ssd_" not in page


@pytest.mark.parametrize(("tells", "count"), [(True, 1.0), (False, 0.0)])
async def test_prefill_times_are_hidden_with_cached_tokens(
    monkeypatch: pytest.MonkeyPatch, tells: bool, count: float
) -> None:
    monkeypatch.setattr(FIGURES, "prompt_s", 0.001)
    settings = Settings(tell_cached_tokens=tells, api_key="key-of-this-test")
    headers = {"Authorization": "Bearer key-of-this-test"}
    async with running_server(lambda _: say("abcdef", group=3), settings) as server:
        await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        page = (await server.http.get("/metrics", headers=headers)).text
    assert metric(page, "ssd_request_round_tokens_count") == 1.0
    assert metric(page, "ssd_request_round_nodes_sum") == 8.0
    assert metric(page, "ssd_request_prefill_time_seconds_count") == count
    assert metric(page, "ssd_request_queue_time_seconds_count") == count


async def test_server_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_TARGET")
    settings = Settings(
        draft_depth=7,
        system_prompt="A secret of the operator's",
        drafter_address="tcp://10.0.0.1:4711",
        cache_dir=Path("/home/me/cache"),
        models_file=Path("/home/me/models.yaml"),
        cluster_key="secret-of-the-cluster-of-this-test",
    )
    async with running_server(lambda _: say("x"), settings) as server:
        await until_told(server, STATUS)
        info = (await server.http.get("/server_info")).json()
    assert (info["target"], info["draft"], info["mode"]) == ("fake-target", "fake-draft", "ssd")
    assert (info["target_device"], info["draft_device"]) == ("cpu:0", "cpu:1")
    assert info["tree_decode_backend"] == "triton"
    private = ("system_prompt", "drafter_address", "cache_dir", "models_file", "cluster_key")
    assert info["settings"] == {"draft_depth": 7, **dict.fromkeys(private, "set")}


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with running_server(lambda _: say("x")) as server:
        told = await post(server, "/tokenize", prompt="hé", add_special_tokens=False, return_token_strs=True)
        back = await post(server, "/detokenize", tokens=told["tokens"])
        chat = await post(server, "/tokenize", messages=[{"role": "user", "content": "x"}])
        neither = await server.http.post("/tokenize", json={})
        outside = await server.http.post("/detokenize", json={"tokens": [100000]})
    assert told["count"] == 3
    assert told["max_model_len"] == CONTEXT
    assert told["token_strs"][0] == "h"
    assert back == {"prompt": "hé"}
    assert bytes(chat["tokens"]).decode() == "user: x\nassistant: "
    assert (neither.status_code, outside.status_code) == (400, 400)


def metrics_page(requests: int) -> str:
    metrics = ServerMetrics(EngineClient(), lambda: True)
    for _ in range(requests):
        metrics.ended.labels("stop").inc()
        metrics.first_token.observe(0.2)
    return metrics.render().decode()


def test_joined_metrics_have_a_replica_label() -> None:
    joined = join_pages({"a": metrics_page(1), "b": metrics_page(2)}).decode()
    assert 'ssd_request_success_total{finished_reason="stop",replica="a"} 1.0' in joined
    assert 'ssd_request_success_total{finished_reason="stop",replica="b"} 2.0' in joined
    assert 'ssd_time_to_first_token_seconds_bucket{le="0.25",replica="b"} 2.0' in joined


def test_joined_metrics_keep_all_samples() -> None:
    alone, joined = metrics_page(1), join_pages({"a": metrics_page(1), "b": metrics_page(1)}).decode()
    assert joined.count("# TYPE") == alone.count("# TYPE")
    families = {family.name: family for family in text_string_to_metric_families(joined)}
    for family in text_string_to_metric_families(alone):
        assert len(families[family.name].samples) == 2 * len(family.samples)
        assert families[family.name].type == family.type


def test_joined_metrics_without_pages() -> None:
    assert join_pages({}) == b""
