"""Readers of outside bytes, each fuzzed by Atheris, guided by what it covers: bytes are read, or refused as the reader says.

``python tests/fuzz/readers.py [READER ...] [--seconds N] [--corpus DIR]`` fuzzes each for that long (an hour in all unless
given) and prints executions and coverage; what breaks one is kept in the corpus, as ``READER/crash-...``, and can be given
again: ``python tests/fuzz/readers.py READER FILE``. Needs ``pip install atheris``. ``test_fuzzers.py`` does without.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from http.client import HTTPMessage
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import httpx
import numpy as np
from files import seal, spoiled_bytes, spoiled_json

SECONDS, MEGABYTES = 30, 2048  # of one input; of the process, instrumented
LONGEST = 1 << 14  # bytes of an input
HERE = Path(__file__)


def of(module: str, name: str) -> Any:
    """``edgevlm.module.name``, imported when it is used: after Atheris has begun to instrument."""
    return getattr(import_module(f"edgevlm.{module}"), name)


@cache
def scratch() -> Path:
    """A folder in memory, for readers of files."""
    return Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


def put(data: bytes, name: str) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


@cache
def demo() -> Path:
    return Path(of("runtime.model", "demo_bundle")())


class Refused(Exception):
    """Instead of what a reader returns where it does not read."""


def allow(read: Callable[..., object], *given: object) -> object:
    """What it returns; None where it refuses."""
    with suppress(of("errors", "UserError")):
        return read(*given)
    return None


# what is read


def manifest(data: bytes) -> None:
    try:
        seal(scratch(), {**json.loads(data), "checksum": ""})
    except (ValueError, TypeError, RecursionError):
        raise Refused from None
    of("runtime.bundle", "Bundle").load(scratch(), verify="manifest")


def calibrated(name: str, *more: int) -> Callable[[bytes], object]:
    """more: of the model that they are checked against."""

    def read(data: bytes) -> None:
        found = of("runtime.calibration", name).from_json(data)
        if more:
            found.check(*more)

    return read


def checkpoint(data: bytes) -> None:
    put(data, "config.json")
    of("apps.planning.model", "plan_checkpoint")(scratch(), (480, 640))


def processor(data: bytes) -> None:
    found = of("export.checkpoint", "ConfigOnly")(put(b'{"model_type": "smolvlm"}', "config.json").parent)
    put(data, "processor_config.json")
    of("export.frames", "frame_preparation")(found, ("video_processor", "image_processor"), (56, 56))


def safetensors(data: bytes) -> None:
    for tensor in of("export.checkpoint", "read_safetensors")(put(data, "model.safetensors")).values():
        tensor.rows(0, 1)


def gguf(data: bytes) -> None:
    of("export.gguf", "GgufCheckpoint")(put(data, "text.gguf"))


def onnx(data: bytes) -> None:
    for name in ("initializer_shapes", "value_shapes", "external_tensors", "operators"):
        of("engines.onnx_file", name)(data)


def snapshot(data: bytes) -> None:
    """The checksum of its header is mended, that it be looked at."""
    module = import_module("edgevlm.runtime.snapshots.format")
    size = module.PREAMBLE.size
    if len(data) >= size and data.startswith(module.MAGIC):
        _, version, _, whole = module.PREAMBLE.unpack(data[:size])
        body = data[size:whole]
        data = module.PREAMBLE.pack(module.MAGIC, version, module._header_sum(whole, body), whole) + data[size:]
    path = put(data, "1.snapshot")
    with path.open("rb") as stream:
        module.read(stream, path)


def record(data: bytes) -> None:
    """Its checksum is mended."""
    module = import_module("edgevlm.runtime.store.block")
    if (header := module.header_of(data)) is None:
        raise Refused
    place = module._CHECKSUM
    checksum = crc32(data[: place.start] + bytes(4) + data[place.stop :]).to_bytes(4, "little")
    found = module.read_record(data[: place.start] + checksum + data[place.stop :], header.stamp)
    if found is None:
        raise Refused
    assert isinstance(found, module.Block)


def stdin(data: bytes) -> None:
    descriptor = os.open(put(data, "stdin"), os.O_RDONLY)
    try:
        source = of("apps.sources.recordings", "StdinSource")(None, None, descriptor)
        for _ in range(64):
            if source.read() is None:
                break
    finally:
        os.close(descriptor)


class Response:
    """What PictureConnection needs of an answer."""

    def __init__(self, data: bytes) -> None:
        self.headers, self.length = HTTPMessage(), None
        self.headers["content-type"] = "multipart/x-mixed-replace"
        self.read1, self.close = io.BytesIO(data).read, lambda: None


def multipart(data: bytes) -> None:
    connection = of("apps.sources.network", "PictureConnection")(Response(data), None, of("apps.sources", "SourceOptions")())
    while connection.grab() is not None:
        connection.retrieve()
    connection.close()


def picture(data: bytes) -> None:
    allow(of("apps.serve.media", "decode_picture"), data)  # of fewer pixels
    if of("apps.sources.picture", "try_decoding")(data) is None:
        raise Refused


def toml(data: bytes) -> None:
    of("apps.serve.config", "settings_of")(put(data, "edgevlm.toml"))


def requests(data: bytes) -> None:
    known = 0
    for module, name in (("chat", "ChatRequest"), ("responses", "ResponsesRequest")):
        try:
            found = of(f"apps.serve.{module}", name).model_validate_json(data)
        except ValueError:
            continue
        known += 1
        asked = found if name == "ChatRequest" else allow(found.as_chat)
        for part in ("is_plain", "stops", "window", "stream_name", "functions", "must_call"):
            allow(lambda asked=asked, part=part: getattr(asked, part, None))
        for message in asked.messages if asked is not None else ():
            allow(message.for_template)
    if not known:
        raise Refused


CLUSTER = (("cluster.routes", "Noted"), ("serve.http", "NewStream"), ("serve.http", "StreamChange"), ("serve.http", "Forget"),
           ("serve.http", "WatchChange"), ("watches.watch", "Watch"))  # fmt: skip


def cluster(data: bytes) -> None:
    """What a node takes over HTTP."""
    known = 0
    for module, name in CLUSTER:
        with suppress(ValueError):
            found, known = of(f"apps.{module}", name).model_validate_json(data), known + 1
            if name == "Forget":
                allow(found.span)
    if not known:
        raise Refused


def head(data: bytes) -> None:
    """The file that a cluster's head goes on from."""
    put(data, "cluster.json")
    made = of("apps.cluster.head", "Head")(str(scratch()))
    assert isinstance(made.call("view"), dict)


