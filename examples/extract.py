"""Read facts from a text into an object: `python extract.py [URL]`. Needs `pip install openai`.

The schema holds the output to its form; drafts are held to it too. Strings and numbers have bounds, because a small
model may go on until `max_tokens` otherwise.
"""

import json
import sys

from openai import OpenAI
from openai.types.shared_params import ResponseFormatJSONSchema

TEXT = "Ada Lovelace was born in London in 1815. She wrote the first program for Babbage's engine."
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
    },
    "required": ["name", "city", "born"],
    "additionalProperties": False,
}
FORMAT: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
}

client = OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": f"Extract name, city and year of birth as JSON.\n\n{TEXT}"}],
    response_format=FORMAT,
    max_tokens=120,
    temperature=0,
)
print(json.dumps(json.loads(answer.choices[0].message.content or ""), indent=2))
