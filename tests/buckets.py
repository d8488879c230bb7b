"""S3 as moto's server plays it, for tests: import the fixture ``bucket``."""

import logging

import pytest


class Bucket:
    """An S3 server on loopback that can be away for a while; its memory is this process's."""

    def __init__(self, name):
        from moto.server import ThreadedMotoServer

        self._make, self._port, self.address = ThreadedMotoServer, 0, f"s3://cameras/{name}"
        self.begin()

    def begin(self):
        self._server = self._make("127.0.0.1", self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def go_away(self):
        self._server.stop()


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs", reason="the extra [s3] is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Bucket(tmp_path.name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("cameras", exist_ok=True)
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.go_away()
