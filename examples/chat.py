"""Chat with a running server: `python chat.py [URL]`. Needs `pip install openai`."""

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = []
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    text = ""
    with client.chat.completions.create(
        model=model, messages=messages, stream=True, max_tokens=200, temperature=0
    ) as stream:
        for chunk in stream:
            piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            print(piece, end="", flush=True)
            text += piece
    print()
    messages.append({"role": "assistant", "content": text})
