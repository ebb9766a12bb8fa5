"""Tests of the `ray` launcher on a real Ray with several simulated nodes: placement, and loss of a node.

Texts must equal those of the local launcher.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.app.llm.engine import Asked, Conversation, RemoteEngine
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import visible_gpus
from ssd_serve.cluster.launch import RunningEngine
from ssd_serve.cluster.local import local_engine
from ssd_serve.cluster.ray.cluster import ray_cluster
from ssd_serve.cluster.ray.launcher import ALL_VISIBLE, ray_engine
from ssd_serve.cluster.ray.placement import STRATEGY, ray_place
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.sampling.validation import engine_parameters
from tests.end_to_end.tiny_pair import write_pair
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
QUIET = get_logger("server", level="error")
PARAMS = SamplingParams(temperature=0.9, max_tokens=64)


class SimulatedCluster:
    """Ray nodes on this machine that differ only in the resources that they report. The head has no cores."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray: Any = ray
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False},
        )
        self._ray.init(address=self._cluster.address, namespace="tests", log_to_driver=False)
        self._added: list[Any] = []

    def add(self, cpus: int, gpus: int = 0, kind: str = "") -> Any:
        resources = {f"accelerator_type:{kind}": 1} if kind else {}
        node = self._cluster.add_node(
            num_cpus=cpus, num_gpus=gpus, resources=resources, object_store_memory=80 << 20
        )
        self._added.append(node)
        until(lambda: self.id(node) in self._alive())
        return node

    def lose(self, node: Any) -> None:
        """Kill a node, as if its machine had failed."""
        self._added.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def take_away_all(self) -> None:
        """Remove all nodes but the head."""
        gone = {self.id(node) for node in self._added}
        while self._added:
            self._cluster.remove_node(self._added.pop(), allow_graceful=True)
        until(lambda: not gone & self._alive())

    def _alive(self) -> set[str]:
        return {str(each["NodeID"]) for each in self._ray.nodes() if each["Alive"]}

    @staticmethod
    def id(node: Any) -> str:
        return str(node.node_id)

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def head() -> Iterator[SimulatedCluster]:
    with closing(SimulatedCluster()) as found:
        yield found


@pytest.fixture
def cluster(head: SimulatedCluster) -> Iterator[SimulatedCluster]:
    """Yield a cluster, and remove its nodes after the test."""
    yield head
    head.take_away_all()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def settings(pair: tuple[Path, Path]) -> Settings:
    target, draft = (str(folder) for folder in pair)
    return Settings(
        target=target,
        draft=draft,
        mode=Mode.SSD,
        dtype="fp32",
        budget=8,
        kv_memory_mb=64,
        log_level="warning",
    )


@contextmanager
def asking(engine: RunningEngine) -> Generator[RemoteEngine]:
    """Yield a client of the engine, and close its channel after the test."""
    with closing(engine.connect()) as channel:
        yield RemoteEngine(engine, channel, lambda _progress: None)


