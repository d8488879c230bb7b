"""The page of ``edgevlm serve`` in Chromium: sizes, keyboard, both schemes, a camera that dies, long answers, reloads, keys.

Pictures of the page are kept in ``EDGEVLM_SCREENSHOTS``, else under pytest's ``--basetemp``.
"""

import json
import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from processes import mjpeg_camera
from served import KEY, NOW, WAIT_S, eventually, serving

pytest.importorskip("fastapi")
pytest.importorskip("openai")
cv2 = pytest.importorskip("cv2")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
TILES = "#frames [role=option]"
SOONER = "const later = setTimeout; window.setTimeout = (work, ms, ...rest) => later(work, ms / 5, ...rest)"  # it looks again


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        api.expect.set_options(timeout=WAIT_S * 1000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "edgevlm.toml").write_text('[server]\nsource_hosts = ["127.0.0.1"]\n')
    with serving(folder / "served", folder / "edgevlm.toml") as server:
        server.watched("demo", 4)
        yield server


def is_wrong(message):
    """Also what the content security policy refuses; a refused request is for the page to tell of."""
    return message.type in ("error", "warning") and not message.text.startswith(("Failed to load resource", "Canvas2D"))


@pytest.fixture
def opened(browser, server):
    """Open the page as a context would; what the console says is an error at the end."""
    said, contexts = [], []

    def opened(**options):
        contexts.append(browser.new_context(**options))
        contexts[-1].add_init_script(SOONER)
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.on("console", lambda message: said.append(message.text) if is_wrong(message) else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
        page.locator(TILES).first.wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def keep(tmp_path):
    """Keep a picture of a page."""
    folder = Path(os.environ.get("EDGEVLM_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True)


def tab_to(page, selector):
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_asked_by_keyboard_alone_and_fits(opened, keep, width):
    page = opened(viewport={"width": width, "height": 844}, color_scheme="light", reduced_motion="reduce")

    def keep_both(name):
        for scheme, background in (("light", "rgb(245, 243, 238)"), ("dark", "rgb(13, 14, 15)")):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
            keep(page, f"{name}-{width}-{scheme}")

    tab_to(page, "#question")
    page.keyboard.type(NOW)
    page.keyboard.press("Enter")
    api.expect(page.locator("#talk li .a")).to_have_text(re.compile(r"^\d+$"))
    api.expect(page.locator("#question")).to_be_focused()
    tab_to(page, TILES)
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    api.expect(page.locator(f"{TILES}[aria-selected=true]")).to_be_focused()
    api.expect(page.locator("#stage-title")).to_contain_text("ago")
    api.expect(page.locator("#layers")).to_contain_text("remembered")
    keep_both("memory")
    page.keyboard.press("Escape")
    api.expect(page.locator("#stage-title")).to_have_text("Live")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    keep_both("page")


def test_a_camera_is_tested_added_dies_while_watched_and_comes_back(opened, keep, tmp_path):
    page = opened(viewport={"width": 1280, "height": 844}, color_scheme="dark")
    with mjpeg_camera(tmp_path) as camera:
        tab_to(page, "#add-camera")
        page.keyboard.press("Enter")
        page.keyboard.type("yard")
        page.keyboard.press("Tab")
        page.keyboard.type(f"http://127.0.0.1:{camera.port}/")
        tab_to(page, "#test")
        page.keyboard.press("Enter")
        api.expect(page.locator("#tested")).to_contain_text("It works: 64 × 48")
        tab_to(page, "#add .first")
        page.keyboard.press("Enter")
        api.expect(page.locator("nav [aria-current]")).to_have_text("yard")
        api.expect(page.locator("#state")).to_have_text("running")
        page.locator(TILES).first.wait_for()
        camera.kill()
        api.expect(page.locator("#state")).to_have_text(re.compile("^reconnecting: "))
        api.expect(page.locator("#stage-note")).to_contain_text("Reconnecting")
        keep(page, "camera-down")
        camera.start()
        api.expect(page.locator("#state")).to_have_text("running")
        api.expect(page.locator("#stage-note")).to_be_empty()
        page.get_by_role("button", name="Remove yard").click()
        page.locator("#remove .danger").click()
        api.expect(page.locator("nav button")).to_have_count(1)


def test_the_frames_that_an_answer_was_read_from_are_marked(opened, server):
    page = opened()
    frame = server.get("/v1/streams/demo/memory")["frames"][0]
    seen = {"frame": frame["frame"], "time": frame["time"], "box": [0, 0, 0.5, 0.5], "jpeg_url": frame["thumbnail_url"]}
    told = {"choices": [{"delta": {"content": "yes"}}], "edgevlm": {"evidence": [seen], "evidence_held": True}}
    body = f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    page.locator("#talk .seen button").click()
    api.expect(page.locator(f"{TILES}.evidence[aria-selected=true]")).to_have_attribute(
        "aria-label", re.compile("was read from it")
    )
    coming = {**told, "edgevlm": {"evidence": [{**seen, "frame": 10**9}], "evidence_held": True}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(coming)}\n\n"))
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    button, news = page.locator("#talk li:nth-child(2) .seen button"), page.locator("#news")
    eventually(lambda: (button.click(), news.text_content())[1] == "That frame is still waiting for its chunk.")
    gone = {**told, "edgevlm": {"evidence": [seen], "evidence_held": False}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(gone)}\n\n"))
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    api.expect(page.locator("#talk .seen").last).to_have_text("The frames with the answer are no longer in memory.")
    api.expect(page.locator(f"{TILES}.evidence")).to_have_count(0)


def test_axe_finds_nothing_in_any_state(opened, keep, server):
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed: it brings axe-core")
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page = opened(viewport={"width": 1280, "height": 844}, color_scheme="light")
    memory = server.get("/v1/streams/demo/memory")
    page.route("**/memory", lambda route: route.fulfill(json={**memory, "frames": memory["frames"][:4]}))
    api.expect(page.locator(TILES)).to_have_count(4)
    page.evaluate(script)

    def check(state):
        keep(page, f"axe-{state}")
        found = page.evaluate("axe.run()")["violations"]
        page.emulate_media(color_scheme="dark")
        found += page.evaluate("axe.run({runOnly: ['color-contrast']})")["violations"]
        page.emulate_media(color_scheme="light")
        assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == [], state

    page.locator("#watched").fill("is there an orange ring?")
    page.locator("#watched").press("Enter")
    api.expect(page.locator("#watches li")).to_contain_text("closed")
    page.locator(TILES).last.click()
    check("frame")
    page.locator("#watches").get_by_role("button", name="Remove watch").click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Add camera").click()
    page.fill("#source", "/etc/passwd")
    page.click("#test")
    api.expect(page.locator("#add-problem")).to_contain_text("must be demo")
    check("add")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Memory demo").click()
    api.expect(page.locator("#switch")).to_be_visible()
    check("switch")
    page.keyboard.press("Escape")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, json={"error": {"message": "it broke"}}))
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    api.expect(page.locator("#talk li .note")).to_have_text("it broke")
    page.route("**/events", lambda route: route.abort())
    down = {**server.get("/v1/streams/demo"), "state": "failed", "problem": "no route", "stats": None}
    page.route("**/v1/streams", lambda route: route.fulfill(json={"data": [down], "watts": 7.5}))
    api.expect(page.locator("#state")).to_have_text("failed: no route")
    check("down")
    page.route("**/v1/streams", lambda route: route.fulfill(json={"data": [], "watts": None}))
    api.expect(page.locator("#stage-note")).to_contain_text("No camera yet")
    check("empty")


def test_a_server_that_is_gone_is_said_and_found_again(opened):
    page = opened()
    page.route("**/v1/**", lambda route: route.abort())
    api.expect(page.locator("#offline")).to_be_visible()
    page.unroute("**/v1/**")
    api.expect(page.locator("#offline")).to_be_hidden()


def test_a_wrong_key_and_the_right_one(browser, tmp_path):
    (tmp_path / "key").write_text(KEY)
    with serving(tmp_path / "served", "--key-file", tmp_path / "key", key=KEY) as server:
        server.watched("demo", 1)
        page = browser.new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.goto(server.url)
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        api.expect(page.locator("#key-problem")).to_have_text("The key is wrong.", timeout=WAIT_S * 1000)
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.locator(TILES).first.wait_for()
        api.expect(page.locator("#login")).to_be_hidden()
        eventually(lambda: page.evaluate("document.getElementById('live').naturalWidth") > 0)
        page.close()
        assert server.end() == 0


def test_watches_are_added_and_removed_by_keyboard_and_their_state_is_seen(opened, keep):
    page = opened(viewport={"width": 1280, "height": 844})
    tab_to(page, "#watched")
    page.keyboard.type("is it raining?")
    page.keyboard.press("Enter")
    api.expect(page.locator("#watch-problem")).to_contain_text("never taught")
    page.locator("#watched").fill("is there a red square?")
    page.locator("#watched").press("Enter")
    item = page.locator("#watches li", has_text="is there a red square?")
    api.expect(item).to_contain_text("demo: closed")
    keep(page, "watches")
    tab_to(page, '[data-key="pause is-there-a-red-square"]')
    page.keyboard.press("Enter")
    api.expect(item).to_contain_text("demo: paused")
    api.expect(page.locator('[data-key="pause is-there-a-red-square"]')).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    api.expect(item).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_what_happened_meanwhile_is_listed_with_pictures_and_searched(opened, keep):
    page = opened(viewport={"width": 1280, "height": 844})
    about = {"event": "opening", "camera": "demo", "watch": "w", "opened": "2026-11-22T14:03:22Z", "probability": 0.9}
    shown = [{"jpeg_url": None}, {"jpeg_url": "/v1/streams/demo/frame.jpg", "box": [0, 0, 0.5, 0.5]}]
    line = {"event": "line", "time": "2026-11-22T14:09:22Z", "camera": "demo", "text": "two people came in", "evidence": []}
    told = [
        {**about, "question": "is it on?", "closed": "2026-11-22T14:05:22Z", "seconds": 120, "evidence": shown},
        {**about, "question": "is it <i>off</i>?", "closed": None, "seconds": None, "evidence": []},
        line,
    ]  # fmt: skip
    page.route("**/v1/digest?*since=8h*", lambda route: route.fulfill(json={"object": "digest", "data": told}))
    page.route("**/v1/digest?search=*", lambda route: route.fulfill(json={"object": "digest", "data": told[-1:]}))
    rows = page.locator("#happened li")
    api.expect(rows).to_have_count(3)
    api.expect(rows.nth(0)).to_contain_text("demo: two people came in")
    api.expect(rows.nth(1)).to_contain_text("demo: is it <i>off</i>? still open")
    api.expect(rows.nth(2)).to_contain_text("demo: is it on? for 2 min")
    api.expect(rows.locator("canvas")).to_have_count(1)
    edge = "canvas => [...canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data.slice(0, 3)]"
    assert rows.locator("canvas").evaluate(edge) == [255, 179, 71], "what was looked at is framed"
    keep(page, "meanwhile")
    page.fill("#search", "people")
    page.keyboard.press("Enter")
    api.expect(rows).to_have_count(1)
    api.expect(page.locator("#happened-when")).to_have_text("matching “people”")
    page.fill("#search", "")
    api.expect(rows).to_have_count(3)
