"""Losslessness on SmolLM2 and real texts: through the server, and beside transformers as an outside oracle."""

import os
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ssd_serve import LLM, SamplingParams
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.seeds import choice_seed
from ssd_serve.models.hub import find_model
from ssd_serve.sampling.noise import log_exponential
from tests.servers import free_port, running

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MODEL = "smollm2"
SPECULATING = {
    "SSD_MODE": "sd",
    "SSD_DRAFT": "self:2,ngram",
    "SSD_NUM_SPECULATIVE_TOKENS": "72",
    "SSD_SPECULATIVE_SHAPE": "tree",
    "SSD_KV_MEMORY_MB": "56",
}
SLOTS = 2548
"""Tokens that the KV cache holds."""


def questions() -> list[dict[str, Any]]:
    """Real texts: short and of nearly 2,000 tokens, greedy and sampled."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code = (ROOT / "src" / "ssd_serve" / "base" / "cost.py").read_text(encoding="utf-8")
    texts = [
        "Explain why the sky is blue.",
        f"Summarize this page:\n{page[:6500]}",
        f"Repeat this file exactly:\n{code[:4500]}",
        "Write a JSON list of five people with name, age and city.",
    ]
    return [
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "temperature": temperature,
            "seed": index,
            "return_token_ids": True,
        }
        for index, text in enumerate(texts)
        for temperature in (0.0, 0.8)
    ]


@contextmanager
def serving(folder: Path, **settings: str) -> Generator[str]:
    port = free_port()
    folder.mkdir()
    environment = {
        **os.environ,
        "SSD_TARGET": MODEL,
        "SSD_PORT": str(port),
        "SSD_CONTEXT": "2048",
        **settings,
    }
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, folder, port) as (_, url, _):
        yield url


def answers(url: str) -> tuple[list[list[int]], int, int]:
    """Ask all questions at the same time; return their tokens, and the number of accepted draft tokens and of prompt
    tokens."""

    def ask(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=400.0)
        answer.raise_for_status()
        return answer.json()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, questions()))
    tokens = [each["choices"][0]["token_ids"] for each in found]
    accepted = sum(each["timings"]["draft_n_accepted"] for each in found)
    return tokens, accepted, sum(each["usage"]["prompt_tokens"] for each in found)


def test_server_gives_the_plain_tokens_of_real_texts(tmp_path: Path) -> None:
    with serving(tmp_path / "plain", SSD_MODE="ar") as url:
        plain, none, prompts = answers(url)
    with serving(tmp_path / "speculating", **SPECULATING) as url:
        speculated, accepted, _ = answers(url)
    assert speculated == plain
    assert none == 0 < accepted
    assert prompts > 2 * SLOTS, "the requests do not fit together"


@pytest.fixture(scope="module")
def path() -> Path:
    return find_model(EngineConfig(target=MODEL), MODEL, "target")


Oracle = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def by_transformers(path: Path) -> Oracle:
    """Logits of all tokens, computed at once; transformers dequantises the file itself."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)["tensors"]
    oracle.load_state_dict(oracle.state_dict() | tensors)
    oracle.tie_weights()

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = oracle(torch.tensor([tokens])).logits[0].double()
        return found

    return logits


def test_tokens_are_those_of_transformers_with_the_same_noise(by_transformers: Oracle) -> None:
    prompt, seed, temperature = "The history of the lighthouse begins", 11, 0.8
    sampled = SamplingParams(max_tokens=64, temperature=temperature, seed=seed, ignore_eos=True)
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with LLM(MODEL, dtype="fp32", draft="ngram") as llm:
        outputs = llm.generate([prompt, prompt], [greedy, sampled])
        ids = list(llm.tokenizer.encode(prompt))
    for output in outputs:
        positions = range(len(ids), len(ids) + 64)
        logits = by_transformers([*ids, *output.token_ids])[len(ids) - 1 : -1].numpy()
        if output is outputs[1]:
            noise = log_exponential([choice_seed(seed, 0)] * 64, positions, logits.shape[1])
            logits = logits / temperature - noise
        best = np.sort(logits, axis=1)
        clear = best[:, -1] - best[:, -2] > 1e-3
        assert clear.sum() > 55
        assert logits.argmax(axis=1)[clear].tolist() == np.array(output.token_ids)[clear].tolist()


def test_sampling_parameters_are_applied_as_to_the_logits_of_transformers(by_transformers: Oracle) -> None:
    prompt, seed, favoured = "The history of the lighthouse begins", 5, 260
    params = SamplingParams(
        max_tokens=48,
        temperature=0.7,
        seed=seed,
        ignore_eos=True,
        top_k=40,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={favoured: 1.5},
    )
    with LLM(MODEL, dtype="fp32", draft="self:2,ngram") as llm:
        found = llm.generate([prompt], [params])[0].token_ids
        ids = list(llm.tokenizer.encode(prompt))
    rows = by_transformers([*ids, *found])[len(ids) - 1 : -1].numpy()
    noise = log_exponential([choice_seed(seed, 0)] * 48, range(len(ids), len(ids) + 48), rows.shape[1])
    counts, clear = np.zeros(rows.shape[1]), 0
    for token, row, each in zip(found, rows, noise, strict=True):
        row[favoured] += 1.5
        scaled = (row - 0.4 * (counts > 0) - 0.3 * counts) / 0.7
        kept = (scaled >= np.sort(scaled)[-40]) & (scaled >= scaled.max() + np.log(0.02))
        scores = np.where(kept, scaled - each, -np.inf)
        second, best = np.sort(scores)[-2:]
        if best - second > 1e-3:
            clear += 1
            assert scores.argmax() == token
        counts[token] += 1
    assert clear > 40
