"""Cameras behind TLS with a certificate that they have signed themselves (made by openssl; skipped without it)."""

import shutil
import ssl
import subprocess

import pytest
from cameras import MjpegCamera
from processes import rtsp_camera
from typed import edgevlm

RUN = ["run", "--json", "--threads", "1", "--frames", "2", "--fps", "20", "--camera"]


@pytest.fixture
def certificate(tmp_path):
    """Key and certificate in one file, for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    path = tmp_path / "camera.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=camera"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", path.with_suffix(".crt")]
    subprocess.run([*made, *names], check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
def camera(certificate):
    """Its address, with a password in it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = MjpegCamera(frames=1000)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with server:
        yield server.url.replace("http://", "https://u:s3cret@")


def test_it_is_refused_in_one_line(camera):
    done = edgevlm(*RUN, camera)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "camera https://***@127.0.0.1:" in done.stderr
    assert "its certificate is not trusted (" in done.stderr
    assert "or set SSL_CERT_FILE" in done.stderr
    assert "s3cret" not in done.stderr


def test_it_is_watched_once_it_is_trusted(camera, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    done = edgevlm(*RUN, camera)
    assert done.returncode == 0, done.stderr
    assert '"frames": 2' in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


@pytest.mark.parametrize(("password", "code"), [("s3cret", 0), ("wr0ng", 2)])
def test_rtsps_is_watched_without_asking_who_signed(certificate, password, code):
    with rtsp_camera(320, 240, 25, 25, "s3cret") as camera:
        camera.tell(f"password s3cret {certificate}")
        url = f"rtsps://u:{password}@127.0.0.1:{camera.port}/live"
        done = edgevlm(*RUN, url)
    assert done.returncode == code, done.stderr
    assert ("(401)" in done.stderr) == (code == 2)
    assert password not in done.stdout + done.stderr
