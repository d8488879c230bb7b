"""Calls of the extension with wrong arguments, made from its signatures in ``runtime/_native.pyi``.

``python tests/fuzz/misuse.py [calls] [seed]`` makes that many calls in a child process and prints how they ended. Nothing may
kill the process, hang, raise anything but CacheError or TypeError, or change memory and then refuse. ``tests/sanitize.sh misuse
[calls] [seed]`` does the same under AddressSanitizer and UBSan, where a read out of bounds kills too.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.errors import CacheError
from edgevlm.runtime import _native

STUB = Path(__file__).resolve().parents[2] / "runtime" / "_native.pyi"
SECONDS = 20  # for one call
MEMORY = 8 << 30  # bytes that the child may map, where no sanitizer needs more

# The shape of each array of a call, in the order of its signature: a letter is a size, and equal letters are equal sizes.
SHAPES = {
    "Cache.__init__": "p p L LHD LHD",
    "Cache._bytes_for": "p p L",
    "Cache._commit": "m m m m m mA",
    "Cache.evict": "Hn",
    "Cache._append": "HmD HmD m m m m m mA",
    "Cache.shift": "HnA",
    "Cache.confirm": "rc",
    "Cache._load": "HmD HmD Hm Hm Hm Hm Hm HmA Hm",
    "value_norms": "HnD HD",
    "dequantize": "HnD HD",
    "pool_norms": "Hn Hn Hn Hn Hn",
    "top_k": "Hn Hn Hn",
    "index_of": "Hn Hm",
    "join": "Hn Hm Hm Hn",
    "newer_similarity": "Hn",
    "coreset": "nD",
    "mosaic_assign": "mD m SD S S S m",
    "newest_frames": "Hn Hn",
    "attention_mass": "QqD q HnD Hn HmD m HD",
    "attend": "mV mW mW HKD HKD H HD HD HK Hm m m HK",
    "infinipot_scores": "Hn Hn",
    "hash_bits": "HnD HDP",
    "hash_join": "HnD HnA HSD HS HS HS HSA HDP",
    "hash_seal": "HnD HnA Hn Hn HSD HS HS HS HSA HDP",
    "wicsum": "QqD HSD HS",
    "levels": "xyz x x",
    "patch_sums": "xyz",
    "patch_distances": "xyz xyz xyz g",
    "RowPart.run": "ze ze zh zh ze zd zd ze",
}
BELOW = {
    "kind": 4,
    "frame": 9,
    "row": 3,
    "col": 3,
    "pair_axis": 1,
    "count": 2,
    "partition": 3,
    "partitions": 3,
    "size": 9,
    "held": 50,
    "previous": 1,
}
NUMBERS = [-1, 0, 1, 3, 7, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**40, True, 1.5, float("nan"), "1", None]
FLOATS = [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e308, 5e-324, 10**400, "x", None]
WORDS = ["", "fp32\0", "fp64", "x" * 10_000, "avx512", "\udcff", None, 3, b"fp16"]
DTYPES = ["f4", "f2", "f8", "i1", "u1", "i2", "i4", "u4", "i8", "?", ">f4", ">i8", "O", "c16", "M8[s]", "S3", "f4,i4"]


class Subclass(np.ndarray):
    """An array of another class."""


def signatures() -> dict[str, list[tuple[str, str]]]:
    """Parameters of every function and method of the extension, ``(name, annotation)``, by its name."""
    found = {}

    def visit(node: ast.FunctionDef, owner: str) -> None:
        if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
            return
        static = not owner or any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
        parameters = [*node.args.args, *node.args.kwonlyargs][0 if static else 1 :]
        found[owner + node.name] = [(each.arg, ast.unparse(each.annotation)) for each in parameters]
        KEYWORDS[owner + node.name] = [each.arg for each in node.args.kwonlyargs]

    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            visit(node, "")
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    visit(method, f"{node.name}.")
    return found


KEYWORDS: dict[str, list[str]] = {}
SIGNATURES = signatures()


class Case:
    """One call: a cache, arguments that fit it, and what was then made wrong with them."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.name = str(random.choice(list(SIGNATURES)))
        draw = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
        self.dtype = str(random.choice(["fp32", "fp16", "int8"]))
        size = {
            "L": 2,
            "H": draw(1, 3),
            "D": 2 * draw(1, 20),
            "A": int(random.choice([1, 3])),
            "m": draw(0, 9),
            "S": draw(4, 9),
        }
        size |= {"r": 3, "c": 3, "x": draw(1, 3), "y": draw(3, 20), "z": draw(3, 40), "q": draw(1, 5), "P": 32, "g": 9}
        size |= {"e": 128, "h": 8, "d": 32}
        self.size = size | {"p": size["D"] // 2, "Q": size["H"] * draw(1, 3), "capacity": draw(1, 40), "K": 60}
        self.size |= {"V": self.size["Q"] * size["D"], "W": size["H"] * size["D"]}
        self.cache = self.make()
        self.size["n"] = min(draw(0, 40), self.size["capacity"])
        if self.size["n"]:
            self.cache.reserve(self.size["n"])
            self.cache._commit(*self.arrays("Cache._commit", self.size | {"m": self.size["n"]}))
        self.size["m"] = min(self.size["m"], self.size["capacity"] - self.size["n"])
        if self.name in ("Cache._commit", "Cache.abort") or random.random() < 0.1:
            self.cache.reserve(self.size["m"])
        self.arguments = self.fitting()
        self.owner = self.part() if self.name == "RowPart.run" else self.cache
        for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
            self.spoil()

    def make(self) -> Any:
        size, scales = self.size, None
        inv_freq = 1 / 1e4 ** (np.arange(size["p"]) / size["p"])
        if self.dtype == "int8":
            scales = np.full((2, size["H"], size["D"]), 0.03, np.float32)
        axis = np.zeros(size["p"], np.uint8)
        shape = [size["capacity"]] * 2, size["H"], size["D"], inv_freq, size["A"], self.dtype, axis
        return _native.Cache(*shape, key_scale=scales, value_scale=scales)

    def layer(self) -> list[Any]:
        """Arguments of a RowPart: 128 columns throughout, 8 heads of 16 on 2."""
        outs, gains = (128, 256, 128, 192), [np.ones(size, np.float32) for size in (128, 128, 16)]
        codes, scales = [self.random.integers(-128, 128, (128, out)).astype(np.int8) for out in outs], [(out,) for out in outs]
        if self.random.random() < 0.5:  # 4 bits
            codes = [self.random.integers(0, 256, (out, 4, 16)).astype(np.uint8) for out in outs]
            scales = [(out, 4) for out in outs]
        biases = [None, *(np.ones(out, np.float32) for out in outs[1:])]
        return [codes, [np.ones(size, np.float32) for size in scales], biases, [*gains, None], 1e-6, 2, 16, 64]

    def part(self) -> Any:
        return _native.RowPart(*self.layer()) if _native.multiplies_codes() else None

    def array(self, name: str, annotation: str, shape: tuple[int, ...]) -> Any:
        dtype = annotation.split("NDArray[numpy.")[1].split("]")[0]
        if dtype == "number":
            dtype = {"fp32": "float32", "fp16": "float16", "int8": "int8"}[self.dtype]
        if np.dtype(dtype).kind == "f":
            return self.random.standard_normal(shape).astype(dtype)
        if name == "seq":
            return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
        below = BELOW.get(name, 2 if dtype == "bool" else 100)
        found = self.random.integers(0, below, shape).astype(dtype)
        if name == "count":
            found[..., -1] = 0
        if name == "until":
            found[...] = len(found)
        if name == "place":
            found.sort()
        if name == "slot":
            found[...] = -1
        return found

    def arrays(self, name: str, size: dict[str, int]) -> list[Any]:
        wanted = [each for each in SIGNATURES[name] if "NDArray" in each[1]]
        shapes = SHAPES[name].split()
        assert len(wanted) == len(shapes), f"SHAPES does not fit the signature of {name}"
        return [
            self.array(of, kind, tuple(size[letter] for letter in shape))
            for (of, kind), shape in zip(wanted, shapes, strict=True)
        ]

    def fitting(self) -> list[Any]:
        """Arguments that are right, or nearly so."""
        if self.name == "RowPart.__init__":
            return self.layer()
        arrays = iter(self.arrays(self.name, self.size)) if self.name in SHAPES else iter(())
        whole = {"kv_heads": "H", "head_dim": "D", "axes": "A", "count": "m"}
        others: dict[str, Any] = {"dtype": self.dtype, "name": "scalar", "rotated": bool(self.random.integers(2))}
        others |= {"capacities": [5, 5], "windows": [3, 5], "thresholds": [], "keep_recent": True, "window": 3}
        others |= {
            "rows": None if self.name == "attend" else 3,
            "columns": 3,
            "small": 0.1,
            "large": 0.5,
            "rate": 10.0,
            "share": 0.4,
            "cache": self.cache,
        }
        others |= {"mark": None if self.name != "Cache.rollback" else self.settled_mark()}
        left_out = {"local", self.pick(["previous", "until"])}  # which do not go with the others
        found = []
        for name, annotation in SIGNATURES[self.name]:
            if "NDArray" in annotation:
                array = next(arrays)
                array = None if name in left_out else array
                if name in ("scale", "key_scale", "value_scale") and self.dtype != "int8":
                    array = None
                found.append([array, array.copy()] if annotation.startswith("collections") else array)
            else:
                found.append(
                    others[name]
                    if name in others
                    else self.size[whole[name]]
                    if name in whole
                    else int(self.random.integers(2))
                )
        return found

    def settled_mark(self) -> Any:
        try:
            return self.cache.mark()
        except CacheError:
            return None

    def spoil(self) -> None:
        """Make one argument wrong, or the cache that is asked."""
        if not self.arguments or self.random.random() < 0.05:
            others = [_native.Cache.__new__(_native.Cache), _native.RowPart.__new__(_native.RowPart), None, 3]
            self.owner = self.pick([*others, self.make()])
            return
        at = int(self.random.integers(len(self.arguments)))
        _, annotation = SIGNATURES[self.name][at]
        value = self.arguments[at]
        if self.random.random() < 0.1:
            value = self.pick([None, [], {}, object(), "x", [[1.0]], 2**70, self.cache, np.float32(1)])
        elif isinstance(value, np.ndarray):
            value = self.spoilt(value)
        elif isinstance(value, list):
            value = self.spoilt_list(value)
        elif annotation == "Cache":
            value = self.pick([_native.Cache.__new__(_native.Cache), None, self.make(), "x"])
        elif annotation == "Mark":
            value = self.pick([_native.Mark.__new__(_native.Mark), self.make().mark(), None])
        elif self.name != "set_threads":
            value = self.pick(FLOATS if annotation == "float" else WORDS if annotation == "str" else NUMBERS)
        self.arguments[at] = value

    def pick(self, among: list[Any]) -> Any:
        return among[int(self.random.integers(len(among)))]

    def spoilt_list(self, value: list[Any]) -> list[Any]:
        if value and isinstance(value[0], np.ndarray):
            changed = [*value[1:], self.pick([None, self.spoilt(value[0]), self.spoilt(value[0]), "x"])]
        else:
            changed = [*value[1:], self.pick([*NUMBERS, *FLOATS])]
        return self.pick([[], changed, changed, value * 2, value[:1]])

    def spoilt(self, array: np.ndarray) -> Any:
        """The array with one thing wrong."""
        random = self.random
        ways: list[Callable[[], Any]] = [
            lambda: array.astype(self.pick(DTYPES[:10])),
            lambda: np.zeros(array.shape, self.pick(DTYPES)),
            lambda: array[..., None],
            lambda: array.reshape(-1),
            lambda: array.T,
            lambda: array[:-1],
            lambda: array[..., :-1],
            lambda: array[:0],
            lambda: array[..., :0],
            lambda: np.repeat(array, 2, -1)[..., ::2],
            lambda: np.repeat(array, 2, -1),
            lambda: array[..., ::-1],
            lambda: array[::-1],
            lambda: np.asfortranarray(array),
            lambda: np.broadcast_to(array[..., :1], array.shape),
            lambda: array.view(Subclass),
            lambda: np.lib.stride_tricks.as_strided(array, writeable=False),
            lambda: np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape),
            lambda: np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape).copy(),
            lambda: self.filled(array),
            lambda: self.filled(array),
            lambda: self.filled(array),
            lambda: self.own(array),
            lambda: self.own(array),
            lambda: self.pick([each for each in self.arguments if isinstance(each, np.ndarray)]),
        ]
        try:
            with np.errstate(all="ignore"):
                return self.pick(ways)()
        except (ValueError, TypeError, IndexError, OverflowError):
            return array

    def filled(self, array: np.ndarray) -> np.ndarray:
        """With numbers at the ends of what its dtype holds, all of them or some."""
        whole = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        ends = [whole.min, whole.max, whole.max - 1, 0, -1 % (whole.max + 1)] if whole else [np.nan, np.inf, -np.inf, 0, 3e38]
        if array.dtype.kind == "b":
            return np.frombuffer(self.random.bytes(array.nbytes), np.bool_).reshape(array.shape).copy()
        changed = array.copy()
        changed[self.random.random(array.shape) < self.random.random()] = self.pick(ends)
        return changed

    def own(self, array: np.ndarray) -> np.ndarray:
        """A view of the cache's memory."""
        if self.random.random() < 0.5:
            views = [
                getattr(self.cache, name)(1) for name in ("key", "value", "kind", "seq", "frame", "row", "col", "position")
            ]
            return self.pick(views)
        first = 64 * int(self.random.integers(max(1, (self.cache.nbytes - array.nbytes) // 64)))
        return self.cache.memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)

    def memory(self) -> list[bytes]:
        kernel = self.cache.nbytes - 4096  # the scratch at the end is anybody's
        arrays = [each.tobytes() for each in self.arguments if isinstance(each, np.ndarray) and each.dtype != object]
        return [self.cache.memory[: max(kernel, 0)].tobytes() if self.name.startswith("Cache.") else b"", *arrays]

    def run(self) -> str:
        """Call it; returns how that ended."""
        before = self.memory()
        owner, _, name = self.name.rpartition(".")
        given, named = self.arguments, KEYWORDS[self.name]
        given, others = given[: len(given) - len(named)], dict(zip(named, given[len(given) - len(named) :], strict=True))
        try:
            if not owner:
                getattr(_native, name)(*given, **others)
            elif name == "__init__":
                getattr(_native, owner)(*self.arguments)
            else:
                getattr(getattr(_native, owner), name)(*([] if name == "_bytes_for" else [self.owner]), *self.arguments)
        except (CacheError, TypeError):
            return "refused" if self.memory() == before else "changed, then refused"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:60]}"
        finally:
            _native.set_threads(2)
        return "done"


