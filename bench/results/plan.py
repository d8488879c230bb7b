"""What ``bench all`` runs: commands, and about how many seconds each takes on two cores of a server."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from edgevlm.apps.credentials import mask_credentials
from edgevlm.errors import UserError


@dataclass(frozen=True, slots=True)
class Planned:
    """``text``: what is typed after ``edgevlm bench``; its first word is the bench."""

    name: str
    text: str
    seconds: float = 120.0

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def bench(self) -> str:
        return self.arguments[0]

    @property
    def command(self) -> str:
        """As one would type it."""
        return mask_credentials(f"edgevlm bench {self.text} --json")


QUICK = (
    Planned("quick-stream", "stream --frames 16,64,256 --seconds '' --chunk 8 --idle 3 --threads 1", 40),
    Planned("quick-share", "share --model demo --frames 128 --threads 1", 20),
    Planned("quick-compression", "compression --policy infinipot-v --dtype fp32 --rounds 3", 30),
    Planned("quick-decode", "decode --model demo --context 300,1184 --precisions fp32,int8 --threads 1 --rounds 9", 45),
    Planned("quick-snapshot", "snapshot --model demo --threads 1", 10),
    Planned("quick-camera", "camera --frames 20 --threads 1 --no-realtime", 10),
    Planned(
        "quick-accuracy",
        "accuracy --suite streamqa --policy infinipot-v,hermes,purekv,last-seen --budget 25%,12.5%,6.25% --streams 4",
        60,
    ),
)
FULL = (
    Planned("stream-demo", "stream --idle 10 --threads 1", 300),
    Planned("stream-0.5b", "stream --model seeded-0.5b --policy full --policy infinipot-v --policy hermes --frames 16,48 "
            "--seconds '' --chunk 8 --questions 3 --threads 2", 600),
    Planned("share", "share --frames 24", 600),
    Planned("compression", "compression", 180),
    Planned("compression-2", "compression --policy infinipot-v --dtype fp32 --threads 2", 20),
    Planned("prefill-pattern", "prefill-pattern", 120),
    Planned("decode-1", "decode --threads 1 --rounds 11", 400),
    Planned("decode-2", "decode --threads 2 --rounds 11", 300),
    Planned("decode-3b", "decode --model seeded-3b --layers 8 --against transformers --kv fp32 --context 300 --rounds 5", 300),
    Planned("decode-3b-int4", "decode --model seeded-3b --precisions int4 --against '' --kv fp32 --rounds 5", 300),
    Planned("prefill", "prefill --rounds 2", 500),
    Planned("vision", "vision --layers 2 --rounds 3", 300),
    Planned("snapshot", "snapshot", 240),
    Planned("camera", "camera --frames 40", 40),
    Planned("accuracy", "accuracy --suite streamqa --policy all --streams 12 --seed test", 500),
)  # fmt: skip


def planned(quick: bool, only: str | None, also: Sequence[str]) -> list[Planned]:
    """The plan. only: benches or entries by name, with commas between them; also: further commands.

    Raises UserError for a name that the plan has not and for a command that is empty.
    """
    plan = [*(QUICK if quick else FULL)]
    if only is not None:
        wanted = [name.strip() for name in only.split(",") if name.strip()]
        known = list(dict.fromkeys(name for entry in plan for name in (entry.bench, entry.name)))
        if not wanted or (unknown := [name for name in wanted if name not in known]):
            raise UserError(f"--only {only}: {unknown[0] if wanted else 'nothing'} is not planned; there is {', '.join(known)}")
        plan = [entry for entry in plan if {entry.bench, entry.name} & set(wanted)]
    for text in also:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--also {text!r}: {error}") from None
        if not words:
            raise UserError("--also: give a command as after edgevlm bench, such as 'decode --model CHECKPOINT'")
        plan.append(Planned(mask_credentials(shlex.join(words)), shlex.join(words)))
    return plan
