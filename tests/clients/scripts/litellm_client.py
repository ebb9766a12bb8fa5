"""LiteLLM, as a client and as a proxy."""

import subprocess
import sys
from pathlib import Path

import litellm
import openai
from checks import BASE_URL, KEY, MODEL, TOOLS, Checks, await_program

checks = Checks("litellm")
PORT = 4123
same = {
    "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
    "seed": 7,
    "max_tokens": 48,
}
here = {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": KEY}

with checks.check("a chat, whole and streamed: the same text") as seen:
    whole = litellm.completion(**here, **same).choices[0].message.content
    chunks = litellm.completion(**here, **same, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    seen.append(repr(whole[:60]))
with checks.check("a tool that must be called") as seen:
    wish = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**here, **{**same, "max_tokens": 200}, **wish).choices[0].message.tool_calls
    seen.append(f"{call.function.name} {call.function.arguments}")
with checks.check("by its provider of Anthropic's messages") as seen:
    there = {"model": f"anthropic/{MODEL}", "api_base": BASE_URL, "api_key": KEY}
    answer = litellm.completion(**there, messages=same["messages"], max_tokens=48)
    seen.append(repr(answer.choices[0].message.content[:40]))
with checks.check("through its proxy, whole and streamed") as seen:
    command = [str(Path(sys.executable).with_name("litellm")), "--port", str(PORT), "--host", "127.0.0.1"]
    named = ["--model", here["model"], "--api_base", here["api_base"], "--telemetry", "False"]
    env = {"OPENAI_API_KEY": KEY, "LITELLM_MASTER_KEY": KEY, "PATH": "/usr/bin:/bin"}
    proxy = subprocess.Popen([*command, *named], env=env, stdout=sys.stderr)
    try:
        await_program(f"http://127.0.0.1:{PORT}/health/liveliness")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY)
        asked = {"model": here["model"], **same}
        answer = client.chat.completions.create(**asked).choices[0].message.content
        chunks = client.chat.completions.create(**asked, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert answer == streamed == whole
        seen.append(repr(answer[:60]))
    finally:
        proxy.terminate()
        proxy.wait()
sys.exit(checks.report())