@cache
def sink() -> Any:
    made = of("apps.watches.mqtt", "Mqtt")("mqtt://localhost")
    made._connected = True
    return made


def mqtt(data: bytes) -> None:
    """A device that a broker holds: whatever it is, our watches are announced afterwards."""
    status, made = of("apps.watches.sinks", "WatchStatus"), sink()
    watches = [status("door", "parcel", "is there one?", "close"), status("yard", "dog", "is there one?", "open")]
    made._devices.clear()
    made.announce(watches[:1])
    for camera in ("door", "old"):
        topic = f"homeassistant/device/edgevlm_{camera}/config"
        made._on_message(None, None, SimpleNamespace(topic=topic, payload=data, retain=True))
    made.announce(watches)
    assert sorted(made._devices) == ["door", "yard"]
    made._client._out_messages.clear(), made._client._out_packet.clear()


def engine(data: bytes) -> None:
    """What lies beside a TensorRT engine."""
    put(data, "full-0.json")
    if (found := of("engines.tensorrt.jobs", "read_record")(put(b"plan", "full-0.plan"))) is None:
        raise Refused
    assert isinstance(found.about["capacity"], int)


def replies(data: bytes) -> None:
    """What ``edgevlm ask``, ``digest``, ``journal`` and ``forget`` read of a server."""
    module, url, read = import_module("edgevlm.apps.serve.client"), "http://localhost:1", []
    asked = [
        lambda: module.ask_server("?", None, url, None, as_json=False),
        lambda: module.show_digest({}, url, None, as_json=False),
        lambda: module.journal_of(url, {}, None),
        lambda: module.forget_served(url, {}, None),
        lambda: module.journal_of("http://refuses:1", {}, None),
    ]
    answers = httpx.MockTransport(lambda asked: httpx.Response(500 if asked.url.host == "refuses" else 200, content=data))
    with patch("httpx.Client", partial(httpx.Client, transport=answers)), redirect_stdout(io.StringIO()):
        for each in asked:
            with suppress(of("errors", "UserError")), redirect_stderr(io.StringIO()):
                read.append(each())
    if not read:
        raise Refused


def lines(data: bytes) -> None:
    of("runtime.files", "read_lines")(put(data, "lines.jsonl"))


