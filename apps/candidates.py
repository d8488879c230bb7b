"""The policies that ``edgevlm calibrate`` compares: which, at which budgets, by which measure, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.apps.run.launch import parse_count
from edgevlm.bench.accuracy.desk import Settings
from edgevlm.bench.accuracy.entries import Budget, parse_budgets, parse_entries
from edgevlm.bench.accuracy.report import answers
from edgevlm.bench.accuracy.run import compare
from edgevlm.calib import Clip
from edgevlm.calib.agree import compare_by_agreement
from edgevlm.calib.choose import Contest, Measured, candidate, choose
from edgevlm.calib.fidelity import PLAIN, QUESTIONS, Fidelity
from edgevlm.calib.intervals import share
from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO, describe
from edgevlm.runtime.budget import TextRoom, default_budget, text_room
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.choices import Choice, Choices, Measure
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy, evicting

SEED = "11"  # of the demo's streams, among those for development
STREAM = 64  # frames of each
LOW = "12.5%"  # of a clip: the budget that is compared beside the usual one

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare, as typed. measure: None is ``streamqa`` where the model is the demo's, else ``agreement``."""

    policies: str = "all"
    budget: str | None = None
    measure: str | None = None
    ask: tuple[str, ...] = ()
    streams: int = 24

    @property
    def wanted(self) -> bool:
        return self.policies != "none"

    def names(self) -> list[str]:
        """The candidates. Raises UserError for what is no policy with a budget."""
        if self.policies == "all":
            return bounded()
        entries = parse_entries([self.policies])[0]
        if not entries or any(entry.is_oracle or entry.label == AUTO or "@" in entry.label for entry in entries):
            raise UserError(f"--policies {self.policies}: name policies that have a budget, parted by commas, or all, or none")
        return [entry.label for entry in entries]

    def budgets(self) -> list[Budget | int]:
        """Shares of a clip and numbers of tokens, as typed; none where nothing was. Raises UserError."""
        parts = filter(None, (part.strip() for part in (self.budget or "").split(",")))
        return [parse_budgets(part)[0] if part.endswith("%") else parse_count(part) for part in parts]

    def check(self) -> None:
        """Raise UserError, before anything is measured, for what is typed wrong."""
        if self.wanted:
            self.names()
            self.budgets()

    def by(self, model: Model) -> Measure:
        return "streamqa" if (self.measure or ("streamqa" if model.is_demo else "agreement")) == "streamqa" else "kl"


def bounded() -> list[str]:
    """The policies there are that compress."""
    return evicting()


@dataclass(frozen=True, slots=True)
class Given:
    """What there is to compare policies with.

    frames: of a stream or clip, None for STREAM, or for as many as the budgets ask for. folder: keeps what is measured, and
    what it has is not measured again.
    """

    model: Model
    clips: Sequence[Clip]
    frames: int | None
    folder: Path
    progress: Progress
    note: Note


def choose_policies(comparison: Comparison, given: Given) -> Choices:
    """Measure every candidate at every budget, and choose one at each. Raises UserError."""
    by = comparison.by(given.model)
    frames, contests = (_by_questions if by == "streamqa" else _by_agreement)(comparison, given)
    worlds = (f"{comparison.streams} demo worlds, seed {SEED}",)
    return Choices(
        edgevlm=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        measure=by,
        watched=worlds if by == "streamqa" else tuple(clip.name for clip in given.clips),
        frames=frames,
        known=tuple(bounded()),
        budgets=tuple(_choices(contests, given.note)),
    )


def _choices(contests: dict[int, Contest], note: Note) -> Iterator[Choice]:
    """A choice at each budget that one of the policies can run at, rising. Raises UserError where there is none."""
    for budget, contest in sorted(contests.items()):
        if contest.measured:
            candidates = tuple(of.candidate for of in contest.measured)
            yield Choice(budget, choose(contest.measured), candidates, tuple(contest.skipped))
            continue
        reasons = "; ".join(f"{policy}: {why}" for policy, why in contest.skipped)
        said = f"budget {budget}: none of the policies can run at it ({reasons})"
        if not any(other.measured for other in contests.values()):
            raise UserError(f"{said}; give a larger --budget")
        note(said)


def usual_budget(model: Model) -> int:
    """|M| of a session of which no budget is asked."""
    room, prefix = TextRoom.fitting(model.bundle.limit), model.encode(Chat(model.bundle.chat).prefix)
    most = model.bundle.limit - len(prefix) - text_room(model, room)
    return default_budget(model, create_policy(PLAIN), most)


def budgets_of(comparison: Comparison, given: Given, whole: int) -> list[int]:
    """|M| of each budget, rising; ``whole``: the tokens of a clip.

    Nothing typed: the usual one, and LOW where that is a frame or more. Under a budget that holds a whole clip all policies are
    alike: raises UserError where it was typed, and leaves it out otherwise.
    """
    typed = comparison.budgets()
    wanted = typed or [usual_budget(given.model), *parse_budgets(LOW)]
    tokens = sorted({budget if isinstance(budget, int) else budget.tokens(whole) for budget in wanted})
    least = 1 if typed else given.model.bundle.vision.tokens_per_frame
    left = [budget for budget in tokens if least <= budget < whole]
    if typed and left != tokens:
        raise UserError(f"--budget {comparison.budget}: must lie within a clip's {whole} tokens; give less, like {LOW}")
    if not left:
        raise UserError(f"{whole} tokens, the shortest clip, tell no policies apart; give longer clips, or --policies none")
    for budget in (budget for budget in tokens if budget >= whole):
        given.note(f"the usual budget, {budget} tokens, holds a whole clip, {whole} tokens, and is not compared")
    return left


