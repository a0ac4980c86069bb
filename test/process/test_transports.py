"""HTTPS and Unix sockets, with certificates of the test's own."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from fake import dummy_model, serving

from runtime.errors import ConfigError
from runtime.launch_server import bind_unix, main

BODY = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "talon test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    keyfile, certfile = folder / "key.pem", folder / "cert.pem"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    keyfile.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    certfile.write_bytes(signed.public_bytes(encoding))
    return keyfile, certfile


def test_https_with_a_certificate(tmp_path: Path) -> None:
    keyfile, certfile = certificate(tmp_path)
    with serving(dummy_model(tmp_path / "model"), "--ssl-keyfile", str(keyfile), "--ssl-certfile", str(certfile)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certfile))
        with httpx.Client(verify=context, base_url=server.url, timeout=10) as client:
            assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 2
            with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
                assert "[DONE]" in stream.read().decode()
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=5)


def test_a_certificate_that_cannot_be_used_is_refused_before_the_model_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keyfile, _ = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, certfile = certificate(tmp_path / "other")
    for wrong in (certfile, keyfile):  # of another key; no certificate
        flags = ["--port", "0", "--model-path", str(tmp_path / "nowhere"), "--ssl-keyfile", str(keyfile), "--ssl-certfile", str(wrong)]
        assert main(flags) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"talon: --ssl-certfile {wrong} and --ssl-keyfile {keyfile} cannot be used.")
        assert said.count("\n") == 1


def test_a_unix_socket_of_a_server_that_does_not_listen_yet_is_taken(tmp_path: Path) -> None:
    with bind_unix(str(tmp_path / "s")) as first:
        with pytest.raises(ConfigError, match="address already in use"):
            bind_unix(str(tmp_path / "s"))
        first.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
    bind_unix(str(tmp_path / "s")).close()


def test_a_unix_socket_and_one_left_by_a_dead_server(tmp_path: Path) -> None:
    path, model = tmp_path / "s", dummy_model(tmp_path / "model")
    for _ in range(2):  # the first server is killed and leaves its socket
        with serving(model, "--uds", str(path)) as server:
            assert server.url == "http://localhost"
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=10) as client:
                assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 2
        assert path.is_socket()
    with serving(model, "--uds", str(path)) as server:
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert not path.exists()
