"""A drafter as its settings want it."""

import pytest
from msgspec.structs import replace

from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.errors import SettingsError
from ssd_serve.messages import Open, SamplingParameters
from ssd_serve.settings import Settings


def settings(draft: str) -> Settings:
    return Settings(draft=draft, dtype="fp32", native_kernels=False, draft_kv_memory_mb=16, draft_width=4)


def test_a_targets_first_layers_draft_what_the_target_can_read() -> None:
    whole, part = (assemble_drafter(settings(draft), "d0", "cpu", None) for draft in ("embedded", "self:2"))
    assert (whole.hello.source, part.hello.source) == ("embedded", "self:2")
    same = [replace(each.hello, source="", instance=0, step_ms=0.0) for each in (whole, part)]
    assert same[0] == same[1]
    part.core.handle(Open(1, 1, (5, 6, 7), (), SamplingParameters(temperature=0.0), 0, root=1))
    (growth,) = part.core.step()
    assert len(growth.tokens) == 4 * settings("").draft_fan_out


def test_without_a_model_there_is_no_drafter() -> None:
    with pytest.raises(SettingsError, match="there is no draft model"):
        assemble_drafter(settings("ngram"), "d0", "cpu", None)
