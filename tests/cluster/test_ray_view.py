"""Resources that Ray sees, and failures of the question."""

import json
import sys

import pytest

from ssd_serve.base.devices import this_machine
from ssd_serve.cluster.ray.cluster import RayView, ray_view


def answering(text: str) -> RayView:
    return ray_view(30.0, (sys.executable, "-c", f"print({text!r})"))


def test_ray_view_reports_gpus_and_kinds() -> None:
    resources = {"CPU": 192.0, "GPU": 8.0, "accelerator_type:AMD-Instinct-MI300X-OAM": 1.0, "memory": 1e12}
    found = answering(f"a line of Ray's\n{json.dumps(resources)}")
    assert found == RayView(192, 8, ("AMD-Instinct-MI300X-OAM",))
    assert answering("{}") == RayView()


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"CPU": "many"}'])
def test_invalid_answer_of_ray_is_reported(text: str) -> None:
    assert "an answer that is none" in answering(text).failure


def test_failing_or_hanging_ray_is_reported() -> None:
    assert ray_view(30.0, (sys.executable, "-c", "raise SystemExit('no cluster')")).failure == "no cluster"
    assert (
        ray_view(0.2, (sys.executable, "-c", "import time; time.sleep(60)")).failure
        == "no answer within 0.2 s"
    )
    assert "could not be tried" in ray_view(1.0, ("/nowhere/python",)).failure


@pytest.mark.slow
def test_real_ray_counts_this_machine() -> None:
    found = ray_view(240.0)  # others may use the machine
    assert found.failure == ""
    assert found.cores >= len(this_machine().cores)
    assert found.gpus == this_machine().gpus
