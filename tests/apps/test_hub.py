"""Models by their name on the hub, which is a server on loopback here."""

import json
import os
import random
import signal
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
from fake_hub import FakeHub, endpoint_of, serving
from typed import edgevlm, events, refused, start

from edgevlm.apps.bundles import cache, fetch, hub
from edgevlm.apps.bundles.hub import HubError, HubId, hub_id
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import MANIFEST, Bundle

NAME = "shop/tiny-llava"
SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}


def quiet(*told):
    pass


@pytest.fixture
def world(exported, tmp_path, monkeypatch):
    """A hub with a checkpoint and its bundle, empty caches, no pauses."""
    fake, made = FakeHub(), exported("llava", **SHAPE)
    with serving(fake) as url:
        fake.url = fake.cdn = url
        variables = endpoint_of(url, tmp_path / "hf", monkeypatch)
        monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "bundles"))
        monkeypatch.setattr(hub, "PAUSES_S", (0, 0))
        files = {path.name: path.read_bytes() for path in made.checkpoint.iterdir()}
        commit = fake.add(NAME, files | {"README.md": b"read me", "pytorch_model.bin": b"pickle" * 999}, "v1")
        yield SimpleNamespace(
            hub=fake, commit=commit, made=made, files=files, variables=variables, cache=tmp_path / "hf" / "hub"
        )


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop" / "here").mkdir(parents=True)
    assert hub_id("shop/there") == hub_id("hf:shop/there") == HubId("shop/there")
    assert hub_id("shop/there@refs/pr/1") == HubId("shop/there", "refs/pr/1")
    assert hub_id("hf:shop/here") == HubId("shop/here")
    for model in ("demo", "shop/here", "./shop/there", "/shop/there", "shop", "a/b/c", "../shop/x", "a/b@../x", "a/b@"):
        assert hub_id(model) is None
    with pytest.raises(UserError, match="hf:shop: is not a hub name"):
        hub_id("hf:shop")


def test_a_run_downloads_what_an_export_reads_once_and_then_needs_no_network(world, monkeypatch):
    arguments = ["run", "--frames", "2", "--ask", "how many?", "--json", "--model"]
    assert events(*arguments, NAME)[-1]["frames"] == 2
    assert sorted(world.hub.fetched()) == sorted(set(world.files) & {*fetch.FILES, "model.safetensors"})
    (bundle,) = cache.cached()
    assert bundle.name.startswith("shop-tiny-llava-")
    assert Bundle.load(bundle).source == f"{NAME}@{world.commit}"
    world.hub.requests.clear()
    assert events(*arguments, NAME)
    assert [path for _, path, _ in world.hub.requests] == [f"/api/models/{NAME}/revision/main"]
    world.hub.requests.clear()
    for blob in (world.cache / "models--shop--tiny-llava" / "blobs").iterdir():
        if blob.stat().st_size > 100_000:
            blob.unlink()  # the weights: the bundle is all that is needed now
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert events(*arguments, f"{NAME}@main")
    assert events(*arguments, f"{NAME}@{world.commit}")
    assert world.hub.requests == []
    assert len(cache.cached()) == 1
    offline = "shop/other is not downloaded, and HF_HUB_OFFLINE is set; unset it once, or give a folder"
    assert refused("run", "--model", "shop/other") == f"edgevlm: {offline}\n"


