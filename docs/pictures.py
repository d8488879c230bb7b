"""Draw the pictures of the documents from real runs: ``python docs/pictures.py`` writes docs/assets/*.svg."""

from __future__ import annotations

import json
import os
import sys
import time
from html import escape
from itertools import groupby
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import pexpect
import pyte
from matplotlib.ticker import PercentFormatter

from edgevlm import Session
from edgevlm.bench.results.journal import read_runs
from edgevlm.calib.demo.world import World

ASSETS = Path(__file__).parent / "assets"
FRAMES, BUDGET, PATCHES = 112, 224, 16
SHOWN = ("full", "sliding-window", "infinipot-v", "last-seen")


def held(policy: str) -> np.ndarray:
    """The patches that a demo stream still holds at its end, by frame: share of heads and layers, ``[PATCHES, FRAMES]``."""
    budget = FRAMES * PATCHES if policy == "full" else BUDGET
    with Session.open("demo", policy=policy, budget=budget) as session:
        world = World(seed=3)
        for number in range(FRAMES):
            session.watch(world.step(), number / 2)
        session.flush()
        kept, cache = np.zeros((PATCHES, FRAMES)), session.cache
        for layer in range(cache.layers):
            vision = cache.kind(layer) == 1
            patch = cache.row(layer) * 4 + cache.col(layer)
            np.add.at(kept, (patch[vision], cache.frame(layer)[vision]), 1 / (cache.layers * cache.kv_heads))
    return kept


def memory() -> None:
    """Draw what four policies hold of the same stream."""
    figure, rows = plt.subplots(len(SHOWN), 1, figsize=(9, 5), sharex=True, constrained_layout=True)
    for axis, policy in zip(rows, SHOWN, strict=True):
        kept = held(policy)
        axis.imshow(kept, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        tokens = "every token" if policy == "full" else f"{BUDGET} of {FRAMES * PATCHES:,} tokens a layer"
        axis.set_title(f"{policy}: {tokens}", loc="left", fontsize=10)
        axis.set_yticks([])
        axis.set_ylabel("patches", fontsize=8)
    rows[-1].set_xlabel("frames, oldest to newest")
    figure.savefig(ASSETS / "memory.svg", metadata={"Date": None})


def soak() -> None:
    """Draw a server's memory over a long stream, from the lines that tests/soak.py wrote to docs/soak.jsonl."""
    lines = [json.loads(line) for line in Path(__file__).with_name("soak.jsonl").read_text().splitlines()]
    shown = {
        "resident memory, MB": lambda of: [line["rss_bytes"] / 1e6 for line in of],
        "file descriptors": lambda of: [line["descriptors"] for line in of],
        "threads": lambda of: [line["threads"] for line in of],
        "ms to the first token, median": lambda of: [line["ttft_ms_p50"] for line in of],
        "answers about now right, until then": lambda of: (
            np.cumsum([x["right"] for x in of]) / np.cumsum([x["now"] for x in of])
        ),
    }
    figure, rows = plt.subplots(len(shown), 1, figsize=(9, 8), sharex=True, constrained_layout=True)
    for axis, (name, values) in zip(rows, shown.items(), strict=True):
        for policy in sorted({line["policy"] for line in lines}):
            of = [line for line in lines if line["policy"] == policy]
            axis.plot([line["frames"] for line in of], values(of), label=policy)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    rows[0].legend(loc="lower right")
    rows[-1].set_xlabel("frames")
    figure.savefig(ASSETS / "soak.svg", metadata={"Date": None})


def requests() -> None:
    """Draw a server's memory while a paused camera is asked, from the lines that tests/soak.py wrote to docs/requests.jsonl."""
    lines = [json.loads(line) for line in Path(__file__).with_name("requests.jsonl").read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(9, 3), constrained_layout=True)
    for kind, what in (("questions", "questions"), ("memory", "GETs of /memory")):
        of = [line for line in lines if line["kind"] == kind]
        axis.plot([line["requests"] for line in of], [line["rss_bytes"] / 1e6 for line in of], label=what)
    axis.set_title("resident memory, MB", loc="left", fontsize=10)
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.set_xlabel("requests")
    axis.legend(loc="lower right")
    figure.savefig(ASSETS / "requests.svg", metadata={"Date": None})


def cluster() -> None:
    """Simulated months of clusters, day by day, from docs/results.jsonl: for each size the newest one."""
    days = {}
    for run in read_runs([Path(__file__).with_name("results.jsonl")]):
        for entry in run.entries.values():
            of = [line for line in entry.lines if line["bench"] == "cluster-day"]
            days |= {(of[0]["nodes"], of[0]["cameras"]): of} if of else {}
    shown = {
        "not watched, of the cameras' time": lambda line: 1 - line["availability"],
        "moves of a camera": lambda line: line["moves"] / line["cameras"],
        "seconds until watched again, median and 99 %": lambda line: [
            line[f"recover_s_p{part}"] or np.nan for part in (50, 99)
        ],
    }
    figure, rows = plt.subplots(len(shown), 1, figsize=(9, 6), sharex=True, constrained_layout=True)
    for axis, (name, value) in zip(rows, shown.items(), strict=True):
        for (nodes, cameras), of in sorted(days.items()):
            values = np.array([value(line) for line in of]).reshape(len(of), -1).T
            (drawn,) = axis.plot([line["day"] for line in of], values[0], label=f"{nodes:,} nodes, {cameras:,} cameras")
            for more in values[1:]:
                axis.plot([line["day"] for line in of], more, color=drawn.get_color(), linestyle="--")
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
    rows[0].legend(loc="upper right")
    rows[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=3))
    rows[-1].set_xlabel("day")
    figure.savefig(ASSETS / "cluster.svg", metadata={"Date": None})


