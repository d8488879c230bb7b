"""Define ``edgevlm bench``. The module of a command is imported only when the command runs."""

from __future__ import annotations

from edgevlm.apps.commands.lazy import lazy_app

COMMANDS = {  # --help lists the commands in this order
    "speed": ("edgevlm.bench.commands.measure:speed", "Time decode, prefill, vision and precisions."),
    "compression": ("edgevlm.bench.commands.measure:compression", "Compare compression with a plain read."),
    "stream": ("edgevlm.bench.commands.measure:stream", "Measure a growing stream: speed, memory, energy."),
    "memory": ("edgevlm.bench.commands.measure:memory", "Measure long runs, snapshots and the store."),
    "accuracy": ("edgevlm.bench.commands.accuracy:accuracy", "Compare what policies remember."),
    "camera": ("edgevlm.bench.commands.measure:camera", "Time a frame from camera to answer."),
    "serve": ("edgevlm.bench.commands.measure:serve", "Time serve's cameras, together and apart."),
    "watch": ("edgevlm.bench.commands.measure:watch", "Measure how well watches open, and their cost."),
    "power": ("edgevlm.apps.commands.machine:power", "Show the power this machine draws."),
    "vrex": ("edgevlm.bench.commands.measure:vrex", "Model V-Rex and compare it with its paper."),
    "all": ("edgevlm.bench.commands.results:all_benches", "Run the benchmarks and save their results."),
    "report": ("edgevlm.bench.commands.results:report", "Report or compare results."),
}

app = lazy_app(COMMANDS, help="Measure speed, memory and accuracy.")
