"""The judge's endpoint, as a server on loopback plays it."""

import json

import pytest
from judge_server import SECRET, YES, endpoint, said

from edgevlm.bench.suites.judge import KEY, Judge, parse
from edgevlm.errors import UserError


@pytest.fixture
def waits():
    return []


def judged(url, waits, **more):
    return Judge(url, "grader", sleep=waits.append, **more).verdict("what color?", "It was red.", "Red.")


def test_a_verdict(monkeypatch, waits):
    monkeypatch.setenv(KEY, SECRET)
    with endpoint(YES) as (url, requests):
        verdict = judged(url, waits)
    assert (verdict.right, verdict.rating) == (True, 4.0)
    path, headers, body = requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert (body["model"], body["temperature"]) == ("grader", 0)
    asked = json.loads(body["messages"][1]["content"])
    assert asked == {"question": "what color?", "right answer": "It was red.", "model's answer": "Red."}
    assert waits == []


def test_what_passes_is_tried_again_longer_each_time(waits):
    broken = [(503, "busy", {}), (429, "", {"Retry-After": "7"}), (200, "<html>", {}), (200, said("hm"), {})]
    with endpoint(*broken, YES) as (url, requests):
        assert judged(url, waits).right is True
    assert len(requests) == 5
    assert waits == [1.0, 7.0, 4.0, 8.0]


@pytest.mark.parametrize(("status", "text"), [(401, f"set {KEY} to its key"), (404, "check the address"), (302, "check")])
def test_what_waiting_does_not_mend_is_one_line_at_once(monkeypatch, waits, status, text):
    monkeypatch.setenv(KEY, SECRET)
    with (
        endpoint(YES) as (other, elsewhere),
        endpoint((status, SECRET, {"Location": f"{other}/chat/completions"})) as (url, requests),
        pytest.raises(UserError, match=text) as refused,
    ):
        judged(url, waits)
    assert len(requests) == 1
    assert elsewhere == [], "a key follows no redirect"
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert waits == []


def test_an_endpoint_that_stays_away_is_one_line(monkeypatch, waits):
    monkeypatch.setenv(KEY, SECRET)
    with endpoint((500, SECRET, {})) as (url, _), pytest.raises(UserError, match=r"no answer in 5 tries \(500") as refused:
        judged(url, waits)
    assert SECRET not in str(refused.value)
    with pytest.raises(UserError, match="no answer in 2 tries"):
        judged(url, waits, tries=2)


@pytest.mark.parametrize("url", ["", "x", "file:///etc/passwd", "http://", "http://a b/v1"])
def test_no_address_is_one_line(url):
    with pytest.raises(UserError, match="give an address like"):
        Judge(url, "grader")


def test_credentials_in_an_address_are_refused_and_masked():
    with pytest.raises(UserError, match=f"a key goes into {KEY}") as refused:
        Judge(f"http://me:{SECRET}@host/v1", "grader")
    assert SECRET not in str(refused.value)
    with pytest.raises(UserError) as refused:
        Judge(f"http://host/v1?api_key={SECRET}", "grader")
    assert SECRET not in str(refused.value)


def test_a_key_of_several_lines_is_refused(monkeypatch):
    monkeypatch.setenv(KEY, f"{SECRET}\r\nX-Other: 1")
    with pytest.raises(UserError, match="set it to the key alone") as refused:
        Judge("http://host/v1", "grader")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "right", "rating"),
    [
        ('{"pred": "yes", "score": 5}', True, 5.0),
        ("{'pred': 'no', 'score': 0}", False, 0.0),
        ('Here: {"pred": "Yes", "score": "3.5"}.', True, 3.5),
        ('{"pred": "yes", "score": 9}', True, None),
        ('{"pred": "yes"}', True, None),
        ('{"pred": "yes", "score": NaN}', True, None),
        ('{"note": 1} {"pred": "no", "score": 1}', False, 1.0),
    ],
)
def test_words_to_verdicts(text, right, rating):
    verdict = parse(text)
    assert (verdict.right, verdict.rating) == (right, rating)