def terminal(columns: int = 100, rows: int = 26) -> None:
    """The demo at a terminal of this size, after a question, cell by cell."""
    screen = pyte.Screen(columns, rows)
    stream, known = pyte.Stream(screen), {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONIOENCODING": "utf-8"}
    child = pexpect.spawn(
        sys.executable, ["-m", "edgevlm", "run"], env=os.environ | known, dimensions=(rows, columns), encoding="utf-8"
    )
    screen.write_process_input = child.send

    def read(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                stream.feed(child.read_nonblocking(65536, timeout=0.2))
            except pexpect.TIMEOUT:
                continue

    read(25)
    for question in ("how many objects are there now?", "which shape came first?"):
        child.send(f"{question}\r")
        read(2)
    child.close(force=True)
    colors = {"default": "#ddd", "brightblack": "#888", "cyan": "#3bb", "green": "#4b4", "red": "#d55", "brown": "#cb5"}
    wide, high, lines = 8.4, 17, []
    for row in range(rows):
        cells = [screen.buffer[row][column] for column in range(columns)]
        left = 0
        for (fg, bg, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold)):
            text = "".join(cell.data for cell in run)
            at = f'x="{left * wide:.1f}" y="{row * high}"'
            if bg != "default":
                lines.append(f'<rect {at} width="{len(text) * wide:.1f}" height="{high}" fill="{colors.get(bg, f"#{bg}")}"/>')
            fill = colors.get(fg, f"#{fg}")
            if set(text) == {"▀"}:
                lines.append(f'<rect {at} width="{len(text) * wide:.1f}" height="{high / 2}" fill="{fill}"/>')
            elif text.strip():
                style = ' font-weight="bold"' if bold else ""
                at = f'x="{left * wide:.1f}" y="{row * high + 13}" textLength="{len(text) * wide:.1f}"'
                lines.append(f'<text {at} fill="{fill}"{style} xml:space="preserve">{escape(text)}</text>')
            left += len(text)
    size = f'viewBox="-8 -8 {columns * wide + 16:.0f} {rows * high + 16}" font-family="monospace" font-size="14"'
    back = f'<rect x="-8" y="-8" width="{columns * wide + 16:.0f}" height="{rows * high + 16}" fill="#181818"/>'
    drawn = "\n".join(lines)
    (ASSETS / "terminal.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{back}\n{drawn}\n</svg>\n')


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    terminal()
    memory()
    soak()
    requests()
    cluster()
