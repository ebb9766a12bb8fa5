"""Records what a client program sends: `python -m tests.clients.record NAME [PYTHON]`.

Starts a server with the embedded pair and a recording proxy, runs `scripts/NAME_client.py` with a Python that
has the client's packages, and writes `sessions/NAME.json`, which `test_sessions.py` replays.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from tests.servers import free_port, running

_HERE = Path(__file__).parent
_KEPT_HEADERS = ("authorization", "content-type", "accept", "x-api-key", "anthropic-version")


def recorder(url: str, recorded: list[dict[str, object]]) -> ThreadingHTTPServer:
    """Return a proxy to `url` that appends every request to `recorded`."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() in _KEPT_HEADERS}
            request = {"method": self.command, "path": self.path, "headers": headers}
            recorded.append({**request, "body": json.loads(body) if body else None})
            with httpx.stream(
                self.command, url + self.path, content=body, headers=headers, timeout=60.0
            ) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Write no access log."""

    return ThreadingHTTPServer(("127.0.0.1", free_port()), Proxy)


def record(name: str, python: str) -> int:
    """Record one client's session and return the exit code of its script."""
    requests: list[dict[str, object]] = []
    port = free_port()
    command = [sys.executable, "-m", "ssd_serve", "serve", "--port", str(port), "--tool-parser", "hermes"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command, {**os.environ, "SSD_TARGET": "embedded"}, Path(folder), port) as (_, url, _log),
    ):
        proxy = recorder(url, requests)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        script = str(_HERE / "scripts" / f"{name}_client.py")
        address = f"http://127.0.0.1:{proxy.server_port}"
        done = subprocess.run([python, script, address], capture_output=True, text=True, check=False)
        proxy.shutdown()
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode == 0:
        software = json.loads(done.stdout.splitlines()[-1])["versions"]
        text = json.dumps({"software": software, "requests": requests}, indent=1)
        (_HERE / "sessions" / f"{name}.json").write_text(text + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(record(sys.argv[1], (sys.argv[2:] or [sys.executable])[0]))
