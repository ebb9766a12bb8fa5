"""Features that an EAGLE head reads at a position are those that the target computed there."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.rig import Case, load_named, run_case
from ssd_serve.bench.options import Devices
from ssd_serve.drafter.sources.contract import Block, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.eagle import EagleSource
from tests.end_to_end.tiny_pair import write_first_head, write_pair

GREEDY = SamplingParameters(temperature=0.0, max_tokens=16, ignore_eos=True)


def write_parrot(folder: Path, target: Path) -> Path:
    """An EAGLE-1 head that passes on its second input vector: its layer adds nothing, its `fc` selects."""
    weights = load_file(write_first_head(folder, target) / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    hidden = len(weights["fc.weight"])
    weights["fc.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), dim=1)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", [Case("sd", 4, 12), Case("ssd", 4, 12, slots=80)], ids=["inline", "beside"])
def test_features_belong_to_their_positions(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = write_pair(tmp_path, layers=2)
    head = write_parrot(tmp_path / "parrot", target)
    loaded = load_named(Settings(target=str(target), draft=str(head), dtype="fp32"), Devices(), None)
    texts = [tuple(60 + mix(text, place) % 20 for place in range(20 + text)) for text in range(3)]
    expand, seen = EagleSource.expand, list[bool]()

    def watched(
        source: EagleSource, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | Block | None]:
        found = expand(source, requests, scales)
        for pick, each in zip(requests, found, strict=True):
            held = source.held[pick.request]
            # Prompts were not chosen by the target.
            if (
                isinstance(each, Candidates)
                and pick.at.parent is None
                and held.start + len(held.tokens) > len(texts[0]) + 3
            ):
                seen.append(int(each.tokens[0]) == held.tokens[-1])
        return found

    monkeypatch.setattr(EagleSource, "expand", watched)
    run_case(loaded, case, [Submit(number, text, GREEDY, 7) for number, text in enumerate(texts)])
    assert len(seen) > 20
    assert all(seen)
