"""The page at /: static files, read once, with a policy that lets a browser load nothing from elsewhere."""

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_ROOT = Path(__file__).parent / "static"
_FOLDER = "/page/"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_page_path(path: str) -> bool:
    """True for the page and its files: no key is required for them, since they are the same in every server."""
    return path in ("", "/") or path.startswith(_FOLDER)


def add_page(app: FastAPI) -> None:
    """Serve the page. Its paths are no part of the API."""
    for file in _ROOT.rglob("*"):
        if file.suffix in _TYPES:
            name = file.relative_to(_ROOT).as_posix()
            _add_file(app, "/" if name == _INDEX else _FOLDER + name, file.read_bytes(), _TYPES[file.suffix])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    app.add_route(path, respond, methods=["GET", "HEAD"], include_in_schema=False)
