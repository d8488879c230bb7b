"""The policy ``auto``: the one that ``edgevlm calibrate`` found best on this model."""

from __future__ import annotations

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.choices import Choice, Choices
from edgevlm.runtime.policies import Policy, create_policy, evicting

AUTO = "auto"
FALLBACK = "infinipot-v"  # of a model on which the policies were not measured


def check_policy(text: str) -> None:
    """Raise UserError if ``text`` names no policy; whether ``auto`` does is known with the model."""
    if text.startswith(f"{AUTO}:"):
        raise UserError(f"policy {text}: auto takes no settings; a setting goes with the policy's own name")
    if text != AUTO:
        create_policy(text)


def chosen_policy(bundle: Bundle, budget: int) -> tuple[Policy, str]:
    """What ``auto`` is for this model at a budget of |M| tokens, and why, in one line.

    The choice at the nearest measured budget; FALLBACK where there is none, or where what was chosen is not installed. Raises
    BundleError for choices that cannot be used.
    """
    choices = bundle.choices()
    again = f"edgevlm calibrate {bundle.path}"
    if not choices:
        return create_policy(FALLBACK), f"auto: {FALLBACK}, as the policies were not compared on this model ({again})"
    choice = choices.nearest(budget)
    try:
        policy = create_policy(choice.chosen)
    except UserError:
        gone = f"{choice.chosen}, chosen at budget {choice.budget}, is not installed"
        return create_policy(FALLBACK), f"auto: {FALLBACK}, as {gone}; compare again ({again})"
    return policy, f"auto: chose {describe(choices, choice, budget)}{_newer(choices, again)}"


def describe(choices: Choices, choice: Choice, budget: int) -> str:
    """The policy chosen, by which numbers, and at which budget where that is not ``budget``."""
    best = choice.best
    unit = " nats" if choices.measure == "kl" else ""
    numbers = f"{choices.measure} {best.value:.3f}{unit} [{best.ci_low:.3f}, {best.ci_high:.3f}]"
    nearest = "" if choice.budget == budget else f", the measured budget nearest to {budget}"
    return f"{choice.chosen} ({numbers}) at budget {choice.budget}{nearest}"


def _newer(choices: Choices, again: str) -> str:
    newer = [name for name in evicting() if name not in choices.known]
    return f"; not compared: {', '.join(newer)}, newer than that ({again})" if newer else ""
