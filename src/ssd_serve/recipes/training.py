"""Training of drafts: the target as a teacher, the optimiser, steps, and checkpoints.

A training that is stopped and resumed ends with the weights that it would have had without the stop.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.cpu_products import cpu_has_fast_bf16
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.interface import ForwardResult, feature_name
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.recipes.data import Ids, Sampler, Stream


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the type of a training's products: float32 on CPUs that only emulate bfloat16, many times slower."""
    emulated = device.type == "cpu" and not cpu_has_fast_bf16()
    return torch.float32 if emulated else torch.bfloat16


def fast_products(device: torch.device) -> torch.autocast:
    """Return the context in which a model in float32 multiplies in `product_dtype`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=product_dtype(device) is torch.bfloat16)


@dataclass(frozen=True)
class Lesson:
    """A target's output for texts."""

    logits: Tensor  # [texts, length, vocabulary]
    features: Tensor | None = None  # concatenated outputs of layers, [texts, length, layers * hidden]
    counted: Tensor | None = None  # whether to learn the logits of a place, bool [texts, length]; None: all


class Teacher:
    """A loaded target with KV slots for `places` tokens; it returns the outputs of `layers`."""

    def __init__(
        self,
        folder: Path,
        places: int,
        layers: Sequence[int] = (),
        device: str = "cpu",
        dtype: str = "auto",
        native: NativeLibrary | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.layers = tuple(layers)
        wish = ModelOptions(
            device=device, dtype=dtype, slots=places, context=None, native=native, features=self.layers
        )
        self._model = load_model(folder, wish)
        self.width = len(self.layers) * load_description(folder).config.hidden

    def read(self, tokens: Tensor) -> Lesson:
        """Compute the lesson of tokens int64 [texts, length]."""
        texts, length = tokens.shape
        result = self._model.forward(build_batch(_texts(tokens.tolist(), length)))
        # Copies, because a backward pass cannot keep what was made in inference mode.
        logits = result.logits.clone().view(texts, length, -1)
        if not self.layers:
            return Lesson(logits)
        return Lesson(logits, self._joined(result).view(texts, length, -1))

    def outputs(self, text: Ids) -> Tensor:
        """Compute the outputs of `layers` for a text of `places` tokens at most: [tokens, layers * hidden]."""
        return self._joined(self._model.forward(build_batch(_texts([text.tolist()], 1))))

    def _joined(self, result: ForwardResult) -> Tensor:
        return torch.cat([result.features[feature_name(layer)] for layer in self.layers], dim=-1).clone()


def _texts(texts: list[list[int]], wanted: int) -> list[RequestRows]:
    """Return whole texts of one length as rows; logits are those of the last `wanted` tokens of each."""
    length = len(texts[0])
    return [
        RequestRows(
            tokens=text,
            positions=range(length),
            write_slots=range(index * length, (index + 1) * length),
            prefix_slots=np.zeros(0, np.int32),
            wanted=range(length - wanted, length),
        )
        for index, text in enumerate(texts)
    ]


def rate_factor(seen: int, tokens: int, warm_up: float = 0.015, decay: float = 0.35) -> float:
    """Return the factor on every learning rate after `seen` of `tokens` tokens, 0 to 1.

    Warm-up, constant, then linear decay to zero; `warm_up` and `decay` are shares of all tokens.
    """
    progress = min(1.0, seen / tokens)
    return min(1.0, max(progress, 1e-3) / warm_up, (1.0 - progress) / decay)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and Muon's weight decay (times its learning rate, per step)."""

    matrix: float = 0.02
    embedding: float = 0.02
    head: float = 0.004
    norm: float = 0.004
    matrix_decay: float = 0.02

    def scaled(self, factor: float) -> "Rates":
        """Return these rates times a factor."""
        names = ("matrix", "embedding", "head", "norm")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


class Optimiser:
    """Muon (Jordan et al. 2024) for hidden matrices and AdamW for the rest, stepped together."""

    def __init__(self, decoder: nn.Module, rates: Rates) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"Training needs torch 2.9 or later, not {torch.__version__}.")
        named = dict(decoder.named_parameters())
        outer = [n for n in named if "embed_tokens" in n or "lm_head" in n]
        matrices = [p for n, p in named.items() if p.dim() == 2 and n not in outer]
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named.items() if "embed_tokens" in n], "lr": rates.embedding},
            {"params": [p for n, p in named.items() if "lm_head" in n], "lr": rates.head},
            {"params": [p for n, p in named.items() if p.dim() == 1 and n not in outer], "lr": rates.norm},
        ]
        from ssd_serve.recipes.muon import Float32Muon  # not importable with an older torch

        narrow = all(product_dtype(each.device) is torch.bfloat16 for each in matrices)
        muon = torch.optim.Muon if narrow else Float32Muon
        self.muon = muon(matrices, lr=rates.matrix, weight_decay=rates.matrix_decay)
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=True)
        self._peaks = [float(group["lr"]) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [*self.muon.param_groups, *self._adam.param_groups]

    def step(self, factor: float, momentum: float) -> None:
        """Update once with every learning rate multiplied by `factor`, and clear the gradients."""
        for group, peak in zip(self._groups(), self._peaks, strict=True):
            group["lr"] = peak * factor
        self.muon.param_groups[0]["momentum"] = momentum
        both: tuple[torch.optim.Optimizer, ...] = self.muon, self._adam
        for optimiser in both:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers for a checkpoint."""
        return {"muon": self.muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training on `tokens` tokens in all, in steps of `rows` windows of `length` tokens.

    `compiled` concerns the part of the loss that is computed from the teacher's output.
    """

    tokens: int
    rows: int
    length: int
    seed: int
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0

    @property
    def min_tokens(self) -> int:
        """Tokens of text that the training needs at least."""
        return 4 * self.length


M = TypeVar("M", bound=nn.Module)
Loss: TypeAlias = Callable[[M, Tensor], Tensor]
"""Loss of a model on windows int64 [rows, length]: nats a token, a scalar."""


class Training(Generic[M]):
    """The state of a training: weights, optimiser, counters and the place in the data."""

    def __init__(
        self,
        recipe: Recipe,
        rates: Rates,
        model: M,
        stream: Stream,
        checkpoint: Path,
        loss: Loss[M],
    ) -> None:
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.model = model
        self.optimiser = Optimiser(model, rates)
        self.sampler = Sampler(stream, recipe.seed)
        self.step = 0
        self.tokens = 0
        self.worked = 0.0  # seconds in steps, over all runs
        self.history: list[dict[str, float]] = []
        self._loss = loss

    def train_step(self) -> float:
        """Run one step and return its loss."""
        batch = torch.from_numpy(self.sampler.batch(self.recipe.rows, self.recipe.length))
        device = next(self.model.parameters()).device
        inputs = batch[:, :-1].to(device).contiguous()  # [rows, length]
        loss = self._loss(self.model, inputs)
        torch.autograd.backward([loss])
        momentum = 0.85 + 0.10 * min(1.0, self.step / 200)
        self.optimiser.step(rate_factor(self.tokens, self.recipe.tokens), momentum)
        self.step += 1
        self.tokens += self.recipe.rows * self.recipe.length
        return float(loss.detach())

    def save(self) -> None:
        """Write the checkpoint, replacing the last one in one move."""
        state = {
            "decoder": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "taken": dict(self.sampler.taken),
            "step": self.step,
            "tokens": self.tokens,
            "worked": self.worked,
            "history": self.history,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def load(self) -> None:
        """Continue from the checkpoint; the number of tokens stays the one given to this training."""
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True, map_location="cpu")
            self.model.load_state_dict(state["decoder"])
            self.optimiser.load_state_dict(state["optimiser"])
        except Exception as error:  # torch raises any type for a damaged file
            raise UserError(
                f"{self.checkpoint} is no checkpoint of this training; remove it to begin anew: {error}"
            ) from error
        self.sampler.taken = state["taken"]
        self.step, self.tokens, self.worked = state["step"], state["tokens"], state["worked"]
        self.history = state["history"]


def run(
    training: Training[M],
    figures: Callable[[M], dict[str, float]],
    clock: Callable[[], float] = time.time,
    say: Callable[[str], None] = print,
) -> None:
    """Train to the last token; report and save every few minutes and at the end."""
    recipe = training.recipe
    reported = saved = clock()
    since = training.tokens
    losses: list[float] = []
    while training.tokens < recipe.tokens:
        began = clock()
        losses.append(training.train_step())
        now = clock()
        training.worked += now - began
        if training.step in (1, 10, 50, 100) or now - reported >= recipe.report_seconds:
            record = {
                "step": training.step,
                "tokens": training.tokens,
                "tokens_per_s": (training.tokens - since) / max(now - reported, 1e-9),
                "train_loss": sum(losses) / len(losses),
                **figures(training.model),
            }
            training.history.append(record)
            stamp = time.strftime("%H:%M:%S", time.localtime(now))
            say(stamp + " " + json.dumps({key: round(value, 4) for key, value in record.items()}))
            losses.clear()
            reported, since = clock(), training.tokens
        if now - saved >= recipe.checkpoint_seconds:
            training.save()
            saved = now
    training.history.append({"step": training.step, "tokens": training.tokens, **figures(training.model)})
    training.save()
    say("done " + json.dumps(training.history[-1]))
