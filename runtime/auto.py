"""The policy ``auto``: the one that ``edgevlm calibrate`` found best on this model."""

from __future__ import annotations

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import Choice, Choices
from edgevlm.runtime.policies import Policy, create_policy, evicting

AUTO = "auto"
FALLBACK = "infinipot-v"  # of a model on which no policy was measured to be better
FAR = 2.0  # budgets whose ratio is more are far apart


def check_policy(text: str) -> None:
    """Raise UserError if ``text`` names no policy; whether ``auto`` does is known with the model."""
    if text.startswith(f"{AUTO}:"):
        raise UserError(f"policy {text}: auto takes no settings; a setting goes with the policy's own name")
    if text != AUTO:
        create_policy(text)


def chosen_policy(bundle: Bundle, budget: int) -> tuple[Policy, str]:
    """What ``auto`` is for this model at a budget of |M| tokens, and why, in one line.

    The choice at the nearest measured budget; FALLBACK where there is none, where no policy is clearly better than it, or where
    what was chosen is not installed. Raises BundleError for choices that cannot be used.
    """
    choices = bundle.choices()
    again = f"edgevlm calibrate {bundle.path}"
    if not choices:
        return create_policy(FALLBACK), f"auto: {FALLBACK}, as the policies were not compared on this model ({again})"
    choice = choices.nearest(budget)
    if choice.chosen is None:
        return create_policy(FALLBACK), f"auto: {describe(choices, choice, budget, again)}{_newer(choices, again)}"
    try:
        policy = create_policy(choice.chosen)
    except UserError:
        gone = f"{choice.chosen}, chosen at budget {choice.budget}, is not installed"
        return create_policy(FALLBACK), f"auto: {FALLBACK}, as {gone}; compare again ({again})"
    return policy, f"auto: chose {describe(choices, choice, budget, again)}{_newer(choices, again)}"


def describe(choices: Choices, choice: Choice, budget: int, again: str = "edgevlm calibrate") -> str:
    """The policy that runs, by which numbers, and at which budget where that is not ``budget``; a warning where it is far."""
    best = choice.best
    at = f"at budget {choice.budget}" + ("" if choice.budget == budget else f", the measured budget nearest to {budget}")
    if budget > FAR * choice.budget or choice.budget > FAR * budget:
        at += f", which is far from it; compare there ({again} --budget {budget})"
    if best is None:
        return f"{FALLBACK}, as no policy was clearly better {at}"
    if choices.measure == "kl":
        numbers = f"KL from full KV {best.value:.3f} nats [{best.ci_low:.3f}, {best.ci_high:.3f}]"
    else:
        value, low, high = (100 * fraction for fraction in (best.value, best.ci_low, best.ci_high))
        numbers = f"{value:.1f} % of the demo's questions right [{low:.1f}, {high:.1f}]"
    return f"{best.policy} ({numbers}) {at}"


def _newer(choices: Choices, again: str) -> str:
    newer = [name for name in evicting() if name not in choices.known]
    return f"; not compared: {', '.join(newer)}, newer than that ({again})" if newer else ""