def words(data: bytes) -> None:
    """Options and addresses: what is typed, and what programs send as text."""
    text = data.decode("utf-8", "replace")
    readers = [
        ("runtime.settings", "parse_budget"), ("apps.run.clock", "moment"),
        ("apps.run.clock", "split_window"), ("apps.sources.network", "split_address"), ("apps.serve.chat", "stream_of"),
        ("apps.sources.gstreamer", "is_pipeline"), ("apps.sources.recordings", "natural"),
    ]  # fmt: skip
    for module, name in readers:
        allow(of(module, name), text)
    with suppress(ValueError):
        of("apps.watches.watch", "covers")(text, datetime.now())
    with suppress(ValueError):
        of("apps.hosts", "is_network")(text)


# seeds


def json_seed(value: Any) -> bytes:
    return json.dumps(value).encode()


def calibration_seeds() -> list[bytes]:
    made = of("runtime.calibration", "Calibration")(
        edgevlm="0.1.0", date="2026-01-01T00:00:00+00:00", clips=("a",), frames=(10,), questions=("?",), cv=(0.1, 0.2),
        thresholds=(0.1, 0.2, 0.3), ages=((1.0, 0.5), (0.5, 0.5)), recency=(0.5, 0.5), flat=0.1, periodicity=(0.1, -0.1),
        classes=("shallow", "deep"), middle_from=1, deep_from=1, agreement=((None, 0.5),), clie=0,
    )  # fmt: skip
    return [made.to_json()]


def config_seeds() -> list[bytes]:
    facts = json.loads((HERE.parents[2] / "apps" / "planning" / "models.json").read_text())
    return [json_seed(fact["config"]) for fact in facts[::6]]


def processor_seeds() -> list[bytes]:
    frames = {
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
        "rescale_factor": 0.1,
    }
    cropped = frames | {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True}
    return [json_seed({"video_processor": frames}), json_seed({"image_processor": cropped})]


def safetensors_seeds() -> list[bytes]:
    header = json_seed(
        {
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
        }
    )
    return [len(header).to_bytes(8, "little") + header + bytes(22)]


