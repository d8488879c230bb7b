"""Requests as other programs send them: vLLM's and llama.cpp's fields, Open WebUI's calls, the official client's turns."""

import http.client
import json
import threading

import pytest
from served import NOW, WAIT_S, eventually, serving

pytest.importorskip("fastapi")

SAID = [{"role": "user", "content": NOW}]
VLLM = {
    "logit_bias": None, "max_completion_tokens": 16, "n": 1, "seed": 7, "stop": [], "temperature": 0.7, "top_p": 0.9,
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "chat_template_kwargs": {}, "tools": None,
    "user": "cam", "media_io_kwargs": {"video": {"num_frames": 2}}, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
}  # fmt: skip
LLAMA_CPP = {
    "top_k": 40, "max_tokens": -1, "seed": -1, "dry_base": 1.75, "samplers": ["top_k", "temperature"], "cache_prompt": True,
    "id_slot": -1, "reasoning_format": "auto", "stream": False,
}  # fmt: skip
OPEN_WEBUI = {
    "stream": True, "stream_options": {"include_usage": True}, "chat_id": "0b8e", "tool_ids": [],
    "features": {"web_search": False}, "metadata": {"task": None}, "max_tokens": 1000, "user": {"name": "Ann"},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    config = folder / "edgevlm.toml"
    config.write_text("[server]\nmax_requests = 8\n[cameras.one]\n[cameras.two]\n")
    with serving(folder / "served", config) as started:
        started.config = config
        for name in ("one", "two"):
            started.watched(name, 2)
        yield started


@pytest.mark.parametrize("fields", [VLLM, LLAMA_CPP, OPEN_WEBUI], ids=["vllm", "llama.cpp", "open-webui"])
def test_what_other_programs_send_is_answered(server, fields):
    status, headers, body = server.request("POST", "/v1/chat/completions", {"model": "one", "messages": SAID, **fields})
    assert status == 200, body
    if fields["stream"]:
        assert headers["content-type"].startswith("text/event-stream")
        *chunks, done = [line.removeprefix("data: ") for line in body.decode().split("\r\n\r\n") if line]
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["usage"]["completion_tokens"] >= 1
    else:
        assert json.loads(body)["choices"][0]["message"]["content"].strip().isdecimal()


def test_the_responses_interface(server):
    asked = {"model": "one", "input": [{"role": "user", "content": [{"type": "input_text", "text": NOW}]}], "store": False}
    whole = server.client.responses.create(**asked, max_output_tokens=16)
    assert whole.output_text.strip().isdecimal()
    again = server.client.responses.create(**{**asked, "input": [*asked["input"], *whole.output, *asked["input"]]})
    assert again.output_text.strip().isdecimal()
    assert (whole.status, whole.usage.total_tokens) == ("completed", whole.usage.input_tokens + whole.usage.output_tokens)
    events = list(server.client.responses.create(**{**asked, "input": NOW}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == events[-1].response.output_text
    )
    status, _, body = server.request("POST", "/v1/responses", {"model": "one", "input": []})
    assert (status, json.loads(body)["error"]["param"].partition(".")[0]) == (400, "input")


def test_clients_at_once_on_two_streams_get_their_own_answers(server):
    """Each asks its own stream, for one of its own choices, of its own picture: nothing of another's is in its answer."""
    wrong, left = [], threading.Barrier(6)

    def ask(number):
        choices = ["0", "1"] if number % 2 else ["2", "3"]
        name = "one" if number < 3 else "two"
        left.wait()
        for _ in range(4):
            chunks = list(server.client.chat.completions.create(
                model=name, messages=SAID, stream=True, extra_body={"structured_outputs": {"choice": choices}},
            ))  # fmt: skip
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            told = chunks[-1].model_extra["edgevlm"]
            if text not in choices or list(told["choices"]) != choices or told["stream"] != name:
                wrong.append((number, text, told))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counted = b'edgevlm_request_queue_time_seconds_count{stream="two"}'
    eventually(lambda: counted in server.request("GET", "/metrics")[2])


def test_places_are_bounded_and_free_once_their_clients_are_gone(server):
    """More clients than places: some are told when to come again. All go away unread, and nothing runs or waits then."""
    links, body = [], json.dumps({"model": "one", "messages": SAID, "stream": True, "max_tokens": 148}).encode()
    head = {"content-type": "application/json"}
    for _ in range(40):
        links.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S))
        links[-1].request("POST", "/v1/chat/completions", body, head)
    answers = [link.getresponse() for link in links]
    for answer in answers:
        assert answer.status in (200, 429)
        assert answer.status == 200 or int(answer.headers["retry-after"]) >= 1
    for link in links:
        link.close()
    left = {"edgevlm_num_requests_running 0.0", "edgevlm_num_requests_waiting 0.0"}
    eventually(lambda: left <= {*server.request("GET", "/metrics")[2].decode().splitlines()})