def generated(access: RemoteEngine, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of one request, and leave the engine running."""
    prompt, parameters = (
        tuple(tokenizer.encode("def f(")),
        engine_parameters(PARAMS, access.ready, max_tokens=64, logprobs=None),
    )
    conversation = Conversation(access, tokenizer, 1)
    (text,) = conversation.ask(
        [Asked(0, prompt, (5,), PARAMS, parameters, frozenset(tokenizer.eos_token_ids))]
    )
    while not text.over:
        conversation.turn()
    assert text.output is not None
    return list(text.output.token_ids)


def text(engine: RunningEngine, settings: Settings) -> list[int]:
    """Return the token ids of one request, and expect the end of the engine."""
    with asking(engine) as access:
        tokens = generated(access, Tokenizer(Path(settings.target)))
        engine.supervisor.expect_end()
    return tokens


@pytest.fixture(scope="module")
def expected(settings: Settings) -> list[int]:
    """Return the tokens of the local launcher, without drafts."""
    plain = settings.model_copy(update={"mode": Mode.AR})
    with local_engine(plain, QUIET) as engine:
        return text(engine, plain)


def test_lost_node_moves_target_and_drafter_to_another(
    cluster: SimulatedCluster, settings: Settings, expected: list[int]
) -> None:
    small, large = cluster.add(1), cluster.add(2)
    tokenizer = Tokenizer(Path(settings.target))
    with ray_engine(settings, QUIET) as engine:
        with asking(engine) as access:
            assert generated(access, tokenizer) == expected
            assert engine.nodes() == dict.fromkeys(("verifier", "drafter-0"), cluster.id(large))
            pids = engine.supervisor.pids()
            assert set(pids) == {"verifier", "drafter-0"}
            environment = psutil.Process(pids["verifier"]).environ()
            assert environment["MALLOC_TRIM_THRESHOLD_"] == str(1 << 30)

            engine.supervisor.target_is_ready()
            another = cluster.add(2)
            cluster.lose(large)
        with asking(engine) as access:
            assert generated(access, tokenizer) == expected
            until(lambda: len(engine.nodes()) == 2)
            assert set(engine.nodes().values()) <= {cluster.id(another), cluster.id(small)}
            assert engine.supervisor.failure is None
            pids = engine.supervisor.pids()
            engine.supervisor.expect_end()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 60.0)


def test_ranks_share_a_node_and_a_lost_drafter_moves(
    cluster: SimulatedCluster, settings: Settings, expected: list[int]
) -> None:
    ranked = settings.model_copy(update={"tensor_parallel": 2})
    large, small = cluster.add(2), cluster.add(1)
    with ray_engine(ranked, QUIET) as engine, asking(engine) as access:
        target = cluster.id(large)
        assert engine.nodes() == {"verifier": target, "rank-1": target, "drafter-0": cluster.id(small)}
        tokenizer = Tokenizer(Path(ranked.target))
        cluster.lose(small)
        assert generated(access, tokenizer) == expected
        until(lambda: engine.supervisor.restarts > 0)
        another = cluster.add(1)
        until(lambda: engine.nodes().get("drafter-0") == cluster.id(another))
        assert engine.supervisor.failure is None
        engine.supervisor.expect_end()


def seen_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs that Ray has assigned to this actor, and CUDA_VISIBLE_DEVICES."""
    ray: Any = importlib.import_module("ray")
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return sorted(map(str, ids)), visible_gpus()


def test_accelerator_types_and_gpu_ids_come_from_ray(cluster: SimulatedCluster, settings: Settings) -> None:
    """The nodes only report GPUs: each worker runs on the requested type, and all GPUs stay visible."""
    parts, whole = cluster.add(8, 8, "AMD-Instinct-MI300X-OAM"), cluster.add(4, 2, "H200")
    wished = settings.model_copy(
        update={
            "tensor_parallel": 2,
            "target_accelerator": "h200",
            "draft_accelerator": "mi300x",
            "drafters": 2,
        }
    )
    with ray_cluster(wished) as joined:
        decision = ray_place(wished, joined.nodes)
        group = joined.ray.util.placement_group(decision.bundles, strategy=STRATEGY)
        assert group.wait(60.0)
        assert joined.bundle_nodes(group) == {
            0: cluster.id(whole),
            1: cluster.id(parts),
            2: cluster.id(parts),
        }
        strategy = joined.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        asked = [
            joined.ray.remote(seen_gpus)
            .options(
                num_cpus=1,
                num_gpus=1,
                runtime_env={"env_vars": ALL_VISIBLE},
                scheduling_strategy=strategy(group, placement_group_bundle_index=bundle),
            )
            .remote()
            for bundle in (0, 0)
        ]
        found = joined.ray.get(asked, timeout=60.0)
        assert {len(ids) for ids, _ in found} == {1}
        assert {shown for _, shown in found} == {None}
        joined.ray.util.remove_placement_group(group)


OF_ITS_OWN = """
from ssd_serve.cluster.ray import cluster as module
from ssd_serve.base.devices import Machine
from ssd_serve.base.settings import Settings

module.this_machine = lambda: Machine((0,), 3)
with module.ray_cluster(Settings(launcher="ray")) as cluster:
    print([node.gpus for node in cluster.nodes])
"""


def test_own_ray_registers_the_gpus_of_torch() -> None:
    """Ray may not detect AMD GPUs itself."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", OF_ITS_OWN]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.splitlines()[-1] == "[3.0]"


def test_target_that_fits_no_node_is_refused(cluster: SimulatedCluster, settings: Settings) -> None:
    ranked = settings.model_copy(update={"tensor_parallel": 2})
    cluster.add(1)
    refused = pytest.raises(SettingsError, match="the target needs 2 CPU of one node")
    with refused, ray_engine(ranked, QUIET):
        pass


def test_hanging_actor_is_restarted(cluster: SimulatedCluster, settings: Settings) -> None:
    plain = settings.model_copy(update={"mode": Mode.AR})
    cluster.add(1)
    # Long enough that a slow actor on a busy machine does not count as hanging.
    with ray_engine(plain, QUIET, silence_s=8.0) as engine:
        with asking(engine):
            engine.supervisor.target_is_ready()
            hanging = engine.supervisor.pids()["verifier"]
            time.sleep(3.0)  # it is polled every second, and monitored from its first answer on
            os.kill(hanging, signal.SIGSTOP)
            until(lambda: engine.supervisor.restarts > 0, 60.0)
        with asking(engine):
            assert not psutil.pid_exists(hanging)
            engine.supervisor.expect_end()


def test_actor_error_has_its_exit_code_and_one_message(
    cluster: SimulatedCluster, settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target, _ = write_pair(tmp_path)
    (target / "model.safetensors").unlink()
    cluster.add(1)
    broken = settings.model_copy(update={"mode": Mode.AR, "target": str(target)})
    with ray_engine(broken, QUIET) as engine, closing(engine.connect()):
        failure = engine.supervisor.await_failure(60.0)
    assert failure is not None
    assert (failure.exit_code, failure.explained) == (6, True)
    assert capfd.readouterr().err.count("ssd: verifier: ") == 1
