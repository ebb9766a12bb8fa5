"""Samples functions from a checkpoint and counts those that are whole.

Knows prompts, the sampling temperature and Python's grammar; does not know losses, a draft or the engine:
sampling uses `transformers`, the judgement `ast.parse`.
"""

import ast
import codeop
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_serve.base.errors import UserError

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The temperatures at which functions are sampled unless others are asked for."""

TOP_PS = (0.9, 0.95)
"""They are sampled from the fewest tokens that have so much of the probability, one after the other."""

NEW_TOKENS = 512
"""A function that has not ended after so many tokens is not whole."""

CHECK_EVERY = 8
"""Steps between two looks at which samples are decided and need no further tokens."""


@dataclass(frozen=True)
class Counts:
    """What became of sampled functions; parsed + broken + unfinished = samples.

    `empty`, `repetitive`, `distinct` and `median_lines` describe the parsed ones: how many have a body of
    nothing but a docstring, `pass` or `...`; in how many fewer than half of the non-blank lines differ; how
    many differ from one another after the prompt; their median number of non-blank lines, 0 if none parsed.
    """

    samples: int
    parsed: int
    broken: int
    unfinished: int
    empty: int
    repetitive: int
    distinct: int
    median_lines: float


def counted(prompts: Sequence[str], texts: Sequence[str]) -> Counts:
    """Judge each text, which begins with its prompt."""
    functions = [cut_function(text) for text in texts]
    parsed = [function for function in functions if function is not None]
    endings = {
        function[len(prompt) :]
        for prompt, function in zip(prompts, functions, strict=True)
        if function is not None
    }
    broken = sum(
        function is None and is_hopeless(text) for function, text in zip(functions, texts, strict=True)
    )
    sizes = [len(filled_lines(function)) for function in parsed]
    return Counts(
        samples=len(texts),
        parsed=len(parsed),
        broken=broken,
        unfinished=len(texts) - len(parsed) - broken,
        empty=sum(map(is_empty, parsed)),
        repetitive=sum(map(is_repetitive, parsed)),
        distinct=len(endings),
        median_lines=float(statistics.median(sizes)) if sizes else 0.0,
    )


def cut_function(text: str) -> str | None:
    """The function that `text` begins with, if it ends within it and parses, else None.

    It ends at the first line indented less than its body; comments end nothing. A line inside brackets or a
    string may be indented less too, hence every such cut is tried: at a wrong one the text does not parse.
    A comment beside the header and a body beside its `def` are read as Python reads them.
    """
    lines = text.splitlines(keepends=True)
    for cut in ends(lines):
        function = "".join(lines[:cut]).rstrip()
        if one_function(function + "\n") is not None:
            return function
    return None


def ends(lines: Sequence[str]) -> Iterator[int]:
    """Indices of the lines before which the function may end; any line if its body is beside its `def`."""
    header = header_lines(lines)
    body: float = next((indent(line) for line in lines[header:] if is_code(line)), 0) if header else math.inf
    for index in range(header + 1, len(lines)):
        if is_code(lines[index]) and indent(lines[index]) < body:
            yield index


def header_lines(lines: Sequence[str]) -> int:
    """How many lines the `def` takes up to its colon; 0 if its body is beside it or it is invalid."""
    for count in range(1, len(lines) + 1):
        if one_function("".join(lines[:count]).rstrip() + "\n pass\n") is not None:
            return count
    return 0


def is_code(line: str) -> bool:
    """Whether a line is neither blank nor a comment."""
    return not line.lstrip().startswith("#") and bool(line.strip())


def indent(line: str) -> int:
    """The width of the white space that a line begins with."""
    return len(line) - len(line.lstrip())


def parsed_module(text: str) -> ast.Module | None:
    """The syntax tree of a text, None if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def one_function(text: str) -> ast.FunctionDef | None:
    """The definition that `text` consists of, None if it is anything but exactly one function."""
    module = parsed_module(text)
    if module is None or len(module.body) != 1:
        return None
    return module.body[0] if isinstance(module.body[0], ast.FunctionDef) else None


