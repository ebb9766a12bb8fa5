"""How a text is chosen and where it ends, as people type it in Python; names as in the OpenAI and vLLM APIs.

Knows ranges and what needs the model's vocabulary; not how tokens are chosen.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails
from typing_extensions import Self

from ssd_serve.errors import RequestError
from ssd_serve.messages import SamplingParameters
from ssd_serve.server.limits import MAX_TOP_LOGPROBS, MIN_TEMPERATURE

TokenIds = Sequence[Annotated[int, Field(ge=0)]]
StopString = Annotated[str, Field(min_length=1)]


class SamplingParams(BaseModel):
    """What one call wants of its texts. Wrong values are a `RequestError` that names the field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    n: int = Field(default=1, ge=1, le=1024, description="texts for each prompt")
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**64,
        description="the same seed gives the same texts; None: a random one",
    )
    temperature: float = Field(default=1.0, ge=0, le=100, description="0: always the best token")
    top_k: int = Field(
        default=0, ge=-1, lt=2**31, description="choose among the k most probable tokens; 0 or -1: off"
    )
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict[int, float]
    )
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        default=None, description="the only tokens that may come"
    )
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(
        default=None, ge=1, description="None: 128, and in a chat as many as the context holds"
    )
    stop: StopString | Sequence[StopString] = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="how many of the most probable tokens to report with each",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            made = handler(data)
        except ValidationError as error:
            raise _explanation(error) from error
        if 0 < made.temperature < MIN_TEMPERATURE:
            raise RequestError(f"temperature must be 0 or at least {MIN_TEMPERATURE}", "temperature")
        return made

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All of `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_model(self, vocabulary: int, max_tokens: int) -> SamplingParameters:
        """The same as the engine takes it, for a model with so many token ids. Raises `RequestError`."""
        if self.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens: {self.min_tokens} is more than the {max_tokens} tokens that may be generated",
                "min_tokens",
            )
        _check_ids(self.logit_bias, vocabulary, "logit_bias")
        _check_ids(self.stop_token_ids, vocabulary, "stop_token_ids")
        _check_ids(self.allowed_token_ids or (), vocabulary, "allowed_token_ids")
        return SamplingParameters(
            temperature=self.temperature,
            # All of the vocabulary is no restriction.
            top_k=self.top_k if 0 < self.top_k < vocabulary else 0,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )


def _explanation(error: ValidationError) -> RequestError:
    """One sentence for each wrong field; values are left out."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    first = problems[0]["loc"]
    return RequestError("; ".join(dict.fromkeys(map(_sentence, problems))), str(first[0]) if first else "")


def _sentence(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else "parameters"
    if problem["type"] == "extra_forbidden":
        return f"{field}: there is no such parameter"
    return f"{field}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _check_ids(ids: Collection[int], vocabulary: int, field: str) -> None:
    largest = max(ids, default=0)
    if largest >= vocabulary:
        raise RequestError(f"{field}: token id {largest} is outside the vocabulary of {vocabulary}", field)
