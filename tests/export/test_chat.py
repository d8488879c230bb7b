"""Prompts against transformers' own rendering, wherever a checkpoint keeps its template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TOOLS_TEMPLATE
from memory import rows_of

from edgevlm.errors import UserError
from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import load_family
from edgevlm.runtime import sandbox
from edgevlm.runtime.bundle import Bundle, ChatSpec
from edgevlm.runtime.chat import Chat, Dialogue
from edgevlm.runtime.helper_process import Helper
from edgevlm.runtime.model import demo_bundle
from edgevlm.runtime.session import Session, TextBudget

FAMILIES = ("llava", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
TURNS = [("How many {{ dogs }}?", " Two.\n"), ("And cats?", "<none>")]


def spec_of(folder: Path) -> ChatSpec:
    checkpoint = Checkpoint(folder)
    family = load_family(checkpoint.config["model_type"], folder)
    return ChatSpec(**chat(checkpoint, family, checkpoint.section("text_config")["vocab_size"])[0])


def check(spec: ChatSpec, tokenizer: Any, template: str | None = None, system: str | None = None) -> None:
    """What transformers renders is our prefix, the video's place and our suffix, but for what its processor adds there."""
    messages = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
    for index, (question, answer) in enumerate([*TURNS, ("What now?", "")]):
        video = [{"type": spec.content_type}] if index == 0 else []
        messages.append({"role": "user", "content": [*video, {"type": "text", "text": question}]})
        messages += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}] if answer else []
    wanted = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    ours = Chat(spec, tokenizer._tokenizer, system)
    assert ours.text(TURNS, "What now?", "VIDEO") == wanted.replace(spec.placeholder, f"{spec.opening}VIDEO{spec.ending}")
    for message in messages:
        message["content"] = [part for part in message["content"] if part["type"] == "text"]
    wanted = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ours.text_only(TURNS, "What now?") == tokenizer(wanted, add_special_tokens=False).input_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_transformers_s(exported: Any, family: str) -> None:
    import transformers

    folder = exported(family).checkpoint
    spec, tokenizer = spec_of(folder), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check(spec, tokenizer)
    check(spec, tokenizer, system="Be brief.")
    assert tokenizer.eos_token_id in spec.stop_ids


def test_tools_calls_and_results_are_rendered_as_transformers_does(exported: Any) -> None:
    """After a message that has the video alone; a last message of the assistant's is continued as transformers does too."""
    import transformers

    folder = exported("qwen2_5_vl").checkpoint
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain = spec_of(folder)
    spec = replace(plain, template=TOOLS_TEMPLATE)
    ours = Chat(spec, tokenizer._tokenizer)
    assert (ours.knows_tools, Chat(plain, tokenizer._tokenizer).knows_tools) == (True, False)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "the \u00fc & <door>"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}]
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "a dog", "tool_call_id": "1"},
    ]  # fmt: skip
    given = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages[:2]] + [
        {**messages[2], "content": ""}, messages[3],
    ]  # fmt: skip
    render = {"chat_template": TOOLS_TEMPLATE, "tokenize": False}
    wanted = tokenizer.apply_chat_template(given, tools=tools, add_generation_prompt=True, **render)
    ids = tokenizer(wanted, add_special_tokens=False).input_ids
    suffix = ours.suffix([], Dialogue(tuple(messages), tuple(tools)))
    assert suffix[-len(ids) :] == ids
    assert tokenizer.decode(suffix[: -len(ids)]) == "<|vision_end|><|im_end|>\n"
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"}]
    wanted = tokenizer.apply_chat_template(asked, continue_final_message=True, **render)
    ids = tokenizer(wanted, add_special_tokens=False).input_ids
    assert ours.text_only([], Dialogue(tuple(asked), continues=True)) == ids


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_vl", "smolvlm"])
def test_before_the_first_frame_an_answer_is_transformers_s_to_the_text_alone(exported: Any, family: str) -> None:
    import torch
    import transformers

    made = exported(family)
    kind, tokenizer = transformers.AutoModelForImageTextToText, transformers.AutoTokenizer.from_pretrained(made.checkpoint)
    messages = [{"role": "user", "content": [{"type": "text", "text": "what color was it?"}]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    with torch.inference_mode():
        theirs = kind.from_pretrained(made.checkpoint, dtype=torch.float32).generate(ids, max_new_tokens=6, do_sample=False)
    with Session.open(str(made.bundle), policy="last-seen", text_budget=TextBudget(16, 64, 8)) as session:
        before = rows_of(session._stream)
        answer = session.ask("what color was it?", max_tokens=6)
        assert answer.wait(60)
        for mine, then in zip(rows_of(session._stream), before, strict=True):
            np.testing.assert_equal(mine, then)
    said = theirs[0, ids.shape[1] :].tolist()
    assert answer.token_ids == [token for token in said if token not in session.model.bundle.chat.stop_ids]
    assert len(answer.token_ids) > 2


def named(folder: Path, template: str) -> None:
    change(folder / "tokenizer_config.json", [{"name": "tools", "template": "x"}, {"name": "default", "template": template}])


def change(file: Path, template: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | {"chat_template": template}))


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process that renders, in place of the program's own."""
    made = Helper(memory=sandbox.MEMORY, cpu_s=sandbox.CPU_S, imports=["jinja2.sandbox", "jinja2.ext"])
    monkeypatch.setattr(sandbox, "helper", made)
    yield made
    made.close()


def test_known_templates_start_no_process(helper: Any) -> None:
    for template in (Bundle.load(demo_bundle(), verify="size").chat.template, load_family("smolvlm", "").template):
        sandbox.render(template, messages=[])
    assert helper.process is None


def test_a_template_that_is_too_much_ends_its_process_alone(helper: Any) -> None:
    assert sandbox.render("{{ a }}", a="\U0001f600\n") == "\U0001f600\n"
    first = helper.process
    with pytest.raises(UserError, match="exceeds the limit"):
        sandbox.render("{% for a in range(9999) %}{% for b in range(99999) %}{{ 'b' * 999 }}{% endfor %}{% endfor %}")
    assert first.poll() is not None
    assert sandbox.render("{{ a }}", a=1) == "1"
    assert helper.process is not first
