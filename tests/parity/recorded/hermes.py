"""Record what HERMES's own program keeps: ``python tests/parity/recorded/hermes.py CLONE`` writes hermes.npz.

CLONE: a clone of github.com/haowei-freesky/HERMES, whose LLaVA-OneVision half runs here as it is, in float32, on small random
decoders and random frames. Its base class is not published; ``Abstract`` stands for it. With a model limit of 1024 positions
the program re-indexes at every compression. Run with ``PYTHONPATH=tests/export``. Needs torch, transformers and git; the
tests need no clone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from zlib import crc32

import numpy as np

REVISION = "b505d95"
SHALLOW, DEEP = 0.1, 0.7  # fractions of the depth, as ``load_model`` sets them
PREFIX, PER_FRAME, LIMIT = "<|im_start|>user\n", 4, 1024
NEAREST = 5e-6  # how near the best token that goes may come to the worst that stays: rounding decides nothing


class Case:
    """frames: of a chunk, ``chunks`` of them; turn: a question and its answer after half of them."""

    def __init__(self, budget, frames, chunks, turn=None, seed=0, **model):
        self.budget, self.frames, self.chunks, self.turn, self.seed = budget, frames, chunks, turn, seed
        self.model = {"layers": 10, "hidden": 48, "heads": 6, "kv_heads": 2} | model
        self.deep_from = int(self.model["layers"] * DEEP + 1e-9)

    def checkpoint(self, folder):
        """A LLaVA-OneVision checkpoint whose decoder has numbers that no release of torch or transformers changes."""
        import checkpoints
        import torch
        from safetensors.torch import load_file, save_file

        checkpoints.make_checkpoint(folder, intermediate=64, max_positions=2048, **self.model)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "language_model" in name and "norm" not in name:
                scale = 0.5 if name.endswith("bias") else 1.0 if "embed_tokens" in name else 0.25
                tensors[name] = torch.from_numpy(scale * numbers(crc32(name.encode()), tensor.shape))
        save_file(tensors, file, metadata={"format": "pt"})
        return Path(folder)

    def features(self):
        """What the tower saw of each chunk: ``[chunks, frames, PER_FRAME, hidden]``; a frame is like the one before."""
        shape = (self.chunks, self.frames, PER_FRAME, self.model["hidden"])
        new = numbers(self.seed, shape).reshape(-1, *shape[2:])
        for frame in range(1, len(new)):
            new[frame] = new[frame - 1] / 2 + new[frame]
        return new.reshape(shape)


TURN = "what color was it?", "it was red"
CASES = {
    "one frame": Case(21, 1, 12),
    "several frames": Case(38, 4, 7, turn=TURN, seed=2),
    "a chunk larger than the budget": Case(17, 5, 4, turn=TURN, seed=1),
    "twenty layers": Case(12, 4, 4, seed=1, layers=20, hidden=32, heads=4, kv_heads=4),
}


def numbers(seed, shape):
    """Even in -1..1; of all generators the one whose numbers never change."""
    return (np.random.RandomState(seed).randint(-(2**20), 2**20, shape) / 2**20).astype(np.float32)


def program(clone):
    """The program's module; what it imports and never calls here is empty."""
    sys.modules["abstract_Hermes"] = SimpleNamespace(Abstract_Hermes=Abstract)
    sys.modules["logzero"] = SimpleNamespace(logger=SimpleNamespace(info=lambda _: None, warning=lambda _: None))
    for name in ("reindex_1d_official", "llavaov_online_official"):
        module = sys.modules[name] = ModuleType(name)
        source = subprocess.run(
            ["git", "-C", clone, "show", f"{REVISION}:inference/{name}.py"], check=True, capture_output=True
        ).stdout
        exec(compile(source, name, "exec"), module.__dict__)
    return module


class Abstract:
    """What the program takes from its base class."""

    def __init__(self, processor, n_frame_tokens, init_prompt_ids, n_local, topk, chunk_size, kv_size, recency_ratio, k_ratio):
        self.processor, self.init_prompt_ids, self.kv_size = processor, init_prompt_ids, kv_size
        self.kv_cache, self.conv_history, self.visual_start_idx = None, [], len(init_prompt_ids[0])

    def encode_init_prompt(self):
        import torch

        ids = torch.tensor(self.init_prompt_ids)
        embeds, places = self.get_input_embeddings()(ids), torch.arange(ids.shape[1])[None]
        self.kv_cache = self.language_model(inputs_embeds=embeds, past_key_values=[], position_ids=places).past_key_values

    def get_input_embeddings(self):
        return self.language_model.model.embed_tokens

    def _get_video_features(self, features):
        return features.reshape(1, -1, features.shape[-1])

    def get_gpu_memory_usage_gb(self):
        return 0

    def eval(self):
        return self


