"""Fields of many clients are honoured, or ignored and named in the reply."""

import json

import pytest
from served import NOW, serving

pytest.importorskip("fastapi")

SAID = [{"role": "user", "content": NOW}]
DEEP: dict = {}
for _ in range(200):
    DEEP = {"properties": {"x": DEEP}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("requests") / "served") as started:
        started.watched("demo", 2)
        started.request("PATCH", "/v1/streams/demo", {"state": "paused"})  # the same question has the same answer then
        yield started


def post(server, body, path="/v1/chat/completions"):
    status, _, answer = server.request("POST", path, {"model": "demo", **body})
    return status, json.loads(answer)


def test_what_is_ignored_is_named_by_its_path_and_streamed_in_the_last_chunk(server):
    fields = {
        "store": False, "include": [], "metadata": {"a": 1}, "stream_options": {"continuous_usage_stats": True},
        "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100_000, "seed": 1,
    }  # fmt: skip
    named = {"store", "metadata", "stream_options.continuous_usage_stats", "tools", "tool_choice", "parallel_tool_calls",
             "max_tokens", "messages.0"}  # fmt: skip
    said = [{"role": "system", "content": "Answer like a pirate."}, *SAID]
    status, answer = post(server, {"messages": said, **fields})
    assert (status, {*answer["edgevlm"]["ignored"]}) == (200, named)
    assert answer["choices"][0]["message"]["content"].strip().isdecimal(), "a system message changes nothing for the demo"
    chunks = list(server.client.chat.completions.create(model="demo", messages=SAID, stream=True, extra_body={"think": True}))
    assert [chunk.model_extra["edgevlm"]["ignored"] for chunk in chunks if "edgevlm" in chunk.model_extra] == [["think"]]


def test_the_responses_interface_names_its_own_fields(server):
    body = {"input": [{"type": "reasoning", "summary": []}, *SAID], "instructions": "Be brief.", "max_output_tokens": 99_999,
            "include": ["reasoning.encrypted_content"], "tools": [{"type": "web_search"}], "messages.9": 1}  # fmt: skip
    status, answer = post(server, body, "/v1/responses")
    assert (status, answer["status"]) == (200, "completed")
    named = {"include", "input.0", "instructions", "max_output_tokens", "tools", "tools.0", "messages.9"}
    assert {*answer["edgevlm"]["ignored"]} == named


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "t?"}, {"role": "assistant", "content": None}, *SAID],
        [{"role": "user", "content": "t?"}, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
         {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}],
        [*SAID, {"role": "assistant", "content": "The"}],
        [{"role": "user", "content": [{"type": "text", "text": NOW, "cache_control": {"type": "ephemeral"}}]}],
    ],
    ids=["null", "call and result", "the assistant's last", "unknown field of a part"],
)  # fmt: skip
def test_conversations_of_any_shape_are_answered(server, messages):
    status, answer = post(server, {"messages": messages, "stop": ["a", "b", "c", "d", "e"]})
    assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "body", "param", "rule"),
    [
        ("chat/completions", {"messages": SAID, "n": 2}, "n", "must be 1"),
        ("chat/completions", {"messages": SAID, "stop": ["x"] * 65}, "stop", "64"),
        ("chat/completions", {"messages": SAID, "stop": [5]}, "stop.0", "string"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a string or a list"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages", "no text or picture"),
        ("chat/completions", {"messages": SAID, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        (
            "chat/completions",
            {"messages": SAID, "tools": [{"function": {"name": "f", "parameters": DEEP}}]},
            "tools.0",
            "deeper",
        ),
        ("chat/completions", {"messages": SAID, "presence_penalty": 3}, "presence_penalty", "2"),
        ("responses", {"input": NOW, "previous_response_id": "resp_1"}, "previous_response_id", "stored"),
        ("responses", {"input": [{"content": NOW}]}, "input.0.role", "role"),
        ("responses", {"input": " "}, "input", "no text or picture"),
        (
            "responses",
            {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.input_image",
            "data:image",
        ),
        ("completions", {"prompt": ["a", "b"]}, "prompt", "one text"),
    ],
)
def test_a_refusal_names_the_rule(server, path, body, param, rule):
    status, answer = post(server, body, f"/v1/{path}")
    assert (status, answer["error"]["param"]) == (400, param)
    assert rule in answer["error"]["message"]


def test_an_unknown_field_in_capitals_is_named(server):
    status, _, answer = server.request("POST", "/v1/streams", {"id": "x", "source": "demo", "Budget": 3})
    assert (status, json.loads(answer)["error"]["param"]) == (400, "Budget")


def test_the_official_client_reads_log_probabilities_of_both_interfaces(server):
    asked = {"model": "demo", "messages": SAID, "logprobs": True, "top_logprobs": 2}
    noted = server.client.chat.completions.create(**asked).choices[0].logprobs.content
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in noted)
    assert noted[0].top_logprobs[0].token == noted[0].token
    chunks = server.client.chat.completions.create(**asked, stream=True)
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in noted]
    whole = server.client.completions.create(model="demo", prompt=[NOW], logprobs=2)
    assert (whole.object, whole.choices[0].text.strip().isdecimal()) == ("text_completion", True)
    assert whole.choices[0].logprobs.tokens[0] == noted[0].token
    pieces = server.client.completions.create(model="demo", prompt=NOW, stream=True)
    assert "".join(each.choices[0].text for each in pieces) == whole.choices[0].text


def test_head_health_and_models(server):
    for path in ("/health", "/v1/streams/demo/frame.jpg", "/v1/streams/demo/mjpeg"):
        status, _, body = server.request("HEAD", path)
        assert (path, status, body) == (path, 200, b"")
    model = server.get("/v1/models")["data"][0]
    assert (model["owned_by"], model["max_model_len"] > 256) == ("demo", True)
