"""text-facts and text-scenes: what streams say, and a tiny language model asked as transformers asks it."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from edgevlm.calib.accuracy import text_streams as facts
from edgevlm.calib.accuracy.text_streams import TEXT_FACTS, TOKENS, make_scenes
from edgevlm.calib.accuracy.variants import VariantRun
from edgevlm.calib.accuracy.worker import AccuracySettings, CaseTask, Worker
from edgevlm.cli import app
from edgevlm.runtime.policies import POLICIES

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

FRAMES = 24
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LISTS = f"{facts.WHO} {facts.DID} {facts.WHAT} {facts.WHERE}".replace("|", " ")
WORDS = f"{facts.GIVEN} {facts.FAMILY} A visitor called Who user assistant {LISTS}".split()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random llama that knows the suite's words: transformers' model, and its GGUF file as llama.cpp would write it."""
    torch.manual_seed(0)
    tokens, merges = [*MARKS, "Ċ", "Ġ", *map(chr, range(33, 127))], []
    for word in dict.fromkeys(spelt for plain in WORDS for spelt in (plain, f"Ġ{plain}")):
        for end in range(1, len(word)):
            if word[: end + 1] not in tokens:
                tokens.append(word[: end + 1])
                merges.append(f"{word[:end]} {word[end]}")
    heads = {"q_proj": 4, "k_proj": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.2,
    )).eval()  # fmt: skip
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 1024, "block_count": 3, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in MARKS else 1 for token in tokens])
    writer.add_token_merges(merges)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, tensor in model.model.state_dict().items():
        array = tensor.numpy()
        if count := heads.get(name.split(".")[-2]):  # rotary pairs side by side
            array = array.reshape(count, 2, -1, 64).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(f"model.{name}", try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


@pytest.fixture(scope="module")
def worker(tiny, tmp_path_factory):
    from edgevlm.bench.accuracy.text_bundle import text_bundle

    bundle = text_bundle(tiny[1], tmp_path_factory.mktemp("bundle"), "fp32")
    made = Worker(AccuracySettings(str(bundle), FRAMES, "5", suite=TEXT_FACTS))
    yield made
    made.model.close()


def ids_of(case):
    return case.frames[:, 0].astype(np.int64) @ [1, 256, 65536]


def test_full_kv_answers_as_transformers_does(tiny, worker):
    """Token by token after the same text: prefix, stream, question and the answer's first words."""
    record = worker.perform(CaseTask(VariantRun("full", "100%", FRAMES * TOKENS), 0))
    case, tokenizer = worker.case(0), worker.model.tokenizer
    answers = []
    for question in case.questions:
        asked, start = question.text.split("\n")
        before = tokenizer.encode("<|im_start|>user\n").ids
        after = tokenizer.encode(f"\n{asked}<|im_end|>\n<|im_start|>assistant\n{start}").ids
        ids = torch.tensor([[*before, *ids_of(case).ravel().tolist(), *after]])
        most = facts.QUESTION_BUDGET.answer
        made = tiny[0].generate(ids, max_new_tokens=most, do_sample=False, eos_token_id=[0, 2], pad_token_id=0)
        answers.append(tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True).strip())
    assert [result["answer"] for result in record["results"]] == answers
    assert len(set(answers)) > 1, "the question is read"


def test_a_scene_stays_but_for_who_comes_and_leaves_and_its_evidence_is_where_the_answer_is():
    words: list[str] = []

    def encode(text):
        parts = re.findall(r"\w+|[.,]", text)
        words.extend(dict.fromkeys(part for part in parts if part not in words))
        return [words.index(part) for part in parts]

    case = make_scenes((2_000_000, 5), 0, 40, encode)
    shown = [[words[token] for token in row] for row in ids_of(case)]
    assert 0.75 < np.mean(np.array(shown[1:]) == np.array(shown[:-1])) < 0.95
    assert {question.kind.partition("_")[0] for question in case.questions} == {"past", "now", "first"}
    for question in case.questions:
        frames = np.unique(question.evidence // TOKENS)
        assert frames[-1] == question.last
        assert question.is_about_now == (question.last == 39)
        for token in frames * TOKENS:
            mine = question.evidence[(token <= question.evidence) & (question.evidence < token + TOKENS)]
            assert question.answer in [words[at] for at in ids_of(case).ravel()[mine]]
        if question.kind.startswith("past"):
            assert not any(question.answer in row for row in shown[question.last + 1 :]), "nobody comes back"


def test_every_policy_runs_at_equal_bytes_and_a_stopped_run_is_resumed(tiny, tmp_path):
    out = tmp_path / "run.jsonl"

    def lines_of(policy, *more):
        typed = ["--suite", TEXT_FACTS, "--model", str(tiny[1]), "--frames", str(FRAMES), "--streams", "1", "--policy", policy]
        done = CliRunner().invoke(
            app, ["bench", "accuracy", *typed, "--budget", "25%", "--out", str(out), "--json", *more], catch_exceptions=False
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    lines = lines_of("all")
    bounded = {name for name, policy in POLICIES.items() if policy.bounded}
    assert {line["policy"] for line in lines} == {"full", "oracle", *bounded}
    assert not [line for line in lines if "skipped" in line or "left_out" in line]
    window = next(line["bytes"] for line in lines if line["policy"] == "sliding-window")
    assert all(line["bytes"] <= window for line in lines if line["policy"] not in ("full", "oracle"))
    kept = out.read_bytes()
    last = json.loads(kept.splitlines()[-1])["policy"]
    out.write_bytes(kept[: kept.rindex(b"\n", 0, -1) + 1])
    again = lines_of(last, "--resume")
    assert out.read_bytes().count(b"\n") == kept.count(b"\n")
    assert [line["accuracy"] for line in again] == [line["accuracy"] for line in lines if line["policy"] in ("full", last)]
