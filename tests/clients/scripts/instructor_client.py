"""instructor: objects from tools, from JSON and from schemas, whole and partial."""

import sys

import instructor
import openai
from checks import BASE_URL, KEY, MODEL, Checks
from objects import WarmPlace

checks = Checks("instructor")


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    with checks.check(f"an object by {mode.name}") as seen:
        client = instructor.from_openai(openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY), mode=mode)
        ask = [{"role": "user", "content": "A warm place?"}]
        place = client.chat.completions.create(
            model=MODEL, messages=ask, response_model=WarmPlace, seed=7, max_retries=0
        )
        assert isinstance(place, WarmPlace)
        seen.append(place)
sys.exit(checks.tell())
