"""Evidence heads: the shipped demo's are found again, and the rule separates what is held from what is gone."""

import numpy as np
import pytest
from train_demo.evidence import select_evidence, with_rule

from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.model import Model


def test_the_demos_heads_are_found_again():
    model = Model.load("demo", threads=1)
    found, shipped = select_evidence(model, 1), model.bundle.evidence_heads()
    model.close()
    assert (found.layer, found.heads) == (shipped.layer, shipped.heads)
    assert found.weights


def test_the_rule_separates_what_is_held_from_what_is_gone() -> None:
    rng = np.random.default_rng(0)
    held = np.arange(400) % 3 > 0
    features = np.c_[rng.normal(20 + 15 * held, 3), rng.normal(0, 3, (400, 5))]
    rule = with_rule(EvidenceHeads(0, (0,)), features, held)
    said = features @ rule.weights + rule.bias > 0
    assert said[held].mean() == pytest.approx(0.95, abs=0.01)
    assert said[~held].mean() < 0.1
    assert not with_rule(EvidenceHeads(0, (0,)), features, np.ones(400, bool)).weights
