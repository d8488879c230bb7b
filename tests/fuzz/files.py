"""Files from outside, spoiled and then used as edgevlm uses them: each is refused in one line, or works.

``python tests/fuzz/files.py TARGET [cases] [seed] [one]`` makes that many cases, or the one of that number, and prints how they
ended. Each is a fork of this process, which has imported everything. Nothing may end in a traceback, take SECONDS of processor
time or four times as long, or take MEMORY more than the process had. Checksums are right: it is not damage that is looked for,
but what is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.errors import UserError

SECONDS = 30
MEMORY = 1 << 30  # bytes
ENDS = ("used", "refused", "traceback", "killed", "hang", "memory")
Rng = np.random.Generator
LONG = "x" * 100_000
VALUES: list[Any] = [
    *(0, 1, -1, 2, 7, 2**31, 2**31 - 1, 2**63, 10**40, -(2**31), 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "x", LONG, "../../../etc/passwd", "/dev/zero", "/dev/stdin", "\0", "\ud800", "{{", "nan", "1"),
    *(None, True, False, [], {}, [[]], {"": {}}, [None], [0] * 1000, ["x"] * 3, [float("nan")] * 3, {"a": 1}),
]  # fmt: skip


def spoiled_json(value: Any, rng: Rng) -> Any:
    """``value`` with one place of it changed, now and then two."""
    value = json.loads(json.dumps(value))
    for _ in range(1 + int(rng.integers(6) == 0)):
        value = _one_place(value, rng)
    return value


def _one_place(value: Any, rng: Rng) -> Any:
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(inner, dict | list) and len(inner) < 200:
                walk(inner)

    if not isinstance(value, dict | list) or rng.integers(100) == 0:
        return VALUES[rng.integers(len(VALUES))]
    walk(value)
    if not places:
        return VALUES[rng.integers(len(VALUES))]
    part, key = places[rng.integers(len(places))]
    old, how = part[key], rng.integers(10)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(old, int | float):
        part[key] = old * (-1, 2, 1000, 0.5)[rng.integers(4)]
    elif how == 1 and isinstance(old, list):
        part[key] = old * 3 if rng.integers(2) else old[:-1]
    elif how == 2:
        other, name = places[rng.integers(len(places))]
        part[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else None))
    elif how == 3 and isinstance(old, str):
        part[key] = old[: rng.integers(len(old) + 1)] + "\U0001f600\n"
    else:
        part[key] = VALUES[rng.integers(len(VALUES))]
    return value


def spoiled_bytes(raw: bytes, rng: Rng) -> bytes:
    """``raw`` with some of its bytes changed, cut or repeated; more often those at its start, where headers are."""
    out = bytearray(raw)
    for _ in range(1 + int(rng.integers(4))):
        end = len(out) if rng.integers(3) == 0 else min(len(out), 1 << int(rng.integers(4, 13)))
        at, how = int(rng.integers(max(end, 1))), rng.integers(7)
        if how == 0:
            out[at : at + 1] = bytes([rng.integers(256)])
        elif how == 1:
            out[at : at + 8] = int(VALUES[rng.integers(11)] % 2**64 // 1).to_bytes(8, "little")
        elif how == 2:
            del out[at:]
        elif how == 3:
            del out[at : at + int(rng.integers(1, 64))]
        elif how == 4:
            out[at:at] = out[at : at + int(rng.integers(1, 64))]
        elif how == 5:
            out[at : at + 4] = np.array([np.nan, np.inf, -1e38, 2**31][rng.integers(4)], np.float32).tobytes()
        else:
            out[at : at + 4] = b"\xff" * 4
    return bytes(out)


def put_special(path: Path, rng: Rng) -> None:
    """Something that is not a file at ``path``."""
    path.unlink()
    how = rng.integers(5)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.symlink_to(("/dev/zero", "/dev/full", "/etc/passwd", path.name)[rng.integers(4)])
    elif how == 2:
        path.mkdir()
    elif how == 3:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)) if os.geteuid() == 0 else os.mkfifo(path)  # /dev/zero
    else:
        path.touch()


@dataclass(frozen=True)
class Target:
    """prepare: makes what is spoiled, in an empty folder. spoil: a copy of it. use: as a command would, quietly."""

    prepare: Callable[[Path], Any]
    spoil: Callable[[Path, Rng], Any]
    use: Callable[[Path], Any]


# bundles


def demo(folder: Path) -> None:
    from edgevlm.runtime.model import demo_bundle

    shutil.copytree(demo_bundle(), folder, dirs_exist_ok=True)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its checksum; unlike the exporter's, any JSON that Python can write."""
    blank = "0" * 64
    raw = json.dumps({**manifest, "checksum": blank}, indent=1).encode()
    head, tail = raw.rsplit(blank.encode(), 1)
    (folder / "bundle.json").write_bytes(head + hashlib.sha256(raw).hexdigest().encode() + tail)


