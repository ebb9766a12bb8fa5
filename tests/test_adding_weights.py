"""Following docs/adding.md gives a weight format, and an architecture with latent KV, that serve models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.config import read_json
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.text.tokenizer import Tokenizer
from tests.adding_page import follow

OPTIONS: Any = {"device": "cpu", "dtype": "fp32", "slots": 64, "context": None}
DRAFT = resolve_model("embedded", "draft")
MATRICES = ("_proj.weight", "lm_head.weight")
NONE = np.zeros(0, dtype=np.int32)


def bytes_of(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The embedded draft rounded to int8: as an archive, and widened in a folder."""
    follow("A weight format", tmp_path, monkeypatch)
    arrays: dict[str, Any] = {each: bytes_of(DRAFT / f"{each}.json") for each in ("config", "tokenizer")}
    widened: dict[str, torch.Tensor] = {}
    for name, weight in load_file(DRAFT / "model.safetensors").items():
        weight = weight.float()
        if name.endswith(MATRICES):
            scales = weight.abs().amax(1) / 127
            numbers = (weight / scales[:, None]).round()
            arrays[name] = numbers.to(torch.int8).numpy()
            arrays[name.replace(".weight", ".scales")] = scales.numpy()
            weight = numbers * scales[:, None]
        else:
            arrays[name] = weight.numpy()
        widened[name] = weight
    archive, folder = tmp_path / "model.npz", tmp_path / "folder"
    np.savez(archive, **arrays)
    folder.mkdir()
    save_file(widened, folder / "model.safetensors")
    for each in ("config.json", "tokenizer.json"):
        (folder / each).write_bytes((DRAFT / each).read_bytes())
    return archive, folder


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        size = len(tokens)
        rows = RequestRows(tokens, range(size), range(size), NONE, [size - 1])
        tokens = [*tokens, int(model.forward(build_batch([rows])).logits[0].argmax())]
    return tokens


def test_a_file_in_a_new_format_serves_the_same_tokens(pair: tuple[Path, Path]) -> None:
    archive, folder = pair
    assert resolve_model(str(archive), "target") == archive
    prompt = Tokenizer(archive).encode("def f(x):")
    assert prompt == Tokenizer(folder).encode("def f(x):")
    texts = [greedy(load_model(path, ModelOptions(**OPTIONS)), prompt, 12) for path in pair]
    assert texts[0] == texts[1]


def test_the_memory_check_counts_the_format_s_own_layout(pair: tuple[Path, Path]) -> None:
    archive, folder = (model_sizes(path, device="cpu", dtype="fp32") for path in pair)
    rows = [len(each) for name, each in np.load(pair[0]).items() if name.endswith(".scales")]
    weights = sum(each.size for name, each in np.load(pair[0]).items() if name.endswith(MATRICES))
    assert folder.resident_bytes - archive.resident_bytes == 3 * weights - 4 * sum(rows)


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither a folder, a GGUF file, a hub id"):
        resolve_model(str(tmp_path / "model.npz"), "target")


def test_latent_layers_are_stored_and_attended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and token by token over the cache, the logits are those of the formula."""
    follow("A kind of KV layer", tmp_path, monkeypatch)
    vocabulary, hidden, heads, latent, value = 31, 24, 3, 16, 8
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 3

    weights = {
        "embed.weight": some(vocabulary, hidden),
        "queries.weight": some(heads * latent, hidden),
        "latent.weight": some(latent, hidden),
        "output.weight": some(hidden, heads * value),
    }
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LatentForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden}
    config |= {"max_position_embeddings": 64, "heads": heads, "latent_size": latent, "value_size": value}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_json(folder / "config.json")["heads"] == heads
    model = load_model(folder, ModelOptions(**OPTIONS))
    assert model.facts.attention == "sdpa"
    assert model.facts.kv_bytes_per_slot == 4 * latent
    tokens = [3, 14, 15, 9, 26, 5]
    rows = weights["embed.weight"][tokens]
    stored = rows @ weights["latent.weight"].T
    queries = (rows @ weights["queries.weight"].T).view(len(tokens), heads, latent)
    scores = torch.einsum("rhl,sl->rhs", queries, stored) * latent**-0.25
    unseen = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    attended = scores.masked_fill(unseen[:, None], -torch.inf).softmax(2) @ stored[:, :value]
    expected = (rows + attended.flatten(1) @ weights["output.weight"].T) @ weights["embed.weight"].T
    whole = RequestRows(tokens, range(6), range(6), NONE, range(6))
    torch.testing.assert_close(model.forward(build_batch([whole])).logits, expected, atol=1e-4, rtol=1e-4)
    for place, token in enumerate(tokens):
        row = RequestRows([token], [place], [place], np.arange(place, dtype=np.int32), [0])
        found = model.forward(build_batch([row])).logits[0]
        torch.testing.assert_close(found, expected[place], atol=1e-4, rtol=1e-4)
