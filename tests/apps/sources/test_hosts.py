"""Addresses that clients send reach only hosts that are allowed: by name, redirect, playlist and DNS that changes."""

import http.server
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
import yuv

from edgevlm.apps.sources import network
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.errors import SourceError, SourceRefused


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.1", "2130706433", "0x7f.1", "0", "0.1.2.3", "::1", "::", "::ffff:127.0.0.1", "::127.0.0.1", "fe80::1",
     "169.254.169.254", "224.0.0.1", "255.255.255.255", "100.100.100.200", "fd00:ec2::254", "2002:7f00:1::"],
)  # fmt: skip
def test_this_machine_and_metadata_are_refused(host):
    with pytest.raises(SourceRefused, match="is not allowed"):
        AllowedHosts(None).resolve(host, 80)


def test_what_the_operator_lists_is_allowed_and_nothing_else():
    assert AllowedHosts(None).resolve("192.168.1.1", 80) == "192.168.1.1", "a camera of a private network"
    hosts = AllowedHosts(["Localhost", "10.0.0.0/24"])
    assert hosts.resolve("LOCALHOST", 80) in ("127.0.0.1", "::1")
    assert hosts.resolve("10.0.0.9", 80) == "10.0.0.9"
    for other in ("10.0.1.9", "127.0.0.1", "::1"):
        with pytest.raises(SourceRefused):
            hosts.resolve(other, 80)
    with pytest.raises(SourceError, match="no host of that name"):
        hosts.resolve("x" * 300, 80)
    with pytest.raises(ValueError, match="10"):
        AllowedHosts(["10.0.0.0/33"])


@pytest.fixture
def site():
    """A server on every loopback address; ``site.answers``: by path. ``site.asked``: (address, path) of each request."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.request.getsockname()[0], self.path))
            status, headers, body = self.server.answers[self.path]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Answers) as server:
        server.asked, server.answers = [], {}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("to", ["http://127.0.0.2:{port}/secret", "https://127.0.0.2:{port}/secret", "ftp://127.0.0.2/x"])
def test_redirects_to_other_hosts_are_not_followed(site, to):
    site.answers["/"] = 302, {"Location": to.format(port=site.server_port)}, b""
    with pytest.raises(SourceError):
        network.connect(f"http://127.0.0.1:{site.server_port}/", SourceOptions(hosts=AllowedHosts(["127.0.0.1"])))
    assert site.asked == [("127.0.0.1", "/")]


@pytest.mark.parametrize("hosts", [AllowedHosts(["127.0.0.1"]), None])
@pytest.mark.parametrize("by", ["redirect", "name"])
def test_a_list_leads_to_no_other_private_host(site, by, hosts):
    """Its own host it may name, whatever that is."""
    other = f"http://127.0.0.2:{site.server_port}/secret.ts"
    made = yuv.encode([np.full((48, 64, 3), 50 * number, np.uint8) for number in range(5)], "yuv420p", "mpegts", "mpeg4")[0]
    site.answers["/0.ts"] = 200, {"Content-Type": "video/mp2t"}, made
    site.answers["/1.ts"] = 302, {"Location": other}, b""
    site.answers["/secret.ts"] = site.answers["/0.ts"]
    named = ["0.ts", "1.ts" if by == "redirect" else other]
    playlist = "".join(["#EXTM3U\n#EXT-X-TARGETDURATION:1\n", *(f"#EXTINF:1,\n{each}\n" for each in named), "#EXT-X-ENDLIST\n"])
    site.answers["/list.m3u8"] = 200, {"Content-Type": "application/vnd.apple.mpegurl"}, playlist.encode()
    connection = network.connect(f"http://127.0.0.1:{site.server_port}/list.m3u8", SourceOptions(hosts=hosts))
    assert connection.grab() is not None
    assert connection.retrieve().shape == (48, 64, 3)
    while connection.grab() is not None:
        pass
    connection.close()
    assert "names an address that is not read: the host 127.0.0.2 is not allowed" in connection.problem
    assert {host for host, _ in site.asked} == {"127.0.0.1"}
    assert ("127.0.0.1", "/0.ts") in site.asked


def test_a_name_is_resolved_once_for_each_connection(monkeypatch):
    opened, answers = [], iter(["10.0.0.5", "127.0.0.1", "fd00::7"])

    def resolved(host, port, **_):
        return [(0, 0, 0, "", (next(answers), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(network, "FfmpegConnection", lambda url, options, relay: opened.append(url))
    monkeypatch.setattr(network, "Relay", lambda address, port, timeout_s, tls: opened.append((address, port)))
    options = SourceOptions(hosts=AllowedHosts(None))
    network.connect("rtsp://user:p%40ss@camera.example:8554/1?x=y", options)
    with pytest.raises(SourceRefused):
        network.connect("rtsp://camera.example/1", options)
    network.connect("rtsp://camera.example/1", options)
    assert opened == [
        ("10.0.0.5", 8554), "rtsp://user:p%40ss@10.0.0.5:8554/1?x=y", ("fd00::7", 554), "rtsp://[fd00::7]/1",
    ]  # fmt: skip


@pytest.mark.parametrize("reply", ["RTSP/1.0 302 Moved", "RTSP/1.0  302 Moved", "RTSP/2 301 Moved", "RTSP/1.0 0305 x"])
def test_rtsp_is_not_redirected_to_another_host(reply):
    pytest.importorskip("av")
    asked = []

    def camera(listening):
        while True:
            with suppress(OSError), listening.accept()[0] as link:
                asked.append((link.getsockname()[0], data := link.recv(4096)))
                number = data.partition(b"CSeq: ")[2].partition(b"\r")[0].decode()
                place = f"rtsp://127.0.0.2:{listening.getsockname()[1]}/secret"
                for byte in f"{reply}\r\nCSeq: {number}\r\nLocation: {place}\r\n\r\n".encode():
                    link.sendall(bytes([byte]))
                link.recv(4096)

    with socket.create_server(("0.0.0.0", 0)) as listening:
        threading.Thread(target=camera, args=(listening,), daemon=True).start()
        options = SourceOptions(open_timeout_s=10, hosts=AllowedHosts(["127.0.0.1"]))
        with pytest.raises(SourceRefused, match="redirects to another address"):
            network.connect(f"rtsp://127.0.0.1:{listening.getsockname()[1]}/live", options)
    assert {host for host, _ in asked} == {"127.0.0.1"}
