"""What policies do with a calibration: windows, layer classes, the CLIE layer; settings override it."""

import numpy as np

from edgevlm.runtime.policies import StreamShape, create_policy


def norms_of(cv, count=2000):
    """Value norms ``[2, n]`` of mean 1 whose coefficient of variation is ``cv``."""
    return np.tile([[1 - cv], [1 + cv]], (1, count)).astype(np.float32)


def windows(text, cvs, calibration=None):
    policy = create_policy(text)
    policy.attach(64, StreamShape(len(cvs), 4, 3, calibration=calibration))
    return [policy._window(layer, norms_of(cv)) for layer, cv in enumerate(cvs)]


def test_the_policy_takes_what_was_measured_unless_it_is_set(made_up):
    cvs, measured = (0.1, 0.2, 0.3, 0.4, 0.5), made_up()
    preset = [7, 7, 5, 3, 1]
    assert windows("infinipot-v", cvs) == preset
    assert windows("infinipot-v", cvs[::-1], measured) == [1, 1, 3, 5, 7]
    assert windows("infinipot-v:tau=preset", cvs[::-1], measured) == preset
    assert windows("infinipot-v:tau=0.01/0.02/0.45", cvs, measured) == [3, 3, 3, 3, 1]


def test_purekv_takes_the_layer_that_was_measured_unless_it_is_set(made_up):
    def probed(text, calibration):
        policy = create_policy(text)
        policy.attach(64, StreamShape(5, 4, 3, calibration=calibration))
        return policy.needs.probe_layers

    measured = made_up(agreement=((None, 0.5, 0.5, 0.5, 0.5),) * 4, clie=3)
    assert probed("purekv", None) == (0, 1, 2)
    assert probed("purekv", measured) == (0, 1, 2, 3)
    assert probed("purekv:clie=1", measured) == (0, 1)
    assert probed("snapkv", measured) == (0, 1, 2, 3, 4), "a booster is asked for"


def hermes(text, calibration=None):
    """The policy, and the class of each layer: 0 shallow, 1 middle, 2 deep."""
    policy = create_policy(text)
    policy.attach(64, StreamShape(5, 4, 3, calibration=calibration))
    return policy, [policy.kind_of(layer) for layer in range(5)]


def test_hermes_takes_the_depths_that_were_measured(made_up):
    measured = made_up(middle_from=2, deep_from=4)
    assert hermes("hermes")[1] == [1, 1, 1, 2, 2]
    assert hermes("hermes", measured)[1] == [0, 0, 1, 1, 2]
    assert hermes("hermes", measured)[0].needs.guidance_layers == (2, 3, 4)
    assert hermes("hermes", made_up(middle_from=5, deep_from=5))[0].needs.guidance == ()
