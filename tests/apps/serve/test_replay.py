"""What nineteen real clients send (requests.jsonl): each gets what it needs, on the demo and on a model that writes JSON."""

import base64
import http.client
import io
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from served import KEY, NOW, WAIT_S, serving

pytest.importorskip("fastapi")
Image = pytest.importorskip("PIL.Image")
checkpoints, more_checkpoints = pytest.importorskip("checkpoints"), pytest.importorskip("more_checkpoints")

REQUESTS = [json.loads(line) for line in Path(__file__).with_name("requests.jsonl").read_text(encoding="utf-8").splitlines()]
LIVE_S = 8.0  # for the first picture or event of a response that does not end
WORDS = "Answer in few words, and keep to what the camera shows. "


def picture():
    written = io.BytesIO()
    Image.new("RGB", (160, 120), (200, 30, 30)).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


PICTURE = picture()


def filled(value, name):
    """A body with the stream's name, pictures and long texts in it, which are not in the file."""
    if isinstance(value, dict):
        return {key: filled(each, name) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, name) for each in value]
    if isinstance(value, str) and value.startswith("@LONG:"):
        count = int(value[6:-1])
        return (WORDS * (count // len(WORDS) + 1))[:count]
    return {"@NAME@": name, "@PNG@": PICTURE}.get(value, value) if isinstance(value, str) else value


def send(server, name, request):
    """Status, headers and body of the answer; of one that does not end, up to its first picture or event."""
    basic = base64.b64encode(f"x:{KEY}".encode()).decode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    headers |= {key.lower(): value for key, value in request.get("headers", {}).items()}
    if headers["authorization"].startswith("@"):
        headers["authorization"] = {"@BASIC@": f"Basic {basic}", "@bearer@": f"bearer {KEY}"}[headers["authorization"]]
    body = json.dumps(filled(request["body"], name)).encode() if "body" in request else None
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        connection.request(request["method"], request["path"].replace("@NAME@", name), body, headers)
        response, got, end = connection.getresponse(), b"", time.monotonic() + LIVE_S
        if request["is"] not in ("multipart", "sse"):
            return response.status, response.headers, response.read()
        while time.monotonic() < end and not (b"\xff\xd8\xff" in got or b"event:" in got) and (chunk := response.read1(65536)):
            got += chunk
        return response.status, response.headers, got


def is_right(what, request, headers, body):
    """Return whether an answer is what its client needs. Raises an error of any kind where it is something else."""
    if what in ("any", "jpeg", "multipart", "sse", "relative_page"):
        page = body.decode(errors="replace")
        return {
            "any": True, "jpeg": body[:3] == b"\xff\xd8\xff", "sse": b"event:" in body,
            "multipart": b"\xff\xd8\xff" in body and "multipart" in headers["content-type"],
            "relative_page": 'src="/' not in page and 'href="/' not in page,
        }[what]  # fmt: skip
    if "stream" in what:
        *chunks, last = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        if what == "responses_stream":
            return json.loads(last)["type"] in ("response.completed", "response.incomplete")
        told = [json.loads(chunk) for chunk in chunks]
        return last == "[DONE]" and any(each.get("choices") for each in told) and not any("error" in each for each in told)
    answer = json.loads(body)
    if what in ("error", "list", "model"):
        return {
            "error": lambda: answer["error"]["message"],
            "list": lambda: answer["data"][0]["id"],
            "model": lambda: answer["id"],
        }[what]()
    if what == "responses":
        return any(item["type"] == "function_call" or item["content"][0]["type"] == "output_text" for item in answer["output"])
    choice = answer["choices"][0]
    if what == "text":
        return isinstance(choice["text"], str)
    message, cut = choice["message"], choice["finish_reason"] == "length"
    if what == "tool_call":
        names = {tool["function"]["name"] for tool in request["body"]["tools"]}
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return cut or (
            calls and all(each["name"] in names and isinstance(json.loads(each["arguments"]), dict) for each in calls)
        )
    if what == "json":
        return cut or json.loads(message["content"]) is not None
    if what == "logprobs":
        return choice["logprobs"]["content"] is not None
    return isinstance(message["content"], str) or message["tool_calls"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the demo, and of a camera watched by a tiny random model with byte tokens and a template with tools."""
    from edgevlm.export import export_checkpoint

    folder = tmp_path_factory.mktemp("replay")
    checkpoint = more_checkpoints.make_more(folder / "checkpoint", "qwen2_5_vl", max_position_embeddings=1 << 17)
    (checkpoint / "chat_template.jinja").write_text(checkpoints.TOOLS_TEMPLATE)
    bundle = export_checkpoint(checkpoint, folder / "bundle")
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    (folder / "edgevlm.toml").write_text(
        f'[server]\nmax_question_tokens = 65536\nkey = "file:{folder / "key"}"\n'
        f'[cameras.demo]\n[cameras.tiny]\nmodel = "{bundle}"\n'
    )
    with serving(folder / "served", folder / "edgevlm.toml", key=KEY) as started:
        for name in ("demo", "tiny"):
            started.watched(name, 2)
        yield started


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_each_request_of_nineteen_clients_gets_what_it_needs(server, name):
    wrong, clients = [], set()
    for number, request in enumerate(REQUESTS, 1):
        if request.get("needs") == "json" and name == "demo":
            continue  # its tokens are words
        status, headers, body = send(server, name, request)
        clients.add(request["client"])
        try:
            right = status in request["status"] and all(
                headers[key] == value for key, value in request.get("header", {}).items()
            )
            right = right and ((status >= 300 and request["is"] != "error") or is_right(request["is"], request, headers, body))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            right, body = False, repr(error).encode() + body
        if not right:
            wrong.append((number, request["client"], request["path"], status, body[:200]))
    assert not wrong
    assert len(clients) == 19


LOOK = {"type": "function", "function": {
    "name": "look", "description": "Look at a place.", "parameters": {
        "type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "required": ["place"],
        "$defs": {"Place": {"enum": ["door", "yard"]}},
    },
}}  # fmt: skip
WAIT = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}},
}
SAID = [{"role": "user", "content": NOW}]


def test_a_call_that_is_asked_for_follows_its_schema_and_its_result_is_answered(server):
    asked = {"model": "tiny", "tools": [LOOK, WAIT], "temperature": 1.0, "seed": 3}
    for choice, names in (("required", {"look", "wait"}), ({"type": "function", "function": {"name": "look"}}, {"look"})):
        answer = server.client.chat.completions.create(messages=SAID, tool_choice=choice, **asked)
        (call,) = answer.choices[0].message.tool_calls
        assert (answer.choices[0].finish_reason, call.function.name in names) == ("tool_calls", True)
        assert answer.choices[0].message.content is None
    assert json.loads(call.function.arguments) in ({"place": "door"}, {"place": "yard"})  # and nothing undeclared
    chunks = [
        chunk.choices[0]
        for chunk in server.client.chat.completions.create(messages=SAID, tool_choice=choice, stream=True, **asked)
    ]
    (told,) = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert (told.function.name, told.function.arguments) == (call.function.name, call.function.arguments)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "a dog"}
    turn = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}, result]
    again = server.client.chat.completions.create(messages=turn, max_tokens=4, **asked)
    assert again.model_extra["edgevlm"]["ignored"] == []
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_calls_in_a_free_answer_are_found_streamed_or_not(server):
    """The answer is one of two texts, both with calls: what a model that was taught tools writes of itself."""
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "door"}}\n</tool_call>'
    texts = [f"I look.\n{call}\n{call}", f"Let me see.\n{call}\n{call}"]
    asked = {"model": "tiny", "messages": SAID, "tools": [LOOK], "extra_body": {"structured_outputs": {"choice": texts}}}
    for parallel in (True, False):
        answer = server.client.chat.completions.create(**asked, parallel_tool_calls=parallel).choices[0]
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in answer.message.tool_calls]
        assert calls == [("look", {"place": "door"})] * (2 if parallel else 1)
        assert (answer.finish_reason, answer.message.content in ("I look.", "Let me see.")) == ("tool_calls", True)
        chunks = list(server.client.chat.completions.create(**asked, parallel_tool_calls=parallel, stream=True))
        told = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        assert [each.index for each in told] == list(range(len(calls)))
        assert [(each.function.name, json.loads(each.function.arguments)) for each in told] == calls
    none = server.client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    assert none.tool_calls is None
    assert call in none.content


def test_the_responses_interface_calls_too(server):
    tool = {"type": "function", **LOOK["function"], "strict": True}
    asked = {"model": "tiny", "tools": [tool], "temperature": 1.0}
    answer = server.client.responses.create(input=NOW, tool_choice="required", **asked)
    (item,) = answer.output
    assert (item.type, item.name, json.loads(item.arguments)["place"] in ("door", "yard")) == ("function_call", "look", True)
    events = list(
        server.client.responses.create(input=NOW, tool_choice={"type": "function", "name": "look"}, stream=True, **asked)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert events[-1].response.output[0].arguments == done.arguments
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "a dog"}
    turn = [{"role": "user", "content": NOW}, item.model_dump(exclude_none=True), output]
    again = server.client.responses.create(input=turn, max_output_tokens=4, **asked)
    assert again.output[0].type == "message"
    assert again.model_extra["edgevlm"]["ignored"] == ["tools.function.strict"], "a call of a free answer may not follow it"


def test_the_answer_goes_on_where_it_is_asked_to(server):
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}
    asked = {"model": "tiny", "messages": [*SAID, {"role": "assistant", "content": "It is"}], "response_format": form}
    sizes = []
    for field in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        answer = server.client.chat.completions.create(**asked, extra_body=field)
        sizes.append(answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens)
        assert answer.choices[0].message.content == '"x"'
    assert sizes[1] < sizes[0], "no turn of the assistant's begins"
