"""Walk through ``edgevlm serve`` as a newcomer does, and keep pictures of it: ``python docs/walk.py [FOLDER] [--install]``.

Install it (with --install, in an environment of its own), serve, open the page on a phone, ask, see what is remembered, add
a second camera, lose it and see it come back, ask from curl and from OpenAI's client, read the metrics, kill -9 the server and
continue with the same memory. Each step is checked and printed; the pictures go to FOLDER, by default docs/assets. It needs
``.[serve]``, openai, playwright, curl and Chromium.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import cv2
import numpy as np
from openai import OpenAI
from playwright.sync_api import Page, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from edgevlm.calib.demo.world import World

HERE = Path(__file__).parent
QUESTION = "how many objects are there now?"
REMEMBERED = 120  # frames that are watched before pictures are taken: twice what the memory holds whole
CONFIG = """
budget = 512
policy = "last-seen"
state_every = 2
[server]
port = {port}
source_hosts = ["127.0.0.1"]
[cameras.demo]
"""


def install(folder: Path) -> str:
    """The Python of a new environment that has what the guide says and no more."""
    python, began = str(folder / "venv" / "bin" / "python"), time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{HERE.parent}[cpu,serve]"], check=True)
    size = sum(path.stat().st_size for path in (folder / "venv").rglob("*") if path.is_file() and not path.is_symlink())
    step(f"pip install '.[cpu,serve]': {time.monotonic() - began:.0f} s, {size / 1e6:,.0f} MB")
    return python


def start(python: str, folder: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    """A server, and its address."""
    (folder / "edgevlm.toml").write_text(CONFIG.format(port=port))
    command = [python, "-m", "edgevlm", "serve", "edgevlm.toml", "--json", "--quiet"]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def camera(folder: Path, port: int) -> tuple[subprocess.Popen[str], int]:
    """A Motion JPEG camera of its own process, and its port."""
    world = World(seed=9)
    for number in range(200):
        picture = cv2.resize(world.step(), (224, 224), interpolation=cv2.INTER_NEAREST)
        cv2.imwrite(str(folder / f"0-{number:03}.jpg"), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    command = [sys.executable, HERE.parent / "tests" / "mjpeg_server.py", str(port), folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    found = int(process.stdout.readline())
    process.stdin.write("pause 0.5\n")
    process.stdin.flush()
    return process, found


def get(url: str) -> Any:
    with urlopen(url) as response:
        return json.load(response)


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 300
    while not (value := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)
    return value


def frames(url: str) -> int:
    stats = get(f"{url}/v1/streams/demo")["stats"]
    return stats["frames"] if stats else 0


def keep(page: Page, path: Path) -> None:
    """A picture of a page, as small as it may be."""
    pixels = cv2.imdecode(np.frombuffer(page.screenshot(), np.uint8), cv2.IMREAD_COLOR)
    cv2.imwrite(str(path), pixels, [cv2.IMWRITE_WEBP_QUALITY, 80])
    print(f"   picture: {path.name}, {path.stat().st_size // 1000} kB", flush=True)


def step(text: str) -> None:
    print(f"-- {text}", flush=True)


def walk(page: Page, wide: Page, python: str, folder: Path, pictures: Path) -> None:
    server, url = start(python, folder, 0)
    yard = None
    try:
        step(f"edgevlm serve: {url}")
        page.goto(url)
        page.locator("#frames [role=option]").first.wait_for()
        step("the page is open on a phone")
        until(lambda: frames(url) > REMEMBERED)
        page.fill("#question", QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator("#talk li .a")).to_have_text(re.compile(r"^\d+$"))
        step(f"{QUESTION}  {page.locator('#talk li .a').inner_text()}")
        page.locator("#question").evaluate("input => input.blur()")
        keep(page, pictures / "serve-phone.webp")

        wide.goto(url)
        wide.locator("#frames [role=option]").first.wait_for()
        wide.get_by_role("button", name=QUESTION).click()
        expect(wide.locator("#talk li .a")).to_have_text(re.compile(r"^\d+$"))
        memory = get(f"{url}/v1/streams/demo/memory")
        partly = [each["frame"] for each in memory["frames"] if 0.2 < each["fraction"] < 0.6]
        wide.locator(f"#frames [data-frame='{partly[len(partly) // 3]}']").click()
        expect(wide.locator("#layers")).to_contain_text("remembered")
        step(wide.locator("#held").inner_text())
        wide.wait_for_timeout(500)
        keep(wide, pictures / "serve-memory.webp")

        yard, port = camera(folder, 0)
        page.get_by_role("button", name="Add camera").click()
        page.fill("#name", "yard")
        page.fill("#source", f"http://127.0.0.1:{port}/")
        page.click("#test")
        expect(page.locator("#tested")).to_contain_text("It works")
        step(f"a second camera is tested: {page.locator('#tested').inner_text().strip()}")
        page.locator("#add .first").click()
        expect(page.locator("nav [aria-current]")).to_have_text("yard")
        expect(page.locator("#state")).to_have_text("running")
        page.locator("#frames [role=option]").nth(5).wait_for()
        yard.kill()
        yard.wait()
        expect(page.locator("#state")).to_have_text(re.compile("^reconnecting: "))
        step(f"it is killed: {page.locator('#state').inner_text()}")
        page.evaluate("scrollTo(0, 0)")
        keep(page, pictures / "serve-camera-down.webp")
        yard, _ = camera(folder, port)
        expect(page.locator("#state")).to_have_text("running")
        step("it comes back: running")

        body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": QUESTION}]})
        command = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
        said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        step(f"curl: {said['choices'][0]['message']['content'].strip()}")
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": QUESTION}])
        step(f"OpenAI's client: {(answer.choices[0].message.content or '').strip()}")
        with urlopen(f"{url}/metrics") as response:
            found = list(text_string_to_metric_families(response.read().decode()))
        usage = [sample for family in found for sample in family.samples if sample.name == "edgevlm_kv_cache_usage_ratio"]
        used = ", ".join(f"{each.labels['stream']} {each.value:.2f}" for each in usage)
        step(f"/metrics: {len(found)} families; KV cache in use: {used}")

        oldest, before = get(f"{url}/v1/streams/demo/memory")["frames"][0]["frame"], frames(url)
        server.kill()
        server.wait()
        expect(wide.locator("#offline")).to_be_visible()
        step("kill -9: the page says that the server is gone")
        server, _ = start(python, folder, int(url.rpartition(":")[2]))
        expect(wide.locator("#offline")).to_be_hidden()
        after = until(lambda: frames(url))
        assert after > before - 60, (before, after)
        told = get(f"{url}/v1/streams/demo/memory")["frames"]
        held = [each for each in told if each["frame"] <= before and each["thumbnail_url"]]
        assert held, "its memory and its pictures are there again"
        step(f"started again: {before} frames before, {after} now; {len(held)} frames of before are remembered, from {oldest}")
    finally:
        server.kill()
        server.wait()
        if yard is not None:
            yard.kill()
            yard.wait()


def main() -> None:
    given = [each for each in sys.argv[1:] if each != "--install"]
    pictures = Path(given[0] if given else HERE / "assets")
    pictures.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=120_000)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        phone = browser.new_context(viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True)
        desk = browser.new_context(viewport={"width": 1280, "height": 940}, color_scheme="dark")
        for context in (phone, desk):
            context.set_default_timeout(120_000)
        python = install(Path(folder)) if "--install" in sys.argv else sys.executable
        walk(phone.new_page(), desk.new_page(), python, Path(folder), pictures)
        browser.close()


if __name__ == "__main__":
    main()
