"""The path under which a proxy shows this server. Knows no routes."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: tells the application its root path, whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            path = str(scope["path"])
            whole = path == self._root or path.startswith(f"{self._root}/")
            scope = {**scope, "root_path": self._root, "path": path if whole else self._root + path}
        await self._app(scope, receive, send)


def path_within(scope: Scope) -> str:
    """The path of a request below the root path."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