def test_a_plan_fetches_the_configuration_alone(world):
    assert edgevlm("plan", f"{NAME}@v1").stdout.startswith(f"{NAME} (llava) on ")
    assert world.hub.fetched() == ["config.json"]


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_connection_that_is_cut_is_taken_up_where_it_broke(world, times):
    """Every byte arrives, and little of it twice."""
    draw, largest = random.Random(0), max(map(len, world.files.values()))
    world.hub.cuts = [draw.randrange(1, largest // times) for _ in range(times)]
    folder = fetch.resolve_checkpoint(NAME, quiet, quiet)
    assert world.hub.cuts == []
    resumed = [headers for _, path, headers in world.hub.requests if "/cdn/" in path and "range" in headers]
    assert len(resumed) == times
    for path in folder.iterdir():
        assert path.read_bytes() == world.files[path.name]


def test_what_arrived_before_a_dead_line_is_kept_for_the_next_run(world):
    world.hub.cuts = [0, 0, 70_000]
    with pytest.raises(HubError, match=r"127.0.0.1:\d+ cannot be reached .*; check the network and run the same command again"):
        fetch.resolve_checkpoint(NAME, quiet, quiet)
    (part,) = world.cache.glob("**/*.part")
    held = part.stat().st_size
    assert held > 0
    world.hub.requests.clear()
    told = []
    fetch.resolve_checkpoint(NAME, lambda *what: told.append(what), quiet)
    assert [headers["range"] for _, path, headers in world.hub.requests if "range" in headers and "/cdn/" in path] == [
        f"bytes={held}-"
    ]
    assert {what[0] for what in told} >= {f"downloading {NAME} (MB)", "checking model.safetensors"}


@pytest.mark.parametrize("command", [["export"], ["run", "--quiet", "--model"]])
def test_ctrl_c_leaves_what_arrived(world, command):
    """The server sends half of the weights and then nothing. A run downloads by a helper process."""
    weights, asked = world.files["model.safetensors"], threading.Event()

    def stall(kind, path, headers):
        if kind == "GET" and path.endswith("model.safetensors"):
            asked.set()
            return 200, {"Content-Length": str(len(weights))}, "x" * 10_000
        return None

    world.hub.answer = stall
    process = start(*command, NAME, env=os.environ | world.variables)
    assert asked.wait(120)
    until = time.monotonic() + 120
    while not any(part.stat().st_size for part in world.cache.glob("**/*.part")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert process.stderr.read() == "stopped; run the same command to continue\n"
    (part,) = world.cache.glob("**/*.part")
    assert part.stat().st_size > 0


NONE = f"{NAME} is neither a local folder nor a model or revision on HOST; check its name at "
ANSWERS = {
    "no such model": (404, {"X-Error-Code": "RepoNotFound"}, NONE),
    "gated": (403, {"X-Error-Code": "GatedRepo"}, f"{NAME} is gated; accept its terms at http://HOST/{NAME}, set HF_TOKEN"),
    "rate": (429, {"Retry-After": "77"}, f"HOST returned status 429 for {NAME}; run the same command again later"),
    "no hub": (200, {}, "HOST does not answer like the Hugging Face hub ("),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "when"), [*((kind, "asked") for kind in ANSWERS), ("gated", "downloading")])
def test_what_the_hub_refuses_is_one_line(world, kind, when):
    status, headers, says = ANSWERS[kind]

    def refuse(method, path, _):
        return (status, headers, {"error": "no"}) if ("/resolve/" in path) == (when == "downloading") else None

    world.hub.answer = refuse
    assert refused("run", "--model", NAME).startswith(f"edgevlm: {says.replace('HOST', world.hub.url[7:])}")


def test_a_token_is_not_shown_and_follows_no_redirect_to_another_host(world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    world.hub.answer = lambda *_: (401, {}, {"error": "no"})
    said = refused("plan", NAME)
    assert "nor a model or revision" in said
    assert "secret" not in said
    other, world.hub.answer = FakeHub(), lambda *_: None
    other.blobs = world.hub.blobs
    with serving(other) as url:
        world.hub.cdn = url.replace("127.0.0.1", "localhost")
        fetch.resolve_checkpoint(NAME, quiet, quiet)
    assert other.requests
    assert all("authorization" not in headers for _, _, headers in other.requests)
    assert all(headers["authorization"] == "Bearer hf_secret" for _, _, headers in world.hub.requests)


def test_a_file_that_changes_while_it_is_downloaded_or_never_ends_is_refused(world):
    weights = world.files["model.safetensors"]
    good = world.hub.digest(weights)
    for wrong in (bytes(reversed(weights)), weights + b"x" * 1_000_000):
        world.hub.blobs[good] = wrong
        with pytest.raises(HubError, match=r"the downloaded model.safetensors does not match the hub's hash; run the same"):
            fetch.resolve_checkpoint(NAME, quiet, quiet)
        assert not list(world.cache.glob("**/*.part"))
    world.hub.blobs[good] = weights
    fetch.resolve_checkpoint(NAME, quiet, quiet)


def test_a_hub_that_sends_other_short_files_is_asked_a_few_times_with_pauses(world, monkeypatch):
    pauses = []
    monkeypatch.setattr(hub, "PAUSES_S", (1, 2, 4))
    monkeypatch.setattr(hub.time, "sleep", pauses.append)
    for sent in ("", "x"):

        def short(kind, path, headers, sent=sent):
            return (200, {}, sent) if path.endswith("model.safetensors") else None

        world.hub.answer = short
        pauses.clear()
        world.hub.requests.clear()
        with pytest.raises(HubError, match="does not match the hub's hash"):
            fetch.resolve_checkpoint(NAME, quiet, quiet)
        asked = world.hub.fetched().count("model.safetensors")
        assert asked <= hub.ATTEMPTS
        assert len(pauses) == asked - 1
        assert min(pauses) >= 1


def test_a_hub_that_sends_a_byte_now_and_then_is_given_up(world, monkeypatch):
    """Whether in one answer or in many. The clock is the test's own: two minutes pass at each look."""
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=count(step=120.0).__next__, sleep=lambda _: None))
    for cuts in ([1] * 1000, []):
        world.hub.cuts[:] = cuts
        world.hub.requests.clear()
        with pytest.raises(HubError, match=r"less than \d+ kB arrived in 300 s"):
            fetch.resolve_checkpoint(NAME, quiet, quiet)
        assert world.hub.fetched().count("model.safetensors") < 4
        monkeypatch.setattr(hub, "SLOW_BYTES", 1 << 30)
        for part in world.cache.glob("**/*.part"):
            part.unlink()


def test_the_disk_is_looked_at_before(world, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(HubError, match=r"needs 0 MB, but only 0 MB are free on the disk of .*; free up space"):
        fetch.resolve_checkpoint(NAME, quiet, quiet)
    assert not any("model.safetensors" in path for _, path, _ in world.hub.requests)


def test_a_moved_branch_is_followed_and_the_old_copy_serves_while_the_hub_is_away(world):
    old = fetch.resolve_checkpoint(NAME, quiet, quiet)
    world.hub.add(NAME, {**world.files, "generation_config.json": b'{"eos_token_id": 1}'})
    assert fetch.resolve_checkpoint(NAME, quiet, quiet) != old
    assert fetch.resolve_checkpoint(f"{NAME}@v1", quiet, quiet) == old
    told = []
    world.hub.answer = lambda *_: (500, {}, {})
    assert fetch.resolve_checkpoint(f"{NAME}@v1", quiet, told.append) == old
    assert told == [
        f"{world.hub.url[7:]} returned status 500 for {NAME}; using the earlier download, commit {world.commit[:12]}"
    ]


def test_a_repository_that_was_renamed_is_found_by_its_old_name(world):
    told, world.hub.renamed = [], {"shop/old": NAME}
    fetch.resolve_checkpoint("shop/old", quiet, told.append)
    assert told == [f"shop/old was renamed to {NAME}"]


def test_pickled_weights_alone_are_refused(world):
    files = {name: data for name, data in world.files.items() if name != "model.safetensors"}
    world.hub.add("shop/pickled", files | {"pytorch_model.bin": b"x" * 9999})
    with pytest.raises(UserError, match=r"shop/pickled/pytorch_model.bin: pickled weights can run code"):
        fetch.resolve_checkpoint("shop/pickled", quiet, quiet)
    assert "pytorch_model.bin" not in world.hub.fetched()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model-Q4_K_M.gguf": b"GGUF", "mmproj-f16.gguf": b"GGUF"}, r"shop/other/mmproj-f16\.gguf: GGUF is not supported"),
        (
            {"adapter_config.json": b'{"base_model_name_or_path": "ORG/BASE"}'},
            r"adapter_config\.json: is an adapter for ORG/BASE",
        ),
    ],
)
def test_a_repository_without_a_checkpoint_is_named_for_what_it_is(world, files, message):
    world.hub.add("shop/other", files)
    with pytest.raises(UserError, match=message):
        fetch.fetch_start("shop/other", quiet, quiet)


