"""Addresses that clients send reach only hosts that are allowed: by name, redirect, playlist and DNS that changes."""

import http.server
import socket
import struct
import threading
from contextlib import contextmanager, nullcontext, suppress
from ipaddress import IPv4Address

import numpy as np
import psutil
import pytest
import yuv
from hypothesis import given
from hypothesis.strategies import integers

from edgevlm.apps.hosts import AllowedHosts, addresses, reach
from edgevlm.apps.sources import network
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.errors import SourceError, SourceRefused

HERE = """
localhost LOCALHOST 127.0.0.1 127.1 127.0.1 127.255.255.254 2130706433 0x7f000001 0x7F.1 0x7f.0.0.0x1 017700000001 0177.0.0.1
00000177.1 127.000.000.001 127.0x0.1 0 0.0 0.0.0.0 0.1.2.3 ::1 :: 0:0:0:0:0:0:0:1 0::0001 ::1%1 ::ffff:127.0.0.1 ::ffff:7f00:1
::FFFF:7F00:0001 0:0:0:0:0:ffff:127.0.0.1 ::ffff:0.0.0.0 ::127.0.0.1 ::7f00:1 ::ffff:0:127.0.0.1 ::ffff:0:0:7f00:1
64:ff9b::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::7f00:1 64:ff9b:1:ffff::1 2002:7f00:1:: 2002:a9fe:a9fe::
2002:c0a8:1::1 2001:0:7f00:1:: 2001::80ff:fffe 2001:0:4136:e378:8000:63bf:3fff:fdd2 fe80::1 FE80::abcd fe80::1%1
fe80::5efe:7f00:1 febf::1 169.254.169.254 169.254.170.2 169.254.0.1 2852039166 0xA9FEA9FE 0251.0376.0251.0376 169.254.43518
::ffff:169.254.169.254 ::a9fe:a9fe fd00:ec2::254 FD00:0EC2::254 fd20:ce::254 100.100.100.200 ::ffff:100.100.100.200
168.63.129.16 192.0.0.192 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 4294967295 ff02::1 ff05::c
\u2460\u2461\u2466.0.0.1 127\u30020\u30020\u30021 \uff11\uff12\uff17.0.0.1 127\uff0e0\uff0e0\uff0e1 local\u00adhost
\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3
"""
PRIVATE = "10.0.0.1 172.16.0.1 192.168.1.1 3232235777 0300.0250.1.1 100.64.0.1 ::ffff:10.0.0.1 fd00::7 fec0::1 100::1"
PUBLIC = "1.1.1.1 8.8.8.8 134744072 ::ffff:8.8.8.8 64:ff9b::808:808 2606:4700::1111"
NOWHERE = ["", ".", "a..b", "[::1]", "127.0.0.1 ", "127.0.0.1%1", "\ud800", "x" * 300]


@pytest.mark.parametrize("private", [True, False])
def test_an_address_leads_to_one_place_however_it_is_spelled(private):
    hosts, allowed = AllowedHosts(None, private), (PRIVATE * private + " " + PUBLIC).split()
    for host in f"{HERE} {PRIVATE} {PUBLIC}".split():
        with nullcontext() if host in allowed else pytest.raises(SourceRefused, match="is not allowed"):
            hosts.resolve(host, 80)
    for host in NOWHERE:
        with pytest.raises(SourceError):
            hosts.resolve(host, 80)


def test_this_machine_is_refused_by_the_addresses_of_its_interfaces():
    found = [entry for each in psutil.net_if_addrs().values() for entry in each]
    own = {entry.address.partition("%")[0] for entry in found if entry.family in (socket.AF_INET, socket.AF_INET6)}
    assert own
    assert {reach(address) for address in own} == {"here"}


