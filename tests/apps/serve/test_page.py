"""The page of ``edgevlm serve`` in Chromium: sizes, keyboard, both schemes, a paused camera, stops, reloads and keys."""

import re
import shutil

import pytest
from served import KEY, NOW, WAIT_S, serving

pytest.importorskip("fastapi")
pytest.importorskip("openai")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("page") / "served") as server:
        server.watched("demo", 4)
        yield server


@pytest.fixture
def opened(browser, server):
    """Open the page as a context would; what the console says is an error at the end."""
    said, contexts = [], []

    def opened(**options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_S * 1000)
        api.expect.set_options(timeout=WAIT_S * 1000)
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
        page.locator("#frames li").first.wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_asked_by_keyboard_alone_and_fits(opened, width, scheme, tmp_path):
    page = opened(viewport={"width": width, "height": 844}, color_scheme=scheme)
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "question":
            break
    page.keyboard.type(NOW)
    page.keyboard.press("Enter")
    api.expect(page.locator("#talk li .a")).to_have_text(re.compile(r"^\d+$"))
    api.expect(page.locator("#question")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 21)"
    assert dark == (scheme == "dark")
    page.screenshot(path=tmp_path / "page.png", full_page=True)  # kept by --basetemp


def test_a_camera_is_paused_and_resumed_while_watched(opened):
    page = opened()
    page.get_by_role("button", name="Pause demo").focus()
    page.keyboard.press("Enter")
    api.expect(page.locator("#state")).to_have_text("paused")
    api.expect(page.get_by_role("button", name="Resume demo")).to_be_focused()
    page.keyboard.press("Enter")
    api.expect(page.locator("#state")).to_have_text("running")
    api.expect(page.get_by_role("button", name="Pause demo")).to_be_focused()


def slow(route):
    """An answer that does not come: the page waits for it."""


def test_an_answer_is_stopped(opened):
    page = opened()
    page.route("**/v1/chat/completions", slow)
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    api.expect(page.locator("#talk li .dim")).to_have_text("stopped")
    api.expect(page.locator("#stop")).to_be_hidden()


def test_a_reload_in_the_middle_of_an_answer_keeps_the_conversation(opened):
    page = opened()
    page.fill("#question", NOW)
    page.keyboard.press("Enter")
    api.expect(page.locator("#talk li .a")).to_have_text(re.compile(r"^\d+$"))
    api.expect(page.locator("#stop")).to_be_hidden()
    page.route("**/v1/chat/completions", slow)
    page.fill("#question", "and then?")
    page.keyboard.press("Enter")
    page.locator("#stop").wait_for()
    page.reload()
    api.expect(page.locator("#talk li .q")).to_have_text([NOW, "and then?"])
    api.expect(page.locator("#talk li .a").first).to_have_text(re.compile(r"^\d+$"))


def test_a_wrong_key_and_the_right_one(browser, tmp_path):
    (tmp_path / "key").write_text(KEY)
    with serving(tmp_path / "served", "--key-file", tmp_path / "key", key=KEY) as server:
        server.watched("demo", 1)
        page = browser.new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.goto(server.url)
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        api.expect(page.locator("#key-problem")).to_have_text("This is not the server's key.", timeout=WAIT_S * 1000)
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.locator("#frames li").first.wait_for()
        api.expect(page.locator("#login")).to_be_hidden()
        page.close()
        assert server.end() == 0
