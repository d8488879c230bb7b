"""A session's settings as typed: one line of UserError that names the field, whatever was given."""

import pytest

from edgevlm.errors import UserError
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.settings import EncodeChanged, SessionSettings, parse_append, parse_encode


def test_typed_values_are_read():
    settings = SessionSettings.checked(budget="1.5k", store_bytes="8G", host_bytes=1 << 20, append="changed:tau=.9")
    assert (settings.budget, settings.store_bytes, settings.host_bytes) == (1500, 8 * 10**9, 1 << 20)
    assert parse_append(settings.append) == ("changed", 0.9, 0, 1)
    assert parse_encode("changed:interval=8") == ("changed", EncodeChanged(8))
    assert SessionSettings.checked(settings, chunk=2).budget == 1500


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("polcy", "full", "no setting 'polcy'; did you mean 'policy'"),
        ("policy", "hermez", "did you mean 'hermes'"), ("policy", "auto:x=1", "auto has no settings"),
        ("policy", 3, "policy must be a name"), ("budget", "half", "give a number of tokens"), ("budget", 1.5, "^budget: "),
        ("chunk", 0, "^chunk: "), ("chunk", True, "^chunk: "), ("reindexing", "never", "^reindexing: "),
        ("append", "changed:tau=2", "tau must be above 0"), ("append", "chanced", "did you mean 'changed'"),
        ("append", "all:tau=1", "all has no settings"), ("encode", "changed:interval=1.5", "interval must be an integer"),
        ("encode", "changed:treshold=1", "give changed:interval=64,threshold=6"), ("host_bytes", "lots", "^host_bytes: "),
    ],
)  # fmt: skip
def test_wrong_values_are_one_line(field, value, says):
    with pytest.raises(UserError, match=says) as caught:
        SessionSettings.checked(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv:window=0", "window must be at least 1, not 0"), ("streaming-llm:sink=1", "did you mean 'sinks'"),
        ("uniform:target=0", "target must be above 0 and at most 1"), ("mosaic:tight=2", "policy mosaic: "),
    ],
)  # fmt: skip
def test_wrong_settings_of_policies_are_named(text, says):
    with pytest.raises(UserError, match=says):
        create_policy(text)