def test_a_whole_file_wins_over_an_index(world):
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    shard = {"model.safetensors.index.json": index, "model-00001-of-00001.safetensors": b"x"}
    world.hub.add("shop/both", dict(world.files) | shard)
    fetch.resolve_checkpoint("shop/both", quiet, quiet)
    assert "model.safetensors" in world.hub.fetched()
    assert "model-00001-of-00001.safetensors" not in world.hub.fetched()


KEPT = """
import sys
from edgevlm.cli import main
try:
    main()
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"huggingface_hub", "httpx", "httpx2", "onnx"}))
"""


def test_a_run_keeps_nothing_of_what_downloads_and_exports_in_memory(world):
    out, err = start("run", "--frames", "2", "--json", "--model", NAME, code=KEPT).communicate()
    assert out.splitlines()[-1] == "[]", err
    assert '"frames": 2' in out


def test_a_bundle_goes_from_one_machine_to_another(world, monkeypatch, tmp_path):
    shared, here = "shop/tiny-bundle", tmp_path / "here"
    assert "pushing requires a token; create one with write access at " in refused("bundles", "push", world.made.bundle, shared)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = edgevlm("bundles", "push", world.made.bundle, shared)
    assert (done.returncode, done.stdout) == (0, f"{world.hub.url}/{shared}\n"), done.stderr
    assert "secret" not in done.stderr
    assert world.hub.private == {shared: True}
    files = bundle_files(world.made.bundle)
    assert set(world.hub.commits[world.hub.repos[shared]["main"]]) == {*files, "README.md"}
    for name in (shared, f"hf:{shared}"):
        assert events("run", "--model", name, "--frames", "2", "--json")
    (kept,) = cache.cached()
    assert bundle_files(kept) == files
    assert edgevlm("bundles", "pull", shared, "--out", here).stdout == f"{here}\n"
    assert edgevlm("bundles", "verify", here, kept.name).stdout.count("files match bundle.json\n") == 2
    weights = here / "decoder.weights"
    weights.write_bytes(bytes(weights.stat().st_size))
    done = edgevlm("bundles", "verify", here)
    assert done.returncode == 1
    assert "decoder.weights: is damaged (its SHA-256 does not match)" in done.stdout


