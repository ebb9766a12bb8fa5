"""Types of request fields: strict base models, unsupported fields, and bounded lists.

Knows the shapes of values, not what the server does with them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic import Strict as Strictness
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from ssd_serve.base.messages import FixedShape
from ssd_serve.sampling.parameters import range_of
from ssd_serve.sampling.validation import range_field
from ssd_serve.server.http.middleware import REQUEST_ID_PATTERN
from ssd_serve.server.limits import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LABEL_CHARACTERS,
    MAX_LABEL_NAME_CHARACTERS,
    MAX_LABELS,
    MAX_LOGIT_BIAS,
    MAX_PROMPTS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKEN_IDS,
)


class Strict(BaseModel):
    """No unknown fields, no coercion between JSON types, no NaN or infinity, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    long_lists: ClassVar[Mapping[str, int]] = {}
    """Fields of token ids that are parsed without pydantic, with the least length of each list."""


class Lenient(Strict):
    """Keeps unknown fields, so that `UnknownFields` can report them; otherwise as strict."""

    model_config = ConfigDict(extra="allow")

    passes_on: ClassVar[bool] = False
    """True where unknown fields are passed on, to a chat template for example."""


def only_where(field: str, harmless: Sequence[object], needs: Mapping[str, object]) -> dict[str, Any]:
    """Return a rule of the OpenAPI document: `field` has a `harmless` value, or `needs` holds."""
    return {field: {"anyOf": [{"properties": {field: {"enum": list(harmless)}}}, dict(needs)]}}


