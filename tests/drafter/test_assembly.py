"""A drafter as its settings want it."""

import itertools
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from ssd_serve.base.draft_messages import Close, Hello, Open
from ssd_serve.base.errors import PairMismatchError, SettingsError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.sources.loading import LoadedSource, TokenizerInfo
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.sampling.grammar import from_choices, serialize_parts
from tests.end_to_end.tiny_pair import write_pair
from tests.fakes import ScriptedSource
from tests.waiting import until


def settings(draft: str) -> Settings:
    return Settings(draft=draft, dtype="fp32", native_kernels=False, draft_kv_memory_mb=16, draft_width=4)


def test_self_draft_uses_the_targets_first_layers() -> None:
    whole, part = (
        assemble_drafter(settings(draft).engine_config(), "d0", "cpu", None)
        for draft in ("embedded", "self:2")
    )
    assert (whole.hello.source, part.hello.source) == ("embedded", "self:2")
    same = [replace(each.hello, source="", instance=0, step_ms=0.0, prefill_ms=0.0) for each in (whole, part)]
    assert same[0] == same[1]
    assert 0 < part.hello.prefill_ms < part.hello.step_ms
    part.core.handle(Open(1, 1, (5, 6, 7), (), SamplingParameters(temperature=0.0), 0, root=1))
    (growth,) = part.core.step()
    assert len(growth.tokens) == 4 * settings("").draft_fan_out


def test_a_fixed_chain_grows_without_siblings_however_improbable_it_is() -> None:
    named = settings("embedded").model_copy(update={"num_speculative_tokens": 8})
    core = assemble_drafter(named.engine_config(), "d0", "cpu", None).core
    core.handle(Open(1, 1, (5, 6, 7), (), SamplingParameters(temperature=1.0), 9, root=1))
    grown = [growth for _ in range(8) for growth in core.step()]
    assert [len(growth.tokens) // 4 for growth in grown] == [1] * 8


@pytest.mark.parametrize(("measured", "prefill_s"), [(0.001, 0.001), (0.0, 0.0), (None, 0.005)])
def test_prefill_time_defaults_to_a_row_of_the_widest_step(measured: float | None, prefill_s: float) -> None:
    texts = TokenizerInfo(tokenizer="", vocabulary=8, context=64, ends=())
    loaded = LoadedSource(ScriptedSource(), texts, {4: 0.03, 8: 0.04}, prefill_s_per_token=measured)
    assert loaded.prefill_s == prefill_s


@pytest.mark.parametrize(("keeps", "kept"), [(True, 1), (False, 16)])
def test_the_drafter_follows_grammars_if_configured(keeps: bool, kept: int) -> None:
    named = settings("embedded").model_copy(update={"draft_grammars": keeps})
    core = assemble_drafter(named.engine_config(), "d0", "cpu", None).core
    forced = SamplingParameters(temperature=0.0, grammar=serialize_parts(from_choices(["\n"])))
    numbers = itertools.count(1)

    def candidates() -> int:
        number = next(numbers)
        core.handle(Open(number, 1, (5, 6, 7), (), forced, 0, root=1))
        time.sleep(0.005)  # the thread that compiles grammars has to run, even where it has this one already
        (growth,) = core.step()
        core.handle(Close(number, 1))
        return len(growth.tokens) // 4

    until(lambda: candidates() == kept)  # a grammar is compiled beside


def grown(target: Path, draft: Path) -> tuple[Hello, list[int], list[float]]:
    named = settings(str(draft)).model_copy(update={"target": str(target)})
    drafter = assemble_drafter(named.engine_config(), "d0", "cpu", None)
    drafter.core.handle(Open(1, 1, (5, 6, 7), (), SamplingParameters(temperature=0.0), 0, root=1))
    (growth,) = drafter.core.step()
    tokens = np.frombuffer(growth.tokens, dtype="<i4").tolist()
    return drafter.hello, tokens, np.frombuffer(growth.log_probabilities, dtype="<f4").tolist()


def test_a_draft_with_another_tokenizer_is_translated(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    own, tokens, values = grown(target, draft)
    _renumber(draft)
    mapped, same_tokens, same_values = grown(target, draft)
    assert Tokenizer(draft).vocabulary_hash() != Tokenizer(target).vocabulary_hash() == mapped.tokenizer
    assert (mapped.vocabulary, mapped.context) == (own.vocabulary, own.context)
    assert same_tokens == tokens
    assert same_values == pytest.approx(values, abs=1e-5)


def test_a_draft_with_too_few_common_tokens_is_refused(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    file = draft / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocabulary = raw["model"]["vocab"]
    raw["model"]["vocab"] = {
        name if index % 4 == 0 else f"other{index}": index for name, index in vocabulary.items()
    }
    file.write_text(json.dumps(raw))
    with pytest.raises(PairMismatchError, match="has 25% of the target's tokens, and at least 50%"):
        grown(target, draft)


def _renumber(folder: Path) -> None:
    """Give every token of a tiny model another id."""
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocabulary = raw["model"]["vocab"]
    order = random.Random(1).sample(range(len(vocabulary)), len(vocabulary))  # old ids by the new ones
    new = {old: index for index, old in enumerate(order)}
    raw["model"]["vocab"] = {name: new[index] for name, index in vocabulary.items()}
    for added in raw["added_tokens"]:
        added["id"] = new[added["id"]]
    file.write_text(json.dumps(raw))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][torch.tensor(order)].contiguous()
    save_file(weights, folder / "model.safetensors")


def test_a_drafter_requires_a_draft_model() -> None:
    with pytest.raises(SettingsError, match="there is no draft model"):
        assemble_drafter(settings("ngram").engine_config(), "d0", "cpu", None)
