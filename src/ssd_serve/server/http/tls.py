"""The certificate and key of HTTPS, checked before anything is loaded. Knows no HTTP."""

import ssl
from pathlib import Path

from ssd_serve.base.errors import PermissionProblemError, SettingsError
from ssd_serve.base.settings import Settings

_CERTIFICATE, _KEY = "SSD_TLS_CERTIFICATE", "SSD_TLS_KEY"


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What a server socket needs to speak TLS; None where no certificate is set.

    `SettingsError` when one of the two files is not named, missing or not what it should be,
    `PermissionProblemError` when this user may not read it.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing, given = (_CERTIFICATE, _KEY) if certificate is None else (_KEY, _CERTIFICATE)
        raise SettingsError(f"{given} alone is not enough for HTTPS: set {missing} too")
    _check_readable(certificate, _CERTIFICATE)
    _check_readable(key, _KEY)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "unknown format").replace("_", " ").lower()
        raise SettingsError(
            f"{certificate} ({_CERTIFICATE}) and {key} ({_KEY}) are not a certificate chain and its key, "
            f"both PEM: {reason}"
        ) from error
    return context


def _check_readable(path: Path, variable: str) -> None:
    try:
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise PermissionProblemError(
            f"{path} ({variable}) cannot be read by this user: change its owner or mode"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path} ({variable}) cannot be read: {error.strerror}") from error


def _no_password() -> str:
    """Nobody sits at a terminal to type one."""
    raise SettingsError(f"the key of {_KEY} is encrypted: name one that is not, readable by this user only")