def spoil_manifest(folder: Path, rng: Rng) -> None:
    path = folder / "bundle.json"
    if rng.integers(50) == 0:
        return put_special(path, rng)
    manifest = json.loads(path.read_text())
    about = ["decoder", "vision", "chat"][rng.integers(3)] if rng.integers(5) else None
    changed = spoiled_json(manifest if about is None else manifest[about], rng)
    seal(folder, manifest | {about: changed} if about else changed if isinstance(changed, dict) else {"x": changed})


def spoil_contents(folder: Path, rng: Rng) -> None:
    manifest = json.loads((folder / "bundle.json").read_text())
    names = sorted(manifest["files"])
    path = folder / names[rng.integers(len(names))]
    if rng.integers(20) == 0:
        return put_special(path, rng)
    if path.suffix == ".json" and rng.integers(4):
        path.write_text(json.dumps(spoiled_json(json.loads(path.read_text()), rng)))
    elif path.suffix == ".npy" and rng.integers(2):
        shape = [(66,), (66, 64), (128, 66), (0, 128), (66, 128, 1), (2**40, 2**20), (66, 10**12), (-1, 128)][rng.integers(8)]
        kind = ["<f4", "<f8", "<u1", "|O", "<U9", "<M8[s]", "?"][rng.integers(7)]
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"shape": shape, "fortran_order": False, "descr": kind})
        path.write_bytes(stream.getvalue() + path.read_bytes()[128:])
    else:
        path.write_bytes(spoiled_bytes(path.read_bytes(), rng))
    raw = path.read_bytes()
    manifest["files"][path.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    seal(folder, manifest)


def watch(folder: Path, **options: Any) -> None:
    """Load a bundle, watch some frames with it and ask."""
    from edgevlm.runtime.session import Session

    with Session.open(folder, **options) as session:
        for index in range(10):
            session.watch(np.full((56, 56, 3), 20 * index, np.uint8))
        str(session.ask("how many objects are there now?", max_tokens=4))


# chat templates

ATOMS = [
    *("'x' * 1000000", "'%99999999d' % 1", "('x' * 999999) ~ ('x' * 999999)", "[1] * 1000000", "'x'.join(['y'] * 100000)"),
    *("range(999999)|list", "range(99999999)|join", "('a' * 99999).find('b')", "('a ' * 99999).split(' ')", "9 ** 9999999"),
    *("('ab' * 99999).count('a')", "'{:>99999999}'.format(1)", "messages", "messages * 1000", "bos_token", "1" * 5000),
    *("('a' * 99999).replace('a', 'b' * 1000)", "'x'.center(99999999)", "'x'.ljust(999999999)", "'x'.zfill(99999999)"),
    *("('a' * 999999)|upper", "['a' * 999999] * 1000", "messages|tojson", "lipsum(n=9999)", "'x'|center(99999999)"),
    *("('x' * 9999)|wordwrap(1)", "('x' * 9999)|indent(999999)", "namespace(a=1)", "dict(a=1)", "cycler('a')", "joiner(',')"),
    *("range(9999)|map('string')|list", "(12345678901234567890 ** 99)", "'a'|batch(9)|list", "range(99999)|sum", "messages[0]"),
    *("('x' * 9999)|list|tojson", "''.__class__", "messages.append", "'x'|format(1)", "1 / 0", "raise_exception('no')"),
]  # fmt: skip


def template_of(rng: Rng, depth: int = 0) -> str:
    """A template that may be anything."""
    atom = ATOMS[rng.integers(len(ATOMS))]
    parts = [
        lambda: f"{{{{ ({atom})|length }}}}",
        lambda: f"{{{{ {atom} }}}}",
        lambda: f"{{% set v = {atom} %}}",
        lambda: f"{{% for i in range({10 ** int(rng.integers(1, 6))}) %}}{template_of(rng, depth + 1)}{{% endfor %}}",
        lambda: f"{{% if {atom} %}}{template_of(rng, depth + 1)}{{% endif %}}",
        lambda: "{% for i in range(3) %}" * 300 + "x" + "{% endfor %}" * 300,
        lambda: "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        lambda: "{% set ns = namespace(t='aa') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        lambda: "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        lambda: f"{{{{ range(10000)|map('replace', '1', {atom}|string)|join|length }}}}",
    ]
    most = 3 if depth > 2 else len(parts) if rng.integers(8) == 0 else 5
    made = "".join(parts[rng.integers(most)]() for _ in range(1 + int(rng.integers(3))))
    return made if depth else made + "<video>"


def use_template(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    from edgevlm.runtime.bundle import ChatSpec
    from edgevlm.runtime.chat import Chat

    spec = ChatSpec("", (folder / "t").read_text(), "video", "<video>", 1, {"bos_token": "<s>"}, (2,))
    Chat(spec, Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))).suffix([("a", "b")], "c")


# snapshots

POLICIES = ["last-seen", "resv", "hybrid", "h2o", "mosaic", "purekv", "infinipot-v"]


def prepare_snapshots(folder: Path) -> None:
    from edgevlm.runtime.session import Session

    for policy in POLICIES:
        for _ in range(2):
            with Session.open("demo", policy=policy, budget=128, state=folder / policy) as session:
                for index in range(15):
                    session.watch(np.random.default_rng(index).integers(0, 255, (56, 56, 3), np.uint8))
                str(session.ask("how many objects are there now?", "talk", max_tokens=4))


def spoil_snapshot(folder: Path, rng: Rng) -> None:
    from edgevlm.runtime.snapshots.directory import Folder, read_at
    from edgevlm.runtime.snapshots.format import parts

    policy = POLICIES[rng.integers(len(POLICIES))]
    (folder / "policy").write_text(policy)
    files = sorted((folder / policy).glob("*.snapshot"))
    for path in files if rng.integers(2) else files[-1:]:
        if rng.integers(50) == 0:
            put_special(path, rng)
            continue
        found = read_at(Folder(folder), path)
        about = {key: value for key, value in found.about.items() if key not in ("bytes", "sections")}
        arrays = {name: np.array(array) for name, array in found.arrays.items()}
        if rng.integers(2):
            part = ["stream", "chunk", "session", "identity", None][rng.integers(5)]
            spoiled = spoiled_json(about[part] if part else about, rng)
            about = about | {part: spoiled} if part else spoiled if isinstance(spoiled, dict) else {}
        else:
            name = sorted(arrays)[rng.integers(len(arrays))]
            arrays[name] = spoiled_array(arrays[name], rng)
            if rng.integers(10) == 0:
                del arrays[name]
        path.unlink()
        with path.open("wb") as stream:
            stream.writelines(parts(about, arrays))


def spoiled_array(array: np.ndarray, rng: Rng) -> np.ndarray:
    how = rng.integers(7)
    if how == 0:
        kinds = ["?", "<f8", "<f4", "<i8", "<i4", "<u1", "<i2", "<f2"]
        with np.errstate(all="ignore"):
            return array.astype(kinds[rng.integers(len(kinds))])
    if how == 1:
        return array.reshape(-1) if rng.integers(2) else array[None]
    if how == 2 and array.ndim and len(array):
        return array[:-1] if rng.integers(2) else np.concatenate([array, array[-1:]])
    if how == 3:
        return np.zeros((0, *array.shape[1:]), array.dtype)
    if how == 4:
        return np.zeros_like(array)
    array, flat = array.copy(), None
    flat = array.reshape(-1)
    if flat.size:
        worst = [np.nan, np.inf, -1.0, 1e30] if array.dtype.kind == "f" else [-1, 127, 2**31 - 1, 2**62, -(2**62), 1, 0]
        with np.errstate(all="ignore"):
            flat[rng.integers(flat.size, size=1 + how)] = np.array(worst[rng.integers(len(worst))]).astype(array.dtype)
    return array


def use_snapshot(folder: Path) -> None:
    policy = (folder / "policy").read_text()
    watch("demo", policy=policy, budget=128, state=folder / policy)  # type: ignore[arg-type]


# checkpoints


def prepare_checkpoint(folder: Path) -> None:
    sys.path[:0] = [str(Path(__file__).parents[1] / "export"), str(Path(__file__).parents[1])]
    from checkpoints import make_checkpoint
    from more_checkpoints import make_more

    make_checkpoint(folder / "llava", "llava", layers=2, heads=6, kv_heads=2, hidden=192, head_dim=32, backbone="llama")
    make_more(folder / "qwen2_5_vl", "qwen2_5_vl")
    make_more(folder / "smolvlm", "smolvlm")


def spoil_side_file(folder: Path, rng: Rng) -> None:
    families = sorted(path for path in folder.iterdir() if path.is_dir())
    family = families[rng.integers(len(families))]
    (folder / "family").write_text(family.name)
    files = sorted(path for path in family.iterdir() if path.suffix in (".json", ".jinja"))
    path = files[rng.integers(len(files))]
    if rng.integers(10) == 0:
        put_special(path, rng)
    elif path.suffix == ".json" and rng.integers(6):
        content = json.loads(path.read_text())
        if path.name == "tokenizer.json" and rng.integers(2):
            content["model"]["vocab"] = spoiled_json(content["model"]["vocab"], rng)
        else:
            content = spoiled_json(content, rng)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(spoiled_bytes(path.read_bytes(), rng))


def spoil_safetensors(folder: Path, rng: Rng) -> None:
    (folder / "family").write_text("llava")
    path = folder / "llava" / "model.safetensors"
    if rng.integers(30) == 0:
        return put_special(path, rng)
    raw = path.read_bytes()
    if rng.integers(2):
        path.write_bytes(spoiled_bytes(raw, rng))
        return
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(spoiled_json(json.loads(raw[8 : 8 + length]), rng)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def use_checkpoint(folder: Path) -> None:
    from edgevlm.export import export_checkpoint

    export_checkpoint(folder / (folder / "family").read_text(), folder / "out")


TARGETS = {
    "manifests": Target(demo, spoil_manifest, watch),
    "contents": Target(demo, spoil_contents, watch),
    "templates": Target(lambda _: None, lambda folder, rng: (folder / "t").write_text(template_of(rng)), use_template),
    "snapshots": Target(prepare_snapshots, spoil_snapshot, use_snapshot),
    "checkpoints": Target(prepare_checkpoint, spoil_side_file, use_checkpoint),
    "safetensors": Target(prepare_checkpoint, spoil_safetensors, use_checkpoint),
}


def in_child(work: Callable[[], Any], seconds: int = SECONDS, memory: int = MEMORY) -> tuple[str, str]:
    """Do ``work`` in a child: how it ended, one of ENDS, and a line about it."""
    out, into = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(out)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        said = _quietly(work, memory)
        os.write(into, json.dumps(said).encode())
        os._exit(0)
    os.close(into)
    before, ended = time.monotonic(), False
    while not ended and time.monotonic() - before < 4 * seconds:
        time.sleep(0.003)
        ended = bool(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, _ = os.wait4(child, 0)
    with os.fdopen(out, "rb") as stream:
        raw = stream.read()
    if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "hang", f"{seconds} s"
    if os.WIFSIGNALED(status) or not raw:
        return "killed", f"status {status}"
    end, line = json.loads(raw)
    return end, line


def _quietly(work: Callable[[], Any], memory: int) -> tuple[str, str]:
    here = _resident("VmRSS")
    space = _resident("VmSize") + 8 * memory
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    logging.disable(logging.CRITICAL)
    end = "used", ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            work()
    except UserError as error:
        line = str(error)
        end = ("refused", line[:300]) if "\n" not in line and len(line) < 2000 else ("traceback", f"{len(line)} characters")
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" not in frame.filename]
        where = f"{frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno}" if frames else "?"
        ours = next(
            (f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames) if "-packages" not in f.filename), ""
        )
        end = "traceback", re.sub(r"\s+", " ", f"{ours} {where} {type(error).__name__}: {error}")[:200]
    if end[0] in ("used", "refused") and (took := _resident("VmHWM") - here) > memory:
        end = "memory", f"{took / 1e9:.1f} GB; {end[1]}"
    return end


def _resident(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def warm(top: str) -> None:
    """Import what children use, and make the schemas; start no thread, which a fork would lose."""
    for module in ("export.writer", "runtime.session", "runtime.sandbox", "engines.onnxruntime_cpu"):
        import_module(f"edgevlm.{module}")
    for module in ("onnxruntime", "tokenizers", "jinja2.sandbox"):
        import_module(module)
    from edgevlm.export.settings import check_settings
    from edgevlm.runtime.bundle import Bundle
    from edgevlm.runtime.model import demo_bundle
    from edgevlm.runtime.snapshots.format import check_header

    found = Bundle.load(demo_bundle())
    found.calibration(), found.choices(), found.evidence_heads()
    check_settings(top, {})
    with contextlib.suppress(UserError):
        check_header(b"{}")


def main(name: str, cases: int = 2000, seed: int = 0, only: int | None = None) -> Counter[str]:
    """Make the cases; prints each that ended badly, and counts."""
    target, ends = TARGETS[name], Counter[str]()
    with tempfile.TemporaryDirectory() as top:
        good, bad = Path(top) / "good", Path(top) / "bad"
        good.mkdir()
        made, why = in_child(lambda: target.prepare(good), 600, 1 << 40)
        assert made == "used", why
        warm(top)
        for index in range(cases) if only is None else [only]:
            shutil.copytree(good, bad)
            target.spoil(bad, np.random.default_rng([seed, index]))
            end, line = in_child(lambda: target.use(bad))
            ends[end] += 1
            if end not in ("used", "refused"):
                print(f"{index} {end}: {line}", flush=True)
            shutil.rmtree(bad)
    print(f"{name}: {ends.total()} cases: {', '.join(f'{ends[end]} {end}' for end in ENDS)}", flush=True)
    return ends


if __name__ == "__main__":
    chosen, *numbers = sys.argv[1:]
    ended = main(chosen, *map(int, numbers))
    sys.exit(any(ended[end] for end in ENDS[2:]))