def bundle_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pull_that_is_cut_is_taken_up_and_whatever_is_not_the_manifests_is_refused(world, monkeypatch, tmp_path):
    files = bundle_files(world.made.bundle)
    world.hub.add("shop/bundle", files)
    world.hub.cuts = [0, 0, 0, 5000]
    with pytest.raises(HubError, match="cannot be reached"):
        fetch.fetch_start("shop/bundle", quiet, quiet)
    assert cache.cached() == []
    Bundle.load(fetch.fetch_start("shop/bundle", quiet, quiet))
    assert any("range" in headers for _, _, headers in world.hub.requests)
    changed = files["decoder.weights"][::-1]
    world.hub.add("shop/changed", files | {"decoder.weights": changed})
    with pytest.raises(HubError, match=r"the downloaded decoder.weights does not match the hub's hash"):
        fetch.fetch_start("shop/changed", quiet, quiet)
    world.hub.add("shop/short", files | {"decoder.weights": changed[1:]})
    with pytest.raises(HubError, match=r"shop/short: decoder.weights is missing or does not match bundle.json; push"):
        fetch.fetch_start("shop/short", quiet, quiet)
    assert len(cache.cached()) == 1


@pytest.mark.parametrize("name", ["../../up", "/etc/passwd", "a/b", ""])
def test_a_pulled_manifest_names_plain_files(world, name):
    from edgevlm.runtime.bundle import seal_manifest

    files = bundle_files(world.made.bundle)
    manifest = json.loads(files[MANIFEST])
    manifest["files"][name] = manifest["files"]["decoder.weights"]
    world.hub.add("shop/evil", {**files, MANIFEST: seal_manifest(manifest)})
    with pytest.raises(UserError, match="which may be outside the bundle folder"):
        fetch.fetch_start("shop/evil", quiet, quiet)
    assert world.hub.fetched() == [MANIFEST]
