"""The fields that say what an output must match: OpenAI's `response_format`, vLLM's `structured_outputs`.

Knows their shapes, not what follows from them.
"""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, Tag

from ssd_serve.server.limits import MAX_GRAMMAR_CHARACTERS
from ssd_serve.server.openai.fields import Lenient, by_type, not_built

Schema = Annotated[dict[str, object], Field(description="a JSON schema")]
Expression = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class TextFormat(Lenient):
    """Any text."""

    type: Literal["text"]


class JsonObject(Lenient):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Lenient):
    """A schema with its name, which changes nothing."""

    name: str | None = None
    description: str | None = None
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))
    strict: bool | None = Field(None, description="output always matches, whatever this says")


class JsonOfSchema(Lenient):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Tagged(Lenient):
    """A part of an output, from `begin` to `end`, that matches a schema."""

    begin: Annotated[str, Field(min_length=1, max_length=256)]
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))
    end: Annotated[str, Field(max_length=256)]


class StructuralTags(Lenient):
    """Text in which what begins with a trigger is one of the parts."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[Tagged] = Field(min_length=1, max_length=64)
    triggers: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(min_length=1, max_length=64)


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonOfSchema, Tag("<json_schema>")]
    | Annotated[StructuralTags, Tag("<structural_tag>")],
    by_type("text", "json_object", "json_schema", "structural_tag"),
]


class StructuredOutputs(Lenient):
    """vLLM's way to say it: one of these."""

    json_schema: Schema | None = Field(None, validation_alias=AliasChoices("json"))
    regex: Expression | None = None
    choice: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, min_length=1, max_length=1024, description="the output is one of these texts"
    )
    grammar: Expression | None = Field(None, description="Lark as llguidance reads it, or GBNF")
    json_object: bool | None = None
    structural_tag: StructuralTags | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[object, not_built()] = None