def _by_questions(comparison: Comparison, given: Given) -> tuple[int, dict[int, Contest]]:
    """The streamqa suite, on development seeds; by its questions of the kinds that full KV answers."""
    model, frames = given.model, given.frames or STREAM
    whole = frames * model.bundle.vision.tokens_per_frame
    budgets = budgets_of(comparison, given, whole)

    def progress(what: str, done: int, total: int) -> None:
        given.progress(f"comparing policies: {what}, {done} of {total}")

    outcome = compare(
        Settings(str(model.bundle.path), frames, SEED),
        parse_entries([",".join(comparison.names())])[0],
        [Budget(str(budget), budget / whole) for budget in budgets],
        comparison.streams,
        out=given.folder / "streamqa.jsonl",
        resume=True,
        model=model,
        progress=progress,
    )
    contests = {budget: Contest() for budget in budgets}
    for skip in outcome.skipped:
        contests[int(skip.budget)].skipped.append((skip.label, skip.reason))
    for cell in outcome.cells[1:]:
        right = answers(outcome, cell)
        if not any(right):
            raise UserError("full KV answers too few of the demo world's questions; give --measure agreement")
        measured = Measured(candidate(cell.label, outcome.records[cell], share(right)), right)
        contests[int(cell.budget)].measured.append(measured)
    return frames, contests


def _by_agreement(comparison: Comparison, given: Given) -> tuple[int, dict[int, Contest]]:
    """Agreement with full KV's next tokens, on so many frames of each clip as the shortest has."""
    fidelity = Fidelity(given.model, comparison.ask or QUESTIONS)
    longest, limit = fidelity.longest()
    tokens = [budget for budget in comparison.budgets() if isinstance(budget, int)] or [usual_budget(given.model)]
    wanted = given.frames or 2 * max(tokens) // fidelity.per_frame
    if wanted > longest:
        given.note(f"full KV can hold {longest} frames ({limit}): so many of a clip are compared, not {wanted}")
    given.progress("counting frames")
    frames = min(sum(1 for _ in islice(clip.frames, min(wanted, longest))) for clip in given.clips)
    budgets = budgets_of(comparison, given, frames * fidelity.per_frame)
    contests = compare_by_agreement(
        fidelity, given.clips, frames, comparison.names(), budgets, given.folder / f"kl-{frames}.jsonl",
        lambda what: given.progress(f"comparing policies: {what}"),
    )  # fmt: skip
    return frames, contests


def lines(choices: Choices) -> Iterator[dict[str, Any]]:
    """The objects of ``--json``: one a policy and budget, then what was chosen there."""
    for choice in choices.budgets:
        for of in choice.candidates:
            fields = {name: value for name, value in asdict(of).items() if value is not None}
            yield {"calibrate": "policy", "budget": choice.budget, "measure": choices.measure, **fields}
        for policy, why in choice.skipped:
            yield {"calibrate": "skipped", "budget": choice.budget, "policy": policy, "reason": why}
        yield {"calibrate": "choice", "budget": choice.budget, "measure": choices.measure, "policy": choice.chosen}


def table(choices: Choices) -> Iterator[str]:
    """A line a policy, best first, and what was chosen; a table a budget."""
    sign, unit = (1, "nats") if choices.measure == "kl" else (-1, "right")
    watched = ", ".join(choices.watched)
    yield f"policies at equal bytes, {choices.frames} frames of {watched}; {choices.measure} in {unit} [95 %]"
    for choice in choices.budgets:
        width = max(len(of.policy) for of in choice.candidates) + 2
        top1 = f"{'top-1':>8}" if choices.measure == "kl" else ""
        heads = f"{'tokens':>6}  {choices.measure:<24}{top1}{'compress ms':>13}{'bytes':>12}"
        yield f"\nbudget {choice.budget:<{width - 7}} {heads}"
        for of in sorted(choice.candidates, key=lambda of: sign * of.value):
            value = f"{of.value:.3f} [{of.ci_low:.3f}, {of.ci_high:.3f}]"
            same = "" if of.top1 is None else f"{of.top1:>8.3f}"
            yield f"{of.policy:<{width}} {of.tokens:>6}  {value:<24}{same}{of.compress_ms:>13.1f}{of.bytes:>12}"
        yield from (f"skipped: {policy}: {why}" for policy, why in choice.skipped)
        best = min(choice.candidates, key=lambda of: sign * of.value).policy
        level = "" if best == choice.chosen else f", which cannot be told from {best} and compresses in less time"
        yield f"auto: {describe(choices, choice, choice.budget)}{level}"