class Language:
    """A transformers decoder, called as in the release that the program was written for."""

    def __init__(self, decoder):
        self.model, self.config = decoder, decoder.config
        self.config.max_position_embeddings = LIMIT

    def rotary_emb(self, like, seq_len):
        import torch

        return [table[0] for table in self.model.rotary_emb(like, torch.arange(seq_len)[None])]

    def __call__(self, inputs_embeds, past_key_values, position_ids, **_):
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, rows in enumerate(past_key_values):
            cache.update(*rows, layer)
        self.model(inputs_embeds=inputs_embeds, past_key_values=cache, position_ids=position_ids, use_cache=True)
        return SimpleNamespace(past_key_values=[(layer.keys, layer.values) for layer in cache.layers])


class Tokenizer:
    """``texts``: all that it was given, but for the system prompt."""

    def __init__(self, folder):
        from transformers import AutoTokenizer

        self.encode, self.texts = AutoTokenizer.from_pretrained(folder), []

    def __call__(self, text, return_tensors=None):
        import torch

        class OnAnyDevice(torch.Tensor):
            def to(self, *_):
                return self

        if return_tensors:  # the program's system prompt
            return SimpleNamespace(input_ids=torch.tensor([self.encode(PREFIX).input_ids]).as_subclass(OnAnyDevice))
        self.texts.append(text)
        return self.encode(text)


def recorded(module, case):
    """Of each compression: rows by layer in order of position, int16; summaries of the deep layers, float32; prompts.

    rows ``[rounds, layers, budget]``: those of the vision, counted from the stream's start, a summary of round r as -1 - r.
    summaries ``[rounds, deep layers, key and value, KV heads, head size]``. prompts ``[rounds, 3]``: local, global, both.
    """
    import torch
    from transformers import LlavaOnevisionForConditionalGeneration as Llava

    with tempfile.TemporaryDirectory() as folder:
        case.checkpoint(folder)
        decoder, tokenizer = Llava.from_pretrained(folder, dtype=torch.float32).model.language_model, Tokenizer(folder)
    processor = SimpleNamespace(tokenizer=tokenizer, video_processor=lambda it, **_: SimpleNamespace(pixel_values_videos=it))
    base = SimpleNamespace(language_model=Language(decoder), device=torch.device("cpu"), dtype=torch.float32)
    module.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: processor)
    module.LlavaOnevisionForConditionalGeneration = SimpleNamespace(from_pretrained=lambda *_, **__: base)
    model, _ = module.load_model("", kv_size=case.budget)
    assert model.short_term_threshold == int(len(decoder.layers) * SHALLOW)
    assert model.long_term_threshold == case.deep_from
    chosen, prune = [], model.prune_kv_cache_by_attention

    def kept(*attention, **how):
        chosen[:], more = prune(*attention, **how)
        return list(chosen), more

    model.prune_kv_cache_by_attention = kept
    model.encode_init_prompt()
    prefix, seen, found = model.visual_start_idx, 0, []
    rows = [[] for _ in decoder.layers]
    for number, chunk in enumerate(torch.from_numpy(case.features())):
        model.encode_video_chunk(chunk)
        come = chunk.shape[0] * PER_FRAME
        rows = [[*layer, *range(seen, seen + come)] for layer in rows]
        seen += come
        if len(rows[0]) > case.budget:
            model.predict_and_compress()
            rows = [[layer[i - prefix] for i in keep[prefix:]] for layer, keep in zip(rows, chosen, strict=True)]
            deep = model.kv_cache[case.deep_from :]
            for layer in rows[case.deep_from :]:
                layer.append(-1 - len(found))
            summaries = torch.stack([torch.stack([part[0, :, -1] for part in layer]) for layer in deep])
            found.append((np.array(rows, np.int16), summaries.numpy(), tokenizer.texts[-3:]))
            assert len({tuple(places.tolist()) for places in model._position_ids_cache}) == 1
        if number + 1 == case.chunks // 2 and case.turn:
            model.conv_history.append((*case.turn, None))
    return dict(zip(("rows", "summaries", "prompts"), map(np.array, zip(*found, strict=True)), strict=True))


def check_choices():
    """See to it that no choice of the program hangs on rounding."""
    import torch

    topk = torch.topk

    def checked(score, count, **how):
        best = score.sort(descending=True)[0]
        assert count in (0, len(best)) or best[count - 1] - best[count] > NEAREST, "give the case another seed"
        return topk(score, count, **how)

    torch.topk = checked


if __name__ == "__main__":
    check_choices()
    its = program(sys.argv[1])
    parts = {f"{name}: {part}": rows for name, case in CASES.items() for part, rows in recorded(its, case).items()}
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **parts)
