"""What --policy and --budget say."""

import pytest

from edgevlm.calib.accuracy.variants import Budget, Variant, parse_budgets, parse_variants
from edgevlm.errors import UserError
from edgevlm.runtime.policies import POLICIES


def labels(*texts):
    return [variant.label for variant in parse_variants(list(texts))]


def test_what_is_encoded_and_appended_is_part_of_the_label():
    variant = Variant("hermes:summary=off@eager").under("changed:tau=0.9,refresh=4", "changed:interval=8")
    assert variant.label == "hermes:summary=off@eager@changed:tau=0.9,refresh=4@encode:changed:interval=8"
    assert (variant.policy, variant.reindexing) == ("hermes:summary=off", "eager")
    assert (variant.append, variant.encode) == ("changed:tau=0.9,refresh=4", "changed:interval=8")
    assert variant.on_full_frames == Variant("hermes:summary=off@eager")
    for append, encode in (("all", "auto"), ("auto", "all"), ("changed", "all"), ("all", "changed"), ("all", "all")):
        variant = Variant("uniform").under(append, encode)
        assert (variant.policy, variant.append, variant.encode) == ("uniform", append, encode)
    assert variant == variant.on_full_frames == Variant("uniform")
    encoded = "uniform@encode:changed:interval=8,threshold=5"
    assert labels(f"{encoded},h2o") == [encoded, "h2o"]
    for ways in (("chnaged", "all"), ("all", "chnaged"), ("all", "changed:every=3")):
        with pytest.raises(UserError, match=r"did you mean 'changed'|give changed:interval=64"):
            Variant("uniform").under(*ways)


def test_what_has_no_budget_is_refused(monkeypatch):
    monkeypatch.setitem(POLICIES, "hoard", POLICIES["full"])
    assert labels("full,uniform") == ["uniform"]
    with pytest.raises(UserError, match="--policy hoard: holds whole streams"):
        parse_variants(["uniform,hoard"])


def test_budgets():
    assert parse_budgets("50%,3%,50%,6k") == [Budget("50%", 0.5), Budget("3%", 0.03), Budget("6k", count=6000)]
    assert [budget.tokens(1024) for budget in parse_budgets("12.5%,6.25%,3%,29%,256")] == [128, 64, 30, 296, 256]
    assert Budget("0.7%", 0.7 / 100).tokens(1000) == 7
    for text in ("0%", "101%", "x%", "-1%", "nan%", "0", "many", " , "):
        with pytest.raises(UserError, match="budget"):
            parse_budgets(text)
