"""Health check of a container: exit code 0 if the server can generate a token now, else 1."""

import http.client
import os
import ssl
import sys

_PATIENCE_S = 4.0


def main() -> int:
    """Request /health and print the answer, which names the problem."""
    port = int(os.environ.get("SSD_PORT") or 8000)
    try:
        connection = _connection(port)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        print(answer.status, answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        print(f"port {port}: {error}")
        return 1
    return 0 if answer.status == 200 else 1


def _connection(port: int) -> http.client.HTTPConnection:
    """The certificate names the public address, not this one: it is not looked at."""
    if not os.environ.get("SSD_TLS_CERTIFICATE"):
        return http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=_PATIENCE_S, context=context)


if __name__ == "__main__":
    sys.exit(main())
