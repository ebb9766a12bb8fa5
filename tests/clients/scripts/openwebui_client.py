"""Open WebUI: its list of models, chats and titles."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from checks import BASE_URL, KEY, MODEL, Checks, await_program

checks = Checks("open-webui")
PORT = 4124


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


turns = [{"role": "user", "content": "def read_lines(path):"}]
params = {
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
with tempfile.TemporaryDirectory() as home:
    process = program(home)
    try:
        await_program(f"http://127.0.0.1:{PORT}/health")
        http = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120.0)
        signed = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
        http.headers["Authorization"] = f"Bearer {signed['token']}"
        with checks.check("its list of models") as seen:
            models = [model["id"] for model in http.get("/api/models").json()["data"]]
            assert models == [MODEL], models
            seen.append(models)
        chat = {"model": MODEL, "messages": turns, "params": params}
        with checks.check("a chat, whole and streamed: the same text") as seen:
            answer = http.post("/api/chat/completions", json={**chat, "stream": False}).json()
            whole = answer["choices"][0]["message"]["content"]
            text = ""
            usage = {"stream_options": {"include_usage": True}}
            with http.stream(
                "POST", "/api/chat/completions", json={**chat, **usage, "stream": True}
            ) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            text += choice["delta"].get("content") or ""
            assert text == whole, (text, whole)
            seen.append(repr(whole[:60]))
        with checks.check("a title for it") as seen:
            turns.append({"role": "assistant", "content": "    return open(path).readlines()"})
            titled = http.post("/api/v1/tasks/title/completions", json={"model": MODEL, "messages": turns})
            seen.append(repr(titled.json()["choices"][0]["message"]["content"][:40]))
    finally:
        process.terminate()
        process.wait()
sys.exit(checks.report())
