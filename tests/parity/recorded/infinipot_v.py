"""Record what InfiniPot-V's own program keeps: ``python tests/parity/recorded/infinipot_v.py CLONE`` writes infinipot_v.npz.

CLONE: a clone of github.com/aiha-lab/InfiniPot-V, whose ``process_kv_cache`` runs here as it is, on random keys and values,
block by block as its ``_block_wise_prefill`` calls it. Needs torch and git; the tests need neither, nor the clone.
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

REVISIONS = {"head": "81a4dbe", "first": "2a3b136"}
SYSTEM, HEADS, DIM = 3, 2, 4  # rows before the video, KV heads, head size


class Case:
    """frames: of a block; kept: after a compression; step: frames between two compressions."""

    def __init__(self, official, layers, grid, frames, step, alpha=0.5, recent=0.25, rounds=3):
        self.official, self.layers, self.grid, self.frames, self.step = official, layers, grid, frames, step
        self.alpha, self.recent, self.rounds, self.per_frame = alpha, recent, rounds, grid[0] * grid[1]
        self.kept = frames - step

    def rows(self):
        """Keys and values of the whole stream, the system's rows first: float32 ``[layers, HEADS, n, DIM]`` each."""
        count = SYSTEM + (self.frames + self.step * (self.rounds - 1)) * self.per_frame
        random = np.random.RandomState(1000 * self.layers + count)  # of all generators the one whose numbers never change
        whole = random.randint(-(2**20), 2**20, (2, self.layers, HEADS, count, DIM))
        return (whole / 2**18).astype(np.float32)


CASES = {  # where a window covers a grid whole its tokens are equal, and topk's choice among equals is not defined
    "scripts": Case("head", 6, (3, 4), 8, 2),
    "scripts-alpha": Case("head", 4, (4, 4), 12, 3, alpha=0.8, recent=0.125),
    "value-norms": Case("head", 4, (2, 3), 8, 2, alpha=0.0),
    "pooled": Case("head-pooled", 8, (8, 8), 8, 2),
    "pooled-small-grid": Case("head-pooled", 4, (3, 4), 8, 2),
    "pooled-few-frames": Case("head-pooled", 4, (6, 7), 4, 1),
    "pooled-one-row": Case("head-pooled", 4, (1, 6), 8, 2),
    "first-pooled": Case("first-pooled", 8, (8, 8), 8, 2),
}


def program(clone, revision):
    module = ModuleType(f"kvcache_utils_{revision}")
    source = subprocess.run(
        ["git", "-C", clone, "show", f"{revision}:kvcache_utils.py"], check=True, capture_output=True
    ).stdout
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module


class Cache:
    """As much of a DynamicCache as the program reads, in the names that transformers had at either revision."""

    def __init__(self, keys, values):
        self.key_cache, self.value_cache = list(keys), list(values)

    @property
    def layers(self):
        return [Layer(self, layer) for layer in range(len(self.key_cache))]

    def get_seq_length(self):
        return self.key_cache[0].shape[2]


class Layer:
    def __init__(self, cache, layer):
        self.__dict__.update(cache=cache, layer=layer)

    def __getattr__(self, name):
        return getattr(self.cache, name.removesuffix("s") + "_cache")[self.layer]

    def __setattr__(self, name, value):
        getattr(self.cache, name.removesuffix("s") + "_cache")[self.layer] = value


def kept_by(module, case):
    """The vision rows that each compression leaves, counted from the stream's start, int16 ``[rounds, layers, HEADS, n]``."""
    import torch

    keys, values = map(torch.from_numpy, case.rows())
    depth = SimpleNamespace(layers=[None] * case.layers)
    config = SimpleNamespace(num_hidden_layers=case.layers, height_width=case.grid[0])
    model = SimpleNamespace(config=config, model=SimpleNamespace(layers=depth.layers, language_model=depth))
    rows, per_frame = [], case.per_frame
    end = SYSTEM + case.frames * per_frame
    cache = Cache(*(part[:, None, :, :end].unbind() for part in (keys, values)))
    how = {"tar_ratio": case.alpha, "query_ratio": case.recent, "adaptive_pooling": "pooled" in case.official}
    how["method"] = "tar_val" if case.official.startswith("first") else "infinipot-v"
    for _ in range(case.rounds):
        module.process_kv_cache(cache, model, SYSTEM, 0, per_frame, case.kept, **how)
        same = [(keys[i, :, None] == cache.key_cache[i][0, :, SYSTEM:, None]).all(-1) for i in range(case.layers)]
        rows.append(np.stack([each.int().argmax(-1) - SYSTEM for each in same]))
        come = slice(end, end + case.step * per_frame)
        for own, new in ((cache.key_cache, keys), (cache.value_cache, values)):
            own[:] = [torch.cat([held, more[None, :, come]], 2) for held, more in zip(own, new, strict=True)]
        end += case.step * per_frame
    return np.stack(rows).astype(np.int16)


if __name__ == "__main__":
    programs = {name: program(sys.argv[1], revision) for name, revision in REVISIONS.items()}
    kept = {name: kept_by(programs[case.official.split("-")[0]], case) for name, case in CASES.items()}
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **kept)
