"""HTTPS: files that are wrong end the start with a clear error, right ones encrypt from the first answer."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.base.errors import PermissionProblemError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.server.http.listening import tls_context
from tests.server.fakes import say
from tests.server.running_server import listening_server

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_pair(folder: Path, name: str, *options: str) -> Settings:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [program, "req", "-x509", *CURVE, "-days", "2", "-subj", "/CN=here"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *(options or ("-nodes",))], check=True, capture_output=True)
    return Settings(tls_certificate=certificate, tls_key=key)


def trusting(settings: Settings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(settings.tls_certificate))


def test_tls_server_answers(tmp_path: Path) -> None:
    settings = make_pair(tmp_path, "a")
    with listening_server(lambda _: say("Hello"), settings) as at:
        assert at.url.startswith("https://")
        with httpx.Client(base_url=at.url, verify=trusting(settings)) as client:
            answer = client.post("/v1/completions", json={"prompt": "a"})
            body = {"prompt": "a", "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = list(stream.iter_lines())
        assert answer.json()["choices"][0]["text"] == "Hello"
        assert "data: [DONE]" in lines
        with pytest.raises(httpx.TransportError):
            httpx.get(at.url.replace("https://", "http://") + "/health")


def test_tls_is_off_without_files() -> None:
    assert tls_context(Settings()) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tls_certificate": "a.pem"}, "SSD_TLS_CERTIFICATE alone is not enough for HTTPS: set SSD_TLS_KEY"),
        ({"tls_key": "a.key"}, "SSD_TLS_KEY alone is not enough for HTTPS: set SSD_TLS_CERTIFICATE"),
        ({"tls_certificate": "none.pem", "tls_key": "a.key"}, "none.pem .SSD_TLS_CERTIFICATE. .* No such"),
        ({"tls_certificate": "a.pem", "tls_key": "none.key"}, "none.key .SSD_TLS_KEY. .* No such"),
        ({"tls_certificate": ".", "tls_key": "a.key"}, "SSD_TLS_CERTIFICATE. cannot be read: Is a directory"),
        ({"tls_certificate": "a.key", "tls_key": "a.key"}, "are not a certificate chain and its key"),
        ({"tls_certificate": "a.pem", "tls_key": "b.key"}, "key values mismatch"),
        ({"tls_certificate": "c.pem", "tls_key": "c.key"}, "the key of SSD_TLS_KEY is encrypted"),
    ],
)
def test_tls_invalid_files_are_settings_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], message: str
) -> None:
    for name in ("a", "b"):
        make_pair(tmp_path, name)
    make_pair(tmp_path, "c", "-passout", "pass:sesame")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        tls_context(Settings.model_validate(fields))


def test_tls_unreadable_file_is_a_permission_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_pair(tmp_path, "a")
    opened = Path.open

    def closed(path: Path, mode: str = "r") -> object:
        if path == settings.tls_key:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(PermissionProblemError, match=r"SSD_TLS_KEY. cannot be read by this user"):
        tls_context(settings)


def test_tls_errors_end_the_command_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--port", "0", "--tls-certificate", "/nowhere/a.pem", "--tls-key", "/nowhere/a.key"]
    assert cli.main(["serve", *flags]) == 2
    assert capsys.readouterr().err.count("/nowhere/a.pem (SSD_TLS_CERTIFICATE) cannot be read") == 1
