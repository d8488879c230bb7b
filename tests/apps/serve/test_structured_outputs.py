"""Answers of a given form, through the official client: choices on the demo, JSON schemas on a byte-level tokenizer."""

import json
import time
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from served import NOW, serving
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from edgevlm.apps.serve.grammar import Grammar
from edgevlm.errors import UserError

pytest.importorskip("fastapi")
checkpoints = pytest.importorskip("checkpoints")

SCHEMA = {
    "type": "object",
    "properties": {"person": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 20},
                   "what": {"type": "string", "maxLength": 8}, "color": {"enum": ["red", "blue"]}},
    "required": ["person", "count", "what", "color"], "additionalProperties": False,
}  # fmt: skip
ARRAYS = [[{"type": "array", "items": {"$ref": f"#/$defs/{j}"}} for j in range(30)] for _ in range(30)]
OPEN = {"$defs": {str(i): {"anyOf": each} for i, each in enumerate(ARRAYS)}, "$ref": "#/$defs/0"}
SAID = [{"role": "user", "content": NOW}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the demo, and of a camera watched by a tiny random model."""
    from edgevlm.export import export_checkpoint

    folder = tmp_path_factory.mktemp("structured")
    checkpoint = checkpoints.make_checkpoint(folder / "checkpoint", "llava_onevision", max_positions=2048)
    bundle = export_checkpoint(checkpoint, folder / "bundle")
    (folder / "edgevlm.toml").write_text(f'[cameras.demo]\n[cameras.tiny]\nmodel = "{bundle}"\n')
    with serving(folder / "served", folder / "edgevlm.toml") as started:
        started.watched("demo", 2)
        started.watched("tiny", 2)
        for name in ("demo", "tiny"):  # the same question has the same answer then
            started.request("PATCH", f"/v1/streams/{name}", {"state": "paused"})
        yield started


def schema(text):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": text}}}


def ask(server, camera, **settings):
    return server.client.chat.completions.create(model=camera, messages=SAID, **settings)


def test_the_answer_is_one_of_the_choices(server):
    field = {"structured_outputs": {"choice": ["Red", "Blue"]}}
    answer = ask(server, "demo", extra_body=field)
    told = answer.model_extra["edgevlm"]["choices"]
    assert answer.choices[0].message.content in ("Red", "Blue")
    assert answer.choices[0].finish_reason == "stop"
    assert max(told, key=told.get) == answer.choices[0].message.content
    assert sum(told.values()) == pytest.approx(1, abs=1e-5)
    chunks = list(ask(server, "demo", extra_body=field, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_the_answer_follows_a_json_schema(server):
    form = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": SCHEMA}}
    for seed in range(3):
        answer = ask(server, "tiny", response_format=form, temperature=1.0, seed=seed)
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
    again = ask(server, "tiny", response_format=form, temperature=1.0, seed=2)
    assert again.choices[0].message.content == answer.choices[0].message.content
    chunks = ask(server, "tiny", response_format=form, temperature=1.0, seed=2, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_a_stop_cuts_what_follows_a_form_too(server):
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "aaabb"}}}
    for stop, text in (("ab", '"aa'), ("z", '"aaabb"')):
        answer = ask(server, "tiny", response_format=form, stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    ("stream", "field", "param"),
    [
        ("demo", {"response_format": {"type": "json_object"}}, "response_format"),  # its tokenizer has no braces
        ("demo", {"structured_outputs": {"choice": ["yes", "perhaps"]}}, "structured_outputs.choice"),
        ("demo", {"structured_outputs": {"choice": ["x"] * 1000}}, "structured_outputs.choice"),
        ("demo", {"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ("tiny", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("tiny", schema({"type": 5}), "response_format.json_schema"),
        ("tiny", schema({"$ref": "http://127.0.0.1/x"}), "response_format.json_schema"),
        ("tiny", schema({"enum": ["x" * 100_000]}), "response_format.json_schema"),
        ("tiny", schema({"type": "string", "pattern": 2000 * ".*"}), None),  # found out at its second token
        ("tiny", schema({"type": "integer", "multipleOf": 9_999_991}), "response_format.json_schema"),
        ("tiny", schema({"type": "integer", "multipleOf": True}), "response_format.json_schema"),
        ("tiny", schema({"type": "integer", "multipleOf": 10**400}), "response_format.json_schema"),
        ("tiny", schema(OPEN), "response_format.json_schema"),  # half a second a token
        ("tiny", schema(json.loads(900 * '{"items":' + "true" + 900 * "}")), "response_format.json_schema"),
        ("tiny", schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 99.1}]}), "response_format.json_schema"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_is_a_400_that_names_it(server, stream, field, param):
    status, _, body = server.request("POST", "/v1/chat/completions", {"model": stream, "messages": SAID, **field})
    assert (status, json.loads(body)["error"]["param"]) == (400, param), body


def test_an_answer_whose_form_takes_too_long_ends(monkeypatch):
    tokenizer = Tokenizer(BPE({each: place for place, each in enumerate(sorted(ByteLevel.alphabet()))}, []))
    model = Mock(tokenizer=tokenizer, bundle=SimpleNamespace(chat=SimpleNamespace(stop_ids=[0])))
    tokenizer.decoder = decoders.ByteLevel()
    quote, logits = tokenizer.token_to_id('"'), np.zeros(256, np.float32)
    for spent_s in (0.0, 1.0):
        form = Grammar(model, {"type": "string"})
        assert np.flatnonzero(np.isfinite(form([], logits))).tolist() == [quote]
        monkeypatch.setattr(time, "thread_time", count(step=spent_s).__next__)
        with pytest.raises(UserError, match="too long") if spent_s else nullcontext():
            assert np.isfinite(form([quote], logits)).sum() > 50