def is_hopeless(text: str) -> bool:
    """Whether the complete lines of `text` hold a syntax error that no further lines can mend."""
    source = text[: text.rfind("\n") + 1]
    if parsed_module(source) is not None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codeop.compile_command(source, symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return True
    return False


def is_empty(function: str) -> bool:
    """Whether the body is nothing but constants (a docstring, `...`) and `pass`."""
    definition = one_function(function)
    return definition is not None and all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in definition.body
    )


def is_repetitive(function: str) -> bool:
    """Whether fewer than half of the non-blank lines differ from one another."""
    lines = filled_lines(function)
    return 2 * len(set(lines)) < len(lines)


def filled_lines(function: str) -> list[str]:
    """The lines that are not blank, without the white space around them."""
    return [stripped for line in function.splitlines() if (stripped := line.strip())]


class FunctionSampler:
    """A checkpoint that continues prompts, in fp32 on the CPU.

    Prompts get the tokens that a server would give them, end-of-text in front of them included.
    """

    def __init__(self, target: Path) -> None:
        """Raises `UserError` without the package transformers."""
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UserError(
                "Sampling needs the package transformers; install it or pass --samples 0."
            ) from error
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.tokenizer.pad_token, self.tokenizer.padding_side = self.tokenizer.eos_token, "left"
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, use_safetensors=True
        ).eval()

    def measure(
        self, prompts: Sequence[str], temperatures: Sequence[float], seed: int
    ) -> list[dict[str, object]]:
        """For each temperature and top-p what became of the functions, ready for JSON."""
        return [
            {
                "temperature": temperature,
                "top_p": top_p,
                **asdict(counted(prompts, self.continued(prompts, temperature, top_p, seed))),
            }
            for temperature in temperatures
            for top_p in TOP_PS
        ]

    @torch.no_grad()
    def continued(
        self,
        prompts: Sequence[str],
        temperature: float,
        top_p: float,
        seed: int,
        new_tokens: int = NEW_TOKENS,
    ) -> list[str]:
        """Each prompt with its continuation up to where it is decided whether the function is whole.

        The end of text is marked by a `pass` line. A sample's noise does not depend on the other samples.
        """
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        inputs, mask = batch["input_ids"], batch["attention_mask"]  # int64 [rows, length]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        generator = torch.Generator().manual_seed(seed)
        running = torch.arange(len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        cache: Any = None
        for step in range(1, new_tokens + 1):
            result = self.model(
                input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
            logits, cache = result.logits[:, -1], result.past_key_values  # [rows, vocabulary]
            chosen = choose(logits, temperature, top_p, running, len(prompts), generator)
            for row, token in zip(running.tolist(), chosen.tolist(), strict=True):
                outputs[row].append(token)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
            going = chosen != self.tokenizer.eos_token_id
            if step % CHECK_EVERY == 0:
                rows: list[int] = running.tolist()
                decided = [is_decided(self.text(prompts[row], outputs[row])) for row in rows]
                going &= ~torch.tensor(decided)
            if not going.all():
                kept = going.nonzero()[:, 0]
                running, chosen, mask = running[kept], chosen[kept], mask[kept]
                cache.batch_select_indices(kept)
            if not len(running):
                break
            inputs, positions = chosen[:, None], mask.sum(-1, keepdim=True) - 1
        return [self.text(prompt, ids) for prompt, ids in zip(prompts, outputs, strict=True)]

    def text(self, prompt: str, ids: Sequence[int]) -> str:
        """A prompt with the text of its continuation."""
        end = "\npass\n" if self.tokenizer.eos_token_id in ids else ""
        return prompt + str(self.tokenizer.decode(ids, skip_special_tokens=True)) + end


def choose(
    logits: Tensor,
    temperature: float,
    top_p: float,
    rows: Tensor,
    samples: int,
    generator: torch.Generator,
) -> Tensor:
    """A token for each row, int64 [rows], by an exponential race among the likeliest ones; noise is drawn for
    all `samples`."""
    noise = torch.empty(samples, logits.shape[-1]).exponential_(generator=generator)[rows]
    scores = logits.float() / temperature
    ranked, order = scores.softmax(-1).sort(-1, descending=True)
    beyond = ranked.cumsum(-1) - ranked >= top_p  # the token that crosses it stays
    scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return (scores - noise.log()).argmax(-1)


def is_decided(text: str) -> bool:
    """Whether more text cannot change the judgement."""
    return cut_function(text) is not None or is_hopeless(text)
