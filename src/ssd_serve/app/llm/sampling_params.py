"""Sampling parameters of the Python API; names are those of the OpenAI and vLLM APIs."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails
from typing_extensions import Self

from ssd_serve.base.errors import RequestError
from ssd_serve.sampling.grammar import (
    GrammarPart,
    from_choices,
    from_json_schema,
    from_regex,
    from_rules,
    serialize_parts,
)
from ssd_serve.sampling.parameters import range_of
from ssd_serve.sampling.validation import (
    FILL_CONTEXT,
    Choices,
    Seed,
    Temperature,
    range_field,
    with_number_fields,
)

TokenIds = Sequence[Annotated[int, Field(ge=0)]]
StopString = Annotated[str, Field(min_length=1)]


class StructuredOutputsParams(BaseModel):
    """Constraint on a text; exactly one field is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    json_schema: dict[str, Any] | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Sequence[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)
    grammar: str | None = Field(default=None, description="Lark as llguidance reads it, or GBNF")

    @property
    def written(self) -> str:
        """Convert to the engine's grammar. Raises `RequestError`."""
        found: list[GrammarPart] = []
        if self.json_schema is not None:
            found.append(from_json_schema(self.json_schema))
        if self.regex is not None:
            found.append(from_regex(self.regex))
        if self.choice is not None:
            found.append(from_choices(self.choice))
        if self.grammar is not None:
            found.append(from_rules(self.grammar))
        if len(found) != 1:
            name = "structured_outputs"
            raise RequestError(f"{name}: give one of json, regex, choice, grammar", name)
        return serialize_parts(found[0])


@with_number_fields
class SamplingParams(BaseModel):
    """Sampling parameters of one call. Wrong values are a `RequestError` that names the field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    n: Choices = Field(default=1, description="texts for each prompt")
    seed: Seed | None = Field(
        default=None, description="the same seed gives the same texts; None: a random one"
    )
    temperature: Temperature = Field(default=1.0, description="0: always the best token")
    top_k: Annotated[int, range_field("top_k")] = Field(
        default=0, description="choose among the k most probable tokens; 0 or -1: off"
    )
    top_p: Annotated[float, range_field("top_p")] = 1.0
    min_p: Annotated[float, range_field("min_p")] = 0.0
    repetition_penalty: Annotated[float, range_field("repetition_penalty")] = 1.0
    presence_penalty: Annotated[float, range_field("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, range_field("frequency_penalty")] = 0.0
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, range_field("logit_bias")]] = Field(
        default_factory=dict[int, float]
    )
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        default=None, description="the only tokens that may come"
    )
    bad_words: Sequence[Annotated[str, Field(min_length=1)]] = Field(
        default=(), description="texts that the output must not hold"
    )
    min_tokens: Annotated[int, range_field("min_tokens")] = 0
    max_tokens: Annotated[int, Field(ge=FILL_CONTEXT, le=int(range_of("max_tokens").highest))] | None = Field(
        default=None,
        description="-1: as many as the context holds; None: 128, and in a chat as many as the context holds",
    )
    stop: StopString | Sequence[StopString] = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = Field(
        default=None, description="what a text must match"
    )
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="most tokens of thoughts; then they end, and the answer begins"
    )
    logprobs: Annotated[int, range_field("logprobs")] | None = Field(
        default=None, description="how many of the most probable tokens to report with each"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _explanation(error) from error

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _explanation(error: ValidationError) -> RequestError:
    """Error message with one sentence for each wrong field, without its value."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    first = problems[0]["loc"]
    return RequestError("; ".join(dict.fromkeys(map(_sentence, problems))), str(first[0]) if first else "")


def _sentence(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else "parameters"
    if problem["type"] == "extra_forbidden":
        return f"{field}: there is no such parameter"
    return f"{field}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