@given(integers(0, 2**32 - 1))
def test_every_spelling_of_an_address_leads_where_it_does(number):
    plain, tail = str(IPv4Address(number)), f"{number >> 16:x}:{number & 0xFFFF:x}"
    a, b, c, d = plain.split(".")
    spelled = [str(number), hex(number), f"0{number:o}", f"{a}.{number & 0xFFFFFF}", f"{a}.{int(b):#x}.{number & 0xFFFF}"]
    spelled += [f"0{int(a):o}.{b}.{c}.{d}", f"::ffff:{tail}", f"::ffff:{plain}", f"64:ff9b::{tail}"]
    assert {reach(address) for each in spelled for address in addresses(each, 80)} == {reach(plain)}
    assert {reach(each.format(tail)) for each in ("::{}", "2002:{}::1", "2001:0:{}::", "64:ff9b:1::{}")} == {"here"}


def test_what_the_operator_lists_is_allowed_and_nothing_else():
    assert AllowedHosts(None).resolve("192.168.1.1", 80) == "192.168.1.1", "a camera of a private network"
    hosts = AllowedHosts(["Localhost", "10.0.0.0/24"])
    assert hosts.resolve("LOCALHOST", 80) in ("127.0.0.1", "::1")
    assert hosts.resolve("10.0.0.9", 80) == "10.0.0.9"
    for other in ("10.0.1.9", "127.0.0.1", "::1"):
        with pytest.raises(SourceRefused):
            hosts.resolve(other, 80)
    with pytest.raises(SourceError, match="not found; check the address"):
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
    assert "lists an address that is refused: the host 127.0.0.2 is not allowed" in connection.problem
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


@contextmanager
def served(camera):
    """Run ``camera`` on a port of every address; yield the port, and options that allow 127.0.0.1 only."""
    with socket.create_server(("0.0.0.0", 0)) as listening:
        threading.Thread(target=camera, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1], SourceOptions(open_timeout_s=10, hosts=AllowedHosts(["127.0.0.1"]))


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

    with served(camera) as (port, options), pytest.raises(SourceRefused, match="redirects to another address"):
        network.connect(f"rtsp://127.0.0.1:{port}/live", options)
    assert {host for host, _ in asked} == {"127.0.0.1"}


def test_rtmp_is_not_redirected_to_another_host():
    """A server may reject a client and name another address (``NetConnection.Connect.Rejected``, 302), as libraries follow."""
    pytest.importorskip("av")
    asked = []

    def text(value):
        return b"\x02" + len(value).to_bytes(2, "big") + value.encode()

    def fields(**values):
        each = (len(name).to_bytes(2, "big") + name.encode() + value for name, value in values.items())
        return b"\x03" + b"".join(each) + b"\0\0\x09"

    def camera(listening):
        while True:
            with suppress(OSError), listening.accept()[0] as link:
                asked.append(link.getsockname()[0])
                greeting = link.recv(1537, socket.MSG_WAITALL)[1:]
                link.sendall(b"\x03" + bytes(1536) + greeting)
                link.recv(1536, socket.MSG_WAITALL)
                link.recv(4096)  # connect
                place = text(f"rtmp://127.0.0.2:{listening.getsockname()[1]}/live/secret")
                rejected = text("NetConnection.Connect.Rejected")
                more = fields(code=b"\0" + struct.pack(">d", 302), redirect=place)
                body = text("_error") + b"\0" + struct.pack(">d", 1) + b"\x05"
                body += fields(level=text("error"), code=rejected, description=text("[ 302 ]"), ex=more)
                pieces = [body[at : at + 128] for at in range(0, len(body), 128)]
                link.sendall(b"\x03\0\0\0" + len(body).to_bytes(3, "big") + b"\x14\0\0\0\0" + b"\xc3".join(pieces))
                link.recv(4096)

    with served(camera) as (port, options), pytest.raises(SourceError, match="cannot be read"):
        network.connect(f"rtmp://127.0.0.1:{port}/live/1", options)
    assert asked == ["127.0.0.1"]
