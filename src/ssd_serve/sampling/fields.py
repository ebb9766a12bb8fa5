"""Types of sampling parameters as people type them: the ranges of the table, as pydantic checks them.

Whoever takes parameters, over HTTP or in Python, declares them with these. Knows no values that need a model.
"""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, create_model
from pydantic_core import PydanticCustomError

from ssd_serve.sampling.parameters import Stage, at, range_of

Model = TypeVar("Model", bound=BaseModel)


def within(name: str) -> Any:
    """The range of this parameter, for `Annotated`."""
    allowed = range_of(name)
    if allowed.above:
        return Field(gt=allowed.lowest, le=allowed.highest)
    return Field(ge=allowed.lowest, le=allowed.highest)


_LEAST = range_of("temperature").least_positive


def _temperature(value: float) -> float:
    if 0 < value < _LEAST:
        raise PydanticCustomError("temperature", "Input should be 0 or at least {least}", {"least": _LEAST})
    return value


Temperature = Annotated[
    float,
    within("temperature"),
    Field(json_schema_extra={"anyOf": [{"const": 0}, {"minimum": _LEAST}]}),
    AfterValidator(_temperature),
]
Choices = Annotated[int, Field(ge=1, le=1024)]
"""Texts for each prompt."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""64 bits, with or without a sign."""


def with_numbers(model: type[Model]) -> type[Model]:
    """The model with a field for every number of the table that acts on logits and that it does not declare
    itself, to have a type or a description. None means the default."""
    added: dict[str, Any] = {}
    for each in at(Stage.START, Stage.PENALTY, Stage.TEMPERATURE, Stage.TRUNCATION):
        if each.name not in model.model_fields and each.range is not None:
            number = int if each.range.whole else float
            added[each.name] = (Annotated[number | None, within(each.name)], None)
    return (
        create_model(model.__name__, __base__=model, __module__=model.__module__, **added) if added else model
    )
