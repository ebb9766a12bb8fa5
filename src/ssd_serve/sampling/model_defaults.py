"""Sampling defaults that a model brings along."""

from pathlib import Path

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import read_json
from ssd_serve.models.short_names import RECOMMENDED_SAMPLING
from ssd_serve.models.weights.formats import recognised

_FILE = "generation_config.json"


def model_defaults(path: Path) -> dict[str, int | float]:
    """Return defaults by parameter: of `generation_config.json` or a GGUF file's metadata, else a built-in model's.

    Raises `CheckpointError` for a value out of range.
    """
    file = path / _FILE
    if file.is_file():
        found = read_json(file)
    elif path.exists() and (known := recognised(path)) is not None and not (path / "config.json").exists():
        file, found = path, known.config(path)[1]
    else:
        found = {}
    if not found.keys() - {"eos_token_id"}:
        return {**RECOMMENDED_SAMPLING.get(path.name, {})}
    from pydantic import ValidationError  # 10 MB of memory, which a verifier needs for nothing else

    from ssd_serve.sampling.validation import GenerationConfig

    try:
        config = GenerationConfig.model_validate(dict(found))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        reasons = "; ".join(
            f"{each['loc'][0]}: {each['msg'][:1].lower()}{each['msg'][1:]}" for each in problems
        )
        raise CheckpointError(
            f"{file}: {reasons}; repair the file, or leave it unread with SSD_GENERATION_CONFIG=none"
        ) from error
    values = config.model_dump(exclude={"do_sample"}, exclude_none=True)
    return values | ({"temperature": 0.0} if config.do_sample is False else {})
