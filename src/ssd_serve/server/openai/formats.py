"""Output formats of requests: JSON, schemas, regular expressions, grammars and structural tags.

Knows the shapes of values; `grammar.py` compiles them.
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
    """A schema with a name, which is ignored."""

    name: str | None = None
    description: str | None = None
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))
    strict: bool | None = Field(None, description="ignored: the output always matches")


class JsonOfSchema(Lenient):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Tagged(Lenient):
    """A part of the output, from `begin` to `end`, that matches a schema."""

    begin: Annotated[str, Field(min_length=1, max_length=256)]
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))
    end: Annotated[str, Field(max_length=256)]


class StructuralTags(Lenient):
    """Text in which every trigger begins one of the structures."""

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
    """vLLM's field of output formats; exactly one of these."""

    json_schema: Schema | None = Field(
        None, validation_alias=AliasChoices("json"), description="JSON that matches this schema"
    )
    regex: Expression | None = Field(None, description="text that matches this regular expression")
    choice: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, min_length=1, max_length=1024, description="the output is one of these texts"
    )
    grammar: Expression | None = Field(None, description="Lark as llguidance reads it, or GBNF")
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: StructuralTags | None = Field(None, description="free text with tagged parts")
    disable_any_whitespace: bool | None = Field(None, description="no blanks between parts of JSON")
    whitespace_pattern: Annotated[object, not_built()] = None