def not_built(*harmless: object) -> BeforeValidator:
    """Return the validator of an unsupported field: only null or a `harmless` value passes."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(other) and value == other for other in harmless):
            return value
        raise PydanticCustomError("not_built", "not built in this server; leave this field out")

    return BeforeValidator(check, json_schema_input_type=_one_of(None, *harmless))


_JSON_TYPES: dict[type[Any], str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
}


def _one_of(*values: object) -> Any:
    """Return a type that the OpenAPI document describes as one of these values."""
    types = dict.fromkeys(_JSON_TYPES[type(value)] for value in values)
    return Annotated[object, WithJsonSchema({"type": list(types), "enum": list(values)})]


NotBuilt = Annotated[object, not_built()]
"""An unsupported field of the OpenAI or vLLM API; null passes."""

Ignored = Annotated[object, AfterValidator(lambda _: None), Field(description="accepted; changes nothing")]
"""A field that does not change the result by its definition."""

Label = Annotated[
    Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None,
    AfterValidator(lambda _: None),
    Field(description="accepted; changes nothing"),
]
"""A user or purpose, which this server does not keep."""

Labels = Annotated[
    Annotated[
        dict[
            Annotated[str, Field(max_length=MAX_LABEL_NAME_CHARACTERS)],
            Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)],
        ],
        Field(max_length=MAX_LABELS),
    ]
    | None,
    AfterValidator(lambda _: None),
    Field(description="accepted; changes nothing"),
]
"""Labels within the bounds of the OpenAI API."""


def _tokens(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("max_tokens", "Input should be at least 1, or -1 for as many as fit")
    return value


Tokens = Annotated[int, Field(ge=-1, le=int(range_of("max_tokens").highest))]
"""Most output tokens; -1: as many as fit, 0: none, for scores of the prompt."""

Truncation = Annotated[
    int, Field(ge=-1, le=MAX_TOKEN_IDS, json_schema_extra={"not": {"const": 0}}), AfterValidator(_tokens)
]
"""Number of last tokens to keep; -1: as many as fit."""

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


def _template_variables(value: dict[str, object]) -> dict[str, object]:
    for name in sorted(_OWN_VARIABLES & value.keys()):
        raise PydanticCustomError("template_variable", "{name} is not set here", {"name": name})
    return value


_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
_NAMES: JsonDict = {"propertyNames": {"not": {"enum": [*sorted(_OWN_VARIABLES)]}}}
TemplateVariables = Annotated[
    dict[str, object],
    Field(max_length=MAX_LABELS, json_schema_extra=_NAMES),
    AfterValidator(_template_variables),
]
"""Variables of a chat template besides the conversation; never the template itself."""


def _one_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def text_or_list(of: str) -> Discriminator:
    """Return a discriminator of `<text>` and a `<list>` of something."""
    return Discriminator(
        _one_or_list,
        custom_error_type="text_or_list",
        custom_error_message=f"Input should be a string or a list of {of}",
    )


def by_type(*kinds: str, default: str | None = None, media: Sequence[str] = ()) -> Discriminator:
    """Return a discriminator of objects by `type`; `default` is the type of objects without one, those of
    `media` are `<media>`."""

    def kind_of(value: object) -> str | None:
        kind: Any = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str) or kind not in (*kinds, *media):
            return None
        return f"<{kind}>" if kind in kinds else "<media>"

    return Discriminator(
        kind_of,
        custom_error_type="by_type",
        custom_error_message=f"Input should have one of the types {', '.join(kinds)}",
    )


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("<list>")],
    text_or_list("strings"),
]


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def _not_empty(value: tuple[int, ...]) -> tuple[int, ...]:
    # `min_length` would count the ids before the first wrong one.
    if not value:
        raise PydanticCustomError("too_short", "Input should have at least one token id")
    return value


# JSON has no tuples: a list counts as one.
SomeTokenIds = Annotated[
    tuple[TokenId, ...], Strictness(False), Field(fail_fast=True, max_length=MAX_TOKEN_IDS)
]
TokenIds = Annotated[SomeTokenIds, AfterValidator(_not_empty), Field(json_schema_extra={"minItems": 1})]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]
AllowedTokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)]
BadWords = Annotated[
    list[
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS, json_schema_extra={"pattern": r"\S"}),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_BAD_WORDS),
]


def _few_biases(value: object) -> object:
    # Each wrong entry makes two errors: they are counted before they are read.
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_long", "Input should have at most {most} items", {"most": MAX_LOGIT_BIAS}
        )
    return value


LogitBias = Annotated[
    # The names of a JSON object are always strings, so these are read as numbers.
    dict[Annotated[TokenId, Strictness(False)], Annotated[float, range_field("logit_bias")]],
    Field(
        max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}
    ),
    BeforeValidator(_few_biases),
]


class SpeculationOptions(Lenient):
    """Limits of speculation; the text stays the same."""

    mode: Literal["auto", "off"] | None = Field(
        None, description="off: no draft tokens; auto: as many as pay"
    )
    max_nodes: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="most draft tokens that a round verifies"
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="draft tokens that each round verifies, regardless of cost"
    )
    shape: Literal["chain", "tree"] | None = Field(
        None, description="shape of num_speculative_tokens draft tokens; null: chain"
    )
    trace: bool | None = Field(
        None,
        description="report the number of tokens of each round, of which all but the last were drafted, and "
        "details of the first choice's rounds",
    )

    @property
    def most_nodes(self) -> int | None:
        """Most draft tokens of a round; None: no limit but cost."""
        return 0 if self.mode == "off" else self.max_nodes

    @model_validator(mode="after")
    def _shape_has_a_number(self) -> "SpeculationOptions":
        if self.shape is not None and self.num_speculative_tokens is None:
            raise PydanticCustomError("shape", "shape needs num_speculative_tokens: give a number")
        return self

    @property
    def fixed_shape(self) -> FixedShape | None:
        """Shape of the draft tokens of each round; None: the server's."""
        count = self.num_speculative_tokens
        return FixedShape(count, self.shape != "tree") if count else None


CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
RequestName = Annotated[str, Field(pattern=f"^{REQUEST_ID_PATTERN}$")]


def _prompt_shape(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    first: object = value[0]
    if isinstance(first, bool):
        return None
    if isinstance(first, str):
        return "<texts>"
    if isinstance(first, int):
        return "<ids>"
    return "<id lists>" if isinstance(first, list) else None


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[
        list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<id lists>")
    ],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids, not empty",
    ),
]


class TextPart(Lenient):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Lenient):
    """A refusal of an earlier answer, which counts as its text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


def _no_media(_value: object) -> object:
    raise PydanticCustomError(
        "not_built", "not built: this server reads text only; send a description or a transcript as text"
    )


Media = Annotated[object, BeforeValidator(_no_media), WithJsonSchema({"not": {}}), Tag("<media>")]
"""Part with an image, a sound, a video or a file."""

ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")] | Media,
    by_type("text", "refusal", media=("image_url", "input_audio", "audio_url", "video_url", "file")),
]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[ContentPart], Field(fail_fast=True, max_length=1024), Tag("<list>")],
    text_or_list("text parts"),
]


def text_of_parts(parts: Sequence[Any]) -> str:
    """Return the text of a message's parts."""
    return "".join(part.text for part in parts)
