"""Ray's token: a Ray that we start asks for one, and one that does not is told of.

Whoever may tell Ray what to run runs it as Ray's user, and without a token that is everybody who reaches its
ports. Knows Ray's variables and one question that its directory answers, not how it is started or joined.
"""

import importlib
import secrets
import sys
from collections.abc import MutableMapping
from typing import Any

from ssd_serve.base.logs import Logger

_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ASK_S = 5.0
_QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def prepare_token(environment: MutableMapping[str, str], *, joining: bool) -> None:
    """Set what is not set yet, before Ray is imported, which reads it: for a Ray of one's own a token that is
    written nowhere, for another one that its token, if there is one, is shown. What the user chose stays."""
    if "ray" in sys.modules:
        return  # too late; a Ray that is started then makes a token file of its own
    has_token = _TOKEN in environment or _TOKEN_FILE in environment
    if has_token or not joining:
        environment.setdefault(_MODE, "token")
    if not has_token and not joining and environment[_MODE] == "token":
        environment[_TOKEN] = secrets.token_hex(32)


def warn_of_strangers(ray: Any, log: Logger) -> None:
    """Say so where the cluster that this process has joined takes orders from everybody."""
    if answers_strangers(str(ray.get_runtime_context().gcs_address)):
        log.warning(
            "this Ray cluster runs what anybody tells it who reaches its ports",
            advice="start all its nodes with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN",
        )


def answers_strangers(address: str) -> bool:
    """Whether Ray's directory at `host:port` answers somebody who shows no token. Raises nothing."""
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError:
        return False
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=_ASK_S)
        except grpc.RpcError:
            return False
    return True
