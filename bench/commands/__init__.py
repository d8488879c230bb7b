"""The commands of ``edgevlm bench``, as they are typed: options, and what runs them. One line each in the registry."""

from __future__ import annotations

from edgevlm.bench.commands.accuracy import accuracy
from edgevlm.bench.commands.all import all as every
from edgevlm.bench.commands.beside import decode, prefill, vision
from edgevlm.bench.commands.camera import camera
from edgevlm.bench.commands.checkpoint import checkpoint
from edgevlm.bench.commands.compare import compare
from edgevlm.bench.commands.compression import compression
from edgevlm.bench.commands.cut import cut
from edgevlm.bench.commands.kv_precision import kv_precision
from edgevlm.bench.commands.precision import precision
from edgevlm.bench.commands.prefill_pattern import prefill_pattern
from edgevlm.bench.commands.report import report
from edgevlm.bench.commands.retrieval import retrieval
from edgevlm.bench.commands.share import share
from edgevlm.bench.commands.snapshot import snapshot
from edgevlm.bench.commands.store import store
from edgevlm.bench.commands.vrex import vrex
from edgevlm.bench.longrun.command import longrun
from edgevlm.bench.stream.command import stream

COMMANDS = (  # in the order of --help
    decode,
    prefill,
    vision,
    compression,
    prefill_pattern,
    cut,
    share,
    camera,
    retrieval,
    snapshot,
    store,
    accuracy,
    precision,
    kv_precision,
    stream,
    longrun,
    vrex,
    checkpoint,
    every,
    report,
    compare,
)
