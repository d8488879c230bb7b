"""Find a policy by name: edgevlm's own (entry points in pyproject.toml), another package's, or ``./file.py:Class``."""

from __future__ import annotations

from typing import get_type_hints

from edgevlm.errors import UserError, nearest
from edgevlm.runtime.plugins import load_class, names
from edgevlm.runtime.policies.base import (
    Appended,
    Layer,
    Needs,
    Plan,
    Policy,
    StreamShape,
    layers_of,
    parse_settings,
    problem_of,
    setting,
    setting_fields,
)  # fmt: skip
from edgevlm.runtime.policies.layer import Guidance
from edgevlm.runtime.policies.retrieval import Retrieval

POLICIES: dict[str, type[Policy]] = {name: load_class("policies", name) for name in names("policies", own=True)}

__all__ = [
    "POLICIES", "Appended", "Guidance", "Layer", "Needs", "Plan", "Policy", "StreamShape",
    "as_policy", "create_policy", "evicting", "find_policy", "layers_of", "setting", "setting_fields",
]  # fmt: skip


def evicting() -> list[str]:
    """Return the names of edgevlm's policies that evict rows and need no store."""
    return [name for name, policy in POLICIES.items() if policy.bounded and not issubclass(policy, Retrieval)]


def find_policy(name: str) -> type[Policy]:
    """Return a policy's class. ``name``: a policy of edgevlm, an entry point in ``edgevlm.policies``, or ``./file.py:Class``.

    Raises UserError for a class that is not a policy. For an unknown name, the UserError suggests a similar one.
    """
    found = POLICIES.get(name) or load_class("policies", name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UserError(f"policy {name}: {getattr(found, '__name__', found)} is not a subclass of edgevlm.extend.Policy")
    if problem := problem_of(found):
        raise UserError(f"policy {name}: {problem}")
    return found


def create_policy(text: str) -> Policy:
    """Create a policy from ``name`` or ``name:setting=value,...``. Raises UserError for an unknown name, setting or value."""
    from pydantic import TypeAdapter  # slow to import

    name, settings = parse_settings(text)
    policy = find_policy(name)
    defaults = {each.name: each.default for each in setting_fields(policy)}
    hints = get_type_hints(policy)
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in defaults:
            raise UserError(f"policy {name} has no setting {key!r}; {nearest(key, list(defaults))}")
        try:
            values[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValueError:
            raise UserError(f"policy {name}: invalid value {value!r} for {key} (default {defaults[key]})") from None
    try:
        return policy(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"policy {name}: {error}") from None


def as_policy(policy: str | Policy | type[Policy]) -> Policy:
    """Return a policy from its name, its class or an instance. Raises UserError for anything else."""
    if isinstance(policy, str):
        return create_policy(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        try:
            return policy()
        except (TypeError, ValueError) as error:  # the class is abstract, or a setting has no default
            raise UserError(f"policy {policy.__name__}: {error}; pass an instance") from None
    if not isinstance(policy, Policy):
        raise UserError(f"policy must be a name, a subclass of Policy or an instance of one, not {policy!r}")
    return policy
