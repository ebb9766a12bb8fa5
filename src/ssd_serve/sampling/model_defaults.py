"""What the `generation_config.json` of a model says of sampling, for requests that leave it out.

Knows the keys of that file; nothing of who asks. Free of torch.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import read_json
from ssd_serve.sampling.fields import Temperature, within

_FILE = "generation_config.json"


class _GenerationConfig(BaseModel):
    """Those keys that are parameters here; null means that the file says nothing."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, within("top_k")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    max_tokens: Annotated[int, within("max_tokens")] | None = Field(default=None, alias="max_new_tokens")


def model_defaults(folder: Path) -> dict[str, int | float]:
    """By parameter, what the model in this folder asks for. Raises `CheckpointError` where a value cannot be
    meant."""
    path = folder / _FILE
    if not path.is_file():
        return {}
    try:
        found = _GenerationConfig.model_validate(dict(read_json(path)))
    except ValidationError as error:
        raise CheckpointError(_explained(error, path)) from error
    said = found.model_dump(exclude={"do_sample"}, exclude_none=True)
    return said | ({"temperature": 0.0} if found.do_sample is False else {})


def _explained(error: ValidationError, path: Path) -> str:
    """The file, and each key with what is wrong about it."""
    problems = error.errors(include_url=False)
    told = "; ".join(f"{each['loc'][0]}: {each['msg'][:1].lower()}{each['msg'][1:]}" for each in problems)
    return f"{path}: {told}; repair the file, or leave it unread with SSD_GENERATION_CONFIG=none"