def run_cases(first: int, last: int, seed: int, at: int) -> None:
    """In the child: writes which call is under way to the file ``at``, and how each ended to stdout."""
    if "EDGEVLM_SANITIZE" not in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _native.set_threads(2)
    for index in range(first, last):
        os.pwrite(at, index.to_bytes(8, "little"), 0)
        signal.alarm(SECONDS)
        case = Case(np.random.default_rng([seed, index]))
        print(json.dumps([index, case.name, case.run()]), flush=True)
    signal.alarm(0)


def main(calls: int, seed: int) -> Counter[str]:
    """Make the calls; prints each that ended badly, and counts."""
    ends: Counter[str] = Counter()
    first = 0
    with tempfile.TemporaryFile() as at, tempfile.TemporaryFile("w+") as out:
        while first < calls:
            out.truncate(out.seek(0))
            command = [sys.executable, __file__, "--cases", str(first), str(calls), str(seed), str(at.fileno())]
            died = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, pass_fds=[at.fileno()], check=False)
            out.seek(0)
            for line in out.read().splitlines():
                try:
                    index, name, end = json.loads(line)
                except ValueError:
                    continue
                ends[end if end in ("done", "refused") else "wrong"] += 1
                if end not in ("done", "refused"):
                    print(f"{index} {name}: {end}")
            if not died.returncode:
                break
            first = int.from_bytes(os.pread(at.fileno(), 8, 0), "little")
            words = ("runtime error", "SUMMARY", "Error")
            why = next((line[:200] for line in died.stderr.splitlines() if any(word in line for word in words)), "?")
            print(f"{first} {Case(np.random.default_rng([seed, first])).name}: died of {died.returncode}: {why}")
            ends["died"] += 1
            first += 1
    print(
        f"{calls} calls: {ends['refused']} refused, {ends['done']} done, {ends['wrong']} wrong, {ends['died']} died", flush=True
    )
    return ends


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cases"]:
        run_cases(*(int(word) for word in sys.argv[2:]))
    else:
        count, begin = (*(int(word) for word in sys.argv[1:]), *(5000, 0)[len(sys.argv) - 1 :])
        ended = main(count, begin)
        sys.exit(bool(ended["wrong"] or ended["died"]))
