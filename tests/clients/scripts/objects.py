"""The object that structured output is asked for."""

from pydantic import BaseModel, ConfigDict, Field


class WarmPlace(BaseModel):
    """A place, and how it is there."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    warm: bool
