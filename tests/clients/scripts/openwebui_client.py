"""Open WebUI: its list of models, chats and titles. Argument: address of the server, without /v1."""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx

BASE_URL = sys.argv[1]
MODEL = "ssd-embedded"
KEY = "sk-no-key-is-needed-here-0123456789abcdef"
PORT = 4124
TURNS = [{"role": "user", "content": "def read_lines(path):"}]
PARAMS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "frequency_penalty": 0.1,
    "repeat_penalty": 1.1,
    "seed": 42,
    "stop": ["\n\n\n"],
    "max_tokens": 48,
}


def program(folder: str) -> "subprocess.Popen[bytes]":
    env = {
        "PATH": os.environ["PATH"],
        "HOME": folder,
        "DATA_DIR": f"{folder}/data",
        "WEBUI_SECRET_KEY": KEY,
        "WEBUI_AUTH": "False",
        "OPENAI_API_BASE_URL": f"{BASE_URL}/v1",
        "OPENAI_API_KEY": KEY,
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1"]
    return subprocess.Popen([*command, "--port", str(PORT)], env=env, cwd=folder, stdout=sys.stderr)


def healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.TransportError:
        return False


def await_program(http: httpx.Client, seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while not healthy(http):
        if time.monotonic() > until:
            raise TimeoutError("Open WebUI did not start")
        time.sleep(0.5)


def talk(http: httpx.Client) -> None:
    signed = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    http.headers["Authorization"] = f"Bearer {signed['token']}"
    assert [model["id"] for model in http.get("/api/models").json()["data"]] == [MODEL]
    chat = {"model": MODEL, "messages": TURNS, "params": PARAMS}
    answer = http.post("/api/chat/completions", json={**chat, "stream": False}).json()
    text = ""
    streamed = {**chat, "stream_options": {"include_usage": True}, "stream": True}
    with http.stream("POST", "/api/chat/completions", json=streamed) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert text == answer["choices"][0]["message"]["content"]
    turns = [*TURNS, {"role": "assistant", "content": "    return open(path).readlines()"}]
    titled = http.post("/api/v1/tasks/title/completions", json={"model": MODEL, "messages": turns})
    assert titled.json()["choices"]


with tempfile.TemporaryDirectory() as home:
    process = program(home)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120.0) as client:
            await_program(client)
            talk(client)
    finally:
        process.terminate()
        process.wait()
print(json.dumps({"versions": {"open-webui": version("open-webui")}}))