def gguf_seeds() -> list[bytes]:
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "a", "llama")
        for add, value in (("block_count", 1), ("embedding_length", 8), ("feed_forward_length", 8), ("head_count", 1)):
            getattr(writer, f"add_{add}")(value)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1e4)
        writer.add_context_length(64)
        for name in ("token_embd.weight", "blk.0.attn_q.weight"):
            writer.add_tensor(name, np.zeros((8, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [(Path(folder) / "a").read_bytes()]


def onnx_seeds() -> list[bytes]:
    return [raw for raw in (path.read_bytes() for path in demo().glob("*.onnx")) if len(raw) < LONGEST]


def snapshot_seeds() -> list[bytes]:
    about = {
        "edgevlm": "0.1.0", "written": 0.0, "source": "x",
        "identity": {"model": "a", "name": "b", "policy": "uniform", "budget": 8, "dtype": "fp32", "chunk": 8,
                     "reindexing": "lazy"},
        "stream": {"positions": [3, None, 0, 0.0, None], "seq": 3, "frames": 3, "stats": {}},
        "chunk": {"taken": 0, "encoded": 0},
        "session": {"frames": 3, "chunks": 0, "time_s": 1.5, "conversations": {"talk": [["who?", "nobody"]]}},
    }  # fmt: skip
    arrays = {"layer0.key": np.zeros((2, 3, 8), np.float16), "empty": np.zeros((0, 4))}
    return [b"".join(map(bytes, of("runtime.snapshots.format", "parts")(about, arrays)))]


def record_seeds() -> list[bytes]:
    module = import_module("edgevlm.runtime.store.block")
    shapes = {"key": (2, 3, 8), "value": (2, 3, 8), "position": (2, 3, 1)}
    kinds = {"key": "f2", "value": "f2", "seq": "i8", "row": "i2", "col": "i2"}
    names = module.Block.__slots__
    block = module.Block(*[np.zeros(shapes.get(name, (2, 3)), kinds.get(name, "i4")) for name in names])
    made = module.BlockRecord.of(block)
    made.seal(1, 2)
    return [made.buffer.tobytes()]


@cache
def jpeg() -> bytes:
    cv2 = of("apps.sources.opencv", "load_cv2")()
    return bytes(cv2.imencode(".jpg", np.arange(192, dtype=np.uint8).reshape(8, 8, 3))[1])


def picture_seeds() -> list[bytes]:
    cv2 = of("apps.sources.opencv", "load_cv2")()
    image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    return [bytes(cv2.imencode(kind, image)[1]) for kind in (".jpg", ".png", ".ppm", ".bmp", ".webp", ".tiff")]


def stdin_seeds() -> list[bytes]:
    y4m = b"YUV4MPEG2 W4 H4 F25:1 C420 XCOLORRANGE=FULL\n" + (b"FRAME\n" + bytes(24)) * 2
    return [y4m, jpeg() * 2]


def multipart_seeds() -> list[bytes]:
    part = b"--b\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(jpeg()), jpeg())
    return [part * 2, b"--b\r\n\r\n" + jpeg() + b"\r\n--b\r\n\r\n"]


def toml_seeds() -> list[bytes]:
    return [path.read_bytes() for path in HERE.parents[2].glob("docs/**/*.toml")] + [
        b'[server]\nport = 0\nmax_rate = 3.0\n[cameras.a]\nsource = "demo"\nbudget = "6k"\n[[watches]]\n'
        b'cameras = ["a"]\nquestion = "is it?"\n'
        b'schedule = ["mon-fri 08:00-18:00"]\n[[sinks]]\nkind = "stdout"\n[journal]\n[thumbnails]\n'
    ]


def request_seeds() -> list[bytes]:
    url = "data:image/png;base64,AAAA"
    parts = [
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": "edgevlm://a?since=10m"}},
    ]
    chat = {"model": "a", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}], "stream": True}
    chat |= {"response_format": {"type": "json_object"}, "max_tokens": 3, "temperature": 0.5, "stop": ["a"]}
    return [json_seed(chat), json_seed({"model": "a", "input": "?", "stream": False})]


def cluster_seeds() -> list[bytes]:
    watch = {"question": "is it?", "cameras": ["a"], "schedule": ["mon-fri 08:00-18:00"], "every": 1.0, "on": "open"}
    asked = [{"note": 3}, {"id": "a", "source": "demo", "budget": "6k", "fps": 2.0}, {"state": "paused", "policy": "uniform"},
             {"stream": "a", "since": "10m", "confirm": True}, {"state": "running", "camera": "a"}, watch]  # fmt: skip
    return [json_seed(each) for each in asked]


def head_seeds() -> list[bytes]:
    need, given = (
        {"weights_bytes": 1, "camera_bytes": 1, "fps": 2.0},
        {"model": "demo", "settings": {"source": "demo"}, "fps": 2.0},
    )
    node = {"name": "n", "memory_bytes": 1 << 30, "needs": {"demo": need}, "url": "http://n", "seen": 1.0, "leaving": False}
    now = {
        "nodes": {"n": node}, "cameras": {"a": {"name": "a", "node": "n", "epoch": 1, **given}}, "removed": {"b": [1, 2]},
        "instances": {"n": "1"}, "watches": {}, "notes": [], "number": 0, "nodes_forgot": {"n": 0}, "cameras_forgot": {},
        "removed_nodes": [],
    }  # fmt: skip
    before = {
        "director": {"removed": {"b": [1, 2]}, "cameras": [{"camera": {"name": "a"}, "epoch": 1, "begins": 1}]},
        "given": {"a": given}, "instances": {}, "watches": {}, "notes": [], "number": 0,
        "forgotten": {"nodes": {"n": 0}, "cameras": {}}, "removed_nodes": [],
    }  # fmt: skip
    return [json_seed(now), json_seed(before)]


def mqtt_seeds() -> list[bytes]:
    parts = {"open": {"platform": "image", "state_topic": "edgevlm/old/x/state"}, "set": {"platform": "switch"}}
    about = {"availability_topic": "edgevlm/available", "origin": {"name": "edgevlm"}, "components": parts}
    return [json_seed(about)]


def engine_seeds() -> list[bytes]:
    about = {"tensorrt": "10.3.0", "capacity": 64, "probes": True}
    return [json_seed({"bytes": 4, "sha256": "0" * 64, "about": about})]


def reply_seeds() -> list[bytes]:
    moment = {"time": "2026-01-01T00:00:00Z", "time_s": 1.0, "until_s": 2.0, "jpeg_url": "/v1/x"}
    line = {"event": "line", "time": moment["time"], "camera": "a", "text": "?", "evidence": []}
    watch = {"event": "watch", "opened": moment["time"], "camera": "a", "seconds": 3.0, "question": "?", "watch": "w",
             "probability": 0.5, "evidence": [moment]}  # fmt: skip
    chunk = {"choices": [{"delta": {"content": "yes"}}], "edgevlm": {"evidence_held": True, "evidence": [moment]}}
    answer = b"data: " + json_seed(chunk) + b"\n\ndata: [DONE]\n\n"
    return [answer, json_seed({"data": [line, watch]}), json_seed({"data": [], "since": moment["time"]}),
            json_seed({"streams": {"a": {"events": 1}}, "waiting": ["b"]})]  # fmt: skip


WORDS = ["6k", "10m", "14:03:22", "2026-01-01T00:00Z", "/since 10m until 5m what?", "rtsp://u:p@[::1]:5/x?y#z",
         "edgevlm://a?since=10m", "mon-fri 08:00-18:00", "last-seen", "1.2.3.4/8", "videotestsrc ! appsink"]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """read: returns, or raises one of ``refusals``, named as in :func:`of`; seeds: inputs that it reads."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[str, ...] = ("UserError",)


READERS = {
    "manifest": Reader(manifest, lambda: [(demo() / "bundle.json").read_bytes()]),
    "choices": Reader(calibrated("Choices"), lambda: [(demo() / "choices.json").read_bytes()], ("ValueError",)),
    "calibration": Reader(calibrated("Calibration"), calibration_seeds, ("ValueError",)),
    "evidence": Reader(calibrated("EvidenceHeads", 4, 4), lambda: [(demo() / "evidence.json").read_bytes()], ("ValueError",)),
    "checkpoint": Reader(checkpoint, config_seeds),
    "processor": Reader(processor, processor_seeds),
    "safetensors": Reader(safetensors, safetensors_seeds),
    "gguf": Reader(gguf, gguf_seeds),
    "onnx": Reader(onnx, onnx_seeds, ("ValueError",)),
    "snapshot": Reader(snapshot, snapshot_seeds),
    "record": Reader(record, record_seeds),
    "stdin": Reader(stdin, stdin_seeds),
    "multipart": Reader(multipart, multipart_seeds),
    "picture": Reader(picture, picture_seeds),
    "toml": Reader(toml, toml_seeds),
    "requests": Reader(requests, request_seeds),
    "cluster": Reader(cluster, cluster_seeds),
    "head": Reader(head, head_seeds),
    "mqtt": Reader(mqtt, mqtt_seeds),
    "engine": Reader(engine, engine_seeds),
    "replies": Reader(replies, reply_seeds),
    "lines": Reader(lines, lambda: [b'{"a": [1, 2.5, null]}\n"x"\n'], ("ValueError",)),
    "words": Reader(words, lambda: [word.encode() for word in WORDS]),
}


def feed(name: str, data: bytes) -> bool:
    """Give ``data`` to a reader: whether it was read. Raises what the reader may not."""
    reader = READERS[name]
    refusals = tuple(ValueError if each == "ValueError" else of("errors", each) for each in reader.refusals)
    try:
        reader.read(data)
    except Refused:
        return False
    except refusals as error:
        if "\n" in str(error):
            raise
        return False
    return True


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Of JSON mostly a value, of anything else bytes."""
    if data[:1] in b"{[" and rng.integers(4):
        with suppress(ValueError, RecursionError):
            return json_seed(spoiled_json(json.loads(data), rng))
    return spoiled_bytes(data, rng)


def fuzz(name: str, arguments: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["edgevlm"]):
        for module in ("runtime.bundle", "runtime.calibration", "runtime.snapshots.format", "runtime.store.block"):
            import_module(f"edgevlm.{module}")
        with suppress(Exception):  # Atheris reports what is left
            for seed in READERS[name].seeds():
                feed(name, seed)

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        return (mutated(bytes(data), rng) if rng.integers(2) else atheris.Mutate(data, largest))[:largest]

    atheris.Setup([sys.argv[0], *arguments], lambda data: feed(name, data), custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """Fuzz each reader in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(READERS))
    parser.add_argument("--seconds", type=float, default=3600 / len(READERS), help="for each reader")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "edgevlm-corpus", help="kept there")
    asked = parser.parse_args()
    if len(asked.readers) == 2 and os.path.isfile(asked.readers[1]):
        print("read" if feed(asked.readers[0], Path(asked.readers[1]).read_bytes()) else "refused")
        return 0
    failed = 0
    for name in asked.readers or READERS:
        folder = asked.corpus / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(READERS[name].seeds()):
            (folder / f"seed-{number}").write_bytes(seed)
        options = [f"-max_total_time={max(1, round(asked.seconds))}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}"]
        options += [f"-artifact_prefix={folder}/", f"-max_len={LONGEST}", "-print_final_stats=1"]
        command = [sys.executable, __file__, "--fuzz", name, *options, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        units = re.findall(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
        covered = re.findall(r"cov: (\d+)", done.stderr)
        count = f"{int(units[-1]) if units else 0:,} executions, {covered[-1] if covered else 0} edges"
        print(f"{name}: {count}, {'no finding' if not done.returncode else 'FOUND:'}", flush=True)
        if done.returncode:
            failed += 1
            print(done.stderr[-3000:], flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fuzz"]:
        fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(bool(main()))
