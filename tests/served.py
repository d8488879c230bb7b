"""A server process of ``edgevlm serve`` and its address, for tests."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

openai = pytest.importorskip("openai")

WAIT_S = 120  # for what comes at once on an idle machine
KEY = "correct-horse-battery"
NOW = "how many objects are there now?"


SPED_UP = """
from dataclasses import replace
from edgevlm.apps.serve import service
options = service.stream_options
service.stream_options = lambda *given: replace(options(*given), speed={})
from edgevlm.__main__ import main
main()
"""


class Served:
    """A server process and its address. speed: times its own pace at which the demo is played."""

    def __init__(self, folder, *arguments, key=None, environment=(), speed=1):
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "EDGEVLM_TEST_KEY": KEY, **dict(environment)}
        program = ["-m", "edgevlm"] if speed == 1 else ["-c", SPED_UP.format(speed)]
        command = [sys.executable, *program, "serve", *map(str, arguments), "--port", "0", "--json"]
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment)
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(self.errors.read())
        self.serving = json.loads(line)
        self.url, self.key = self.serving["url"], key
        self.port = int(self.url.rpartition(":")[2])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=WAIT_S)

    def request(self, method, path, body=None, headers=None):
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        given = {"content-type": "application/json"} if body is not None else {}
        if self.key:
            given["authorization"] = f"Bearer {self.key}"
        text = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, text, {**given, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def watched(self, name, frames):
        """Wait until a stream has been watched for so many frames; its description."""
        return eventually(
            lambda: (found := self.get(f"/v1/streams/{name}"))["stats"] and found["stats"]["frames"] >= frames and found
        )

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        self.process.stdout.close()
        self.errors.close()
        return code


def eventually(found):
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come")


@contextmanager
def serving(folder, *arguments, **options):
    folder.mkdir(exist_ok=True)
    server = Served(folder, *arguments, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
