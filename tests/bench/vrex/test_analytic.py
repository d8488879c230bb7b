"""V-Rex's analytic model beside numbers worked out by hand."""

import pytest

from edgevlm.bench.vrex.analytic import Analytic, Constants, Work
from edgevlm.bench.vrex.calibrated import calibrate
from edgevlm.bench.vrex.paper import Decoder, Hardware, Method, Paper, System, Tower, Workload, load_paper
from edgevlm.bench.vrex.predict import QUANTITIES, middle_error, predict, predictions, room

SMALL = Paper(
    llm=Decoder(2, 4, 8, heads=2, kv_heads=1, head_dim=2, vocab=10, bytes=2, source=""),
    tower=Tower(1, 4, 8, patches=6, frame_rows=3, source=""),
    workload=Workload(26, 5, 39, ""),
    lengths=(10,),
    systems={},
    figures=(),
)
CONSTANTS = Constants(utilisation=0.5, scattered=0.5, top_k=7.0, resv=11.0)
TOKENS = Method("tokens", 0.5, 0.1, True, "top_k", 2, True, "")
FRAMES = Method("frames", 0.5, 0.1, False, "top_k", 2, True, "")
CLUSTERS = Method("clusters", 0.5, 0.1, True, "resv", 2, True, "")
ANSWERS = Method("answers", 1.0, 0.1, True, "top_k", 2, False, "")
ALL = Method("all", 1.0, 1.0, False, None, None, False, "")


def hardware(link=1e-8, is_gpu=True):
    """1,000 operations and 1,000 bytes of DRAM a second, 10 bytes over PCIe."""
    return Hardware("small", 1e-9, 1e-6, link, 10, is_gpu, "")


def seconds(method, is_gpu=True, **switches):
    return Analytic(SMALL, CONSTANTS).frame(System(hardware(is_gpu=is_gpu), method, **switches), 10, 2).seconds


def test_sizes():
    llm, tower = load_paper().llm, load_paper().tower
    assert llm.matrices == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) == 6_979_321_856
    assert llm.row_bytes == 131_072
    assert llm.matrices + 2 * llm.head == pytest.approx(8.03e9, rel=1e-3)
    assert tower.matrices == 24 * 12 * 1024**2


def test_work():
    model = Analytic(SMALL, Constants())
    work = model.decoder_work(3, 5, 2)
    assert work.operations == 2 * (2 * 288 * 3 + 4 * 2 * 2 * 2 * 3 * 6.5 + 2 * 40) == 4864
    assert work.bytes == 2 * 328 + 2 * 16 * 8 == 912
    tower = model.tower_work(2)
    assert tower.operations == 2 * (2 * 128 * 6 + 4 * 36 * 4 + 2 * 32 * 3) == 4608
    assert tower.bytes == 2 * 160
    assert work.seconds(hardware(), 0.5) == pytest.approx(9.728)
    assert Work(2000, 3000).seconds(hardware(), 0.5) == pytest.approx(6), "memory takes longer"


@pytest.mark.parametrize(
    ("method", "fetch", "prediction"),
    [(TOKENS, 32, 0.21), (FRAMES, 16, 0.21), (CLUSTERS, 32, 0.33), (ANSWERS, 32, 0), (ALL, 32, 0)],
    ids=lambda value: getattr(value, "title", None),
)
def test_a_frame_on_a_gpu(method, fetch, prediction):
    """Two streams of ten rows. Half of 16-byte rows: 160 bytes at 10 a second, at half of that where they lie apart."""
    assert seconds(method) == pytest.approx(9.216 + prediction + fetch)
    assert seconds(method, offloads=False) == pytest.approx(9.216 + prediction + decoder(method)), "nothing is fetched"


def decoder(method):
    return Analytic(SMALL, CONSTANTS).decoder_work(3, 10 * method.prefill_ratio, 2).seconds(hardware(), 0.5)


def test_a_frame_on_vrex():
    assert seconds(CLUSTERS, is_gpu=False) == pytest.approx(9.216 + 16), "prediction is hidden, clusters lie together"
    assert seconds(CLUSTERS, is_gpu=False, has_kvmu=False) == pytest.approx(9.216 + 32)


def test_a_fetch_that_is_done_before_the_decoder_costs_nothing():
    call = Analytic(SMALL, CONSTANTS).frame(System(hardware(link=1e-7), FRAMES), 10, 2)
    assert (call.fetch, call.waiting) == (pytest.approx(1.6), 0)
    assert call.seconds == pytest.approx(9.216 + 0.21 + 9.728)
    assert call.ideal == pytest.approx(4.608 + 4.864)
    assert Analytic(SMALL, CONSTANTS).frame(System(hardware(), FRAMES), 10, 2).waiting == pytest.approx(16 - 9.728)


def test_tokens_and_questions():
    model, system = Analytic(SMALL, CONSTANTS), System(hardware(), ANSWERS)
    token, question = model.token(system, 10), model.question(system, 10)
    assert (token.tower, question.tower) == (0, 0)
    assert token.prediction == pytest.approx(1 * 10 / 2 * 7 / 1e3)
    assert token.fetch == pytest.approx(16 * 1 / 10 / 0.5)
    assert token.operations == 2 * 288 + 4 * 2 * 2 * 2 * 1.5 + 80
    assert (question.prediction, question.fetch) == (0, pytest.approx(16.0))
    assert question.operations == 2 * 288 * 5 + 4 * 2 * 2 * 2 * 5 * 12.5 + 80


@pytest.fixture(scope="module")
def model():
    return Analytic(load_paper(), calibrate(load_paper()))


def test_a_constant_gives_the_figure_that_it_is_taken_from(model):
    fixing = [one for one in predictions(model) if one.figure.fixes]
    assert len(fixing) == 4
    for one in fixing:
        assert one.predicted == pytest.approx(one.figure.value, rel=1e-9), one.figure
    weights = 2 * (6_979_321_856 + 128256 * 4096)
    assert model.constants.utilisation == pytest.approx((weights + 131072 * 26) / 204.8e9 / 0.089)
    assert 0 < model.constants.scattered < 1


def test_vrex_at_forty_thousand_rows(model):
    """The fetch alone, by hand: 0.327 x 40,000 rows x 131,072 bytes at 4 GB/s."""
    call = model.frame(model.paper.systems["V-Rex8"], 40_000)
    assert call.fetch == pytest.approx(0.42860544)
    assert call.seconds == pytest.approx(0.42860544 + call.tower)
    assert call.tower == pytest.approx(model.tower_work(1).operations / 53.3e12 / model.constants.utilisation)
    figure = next(one for one in model.paper.figures if one.quantity == "frame_ms" and one.length == 40_000)
    assert room(model.paper, figure) == pytest.approx(0.254 * 4e9 / (40_000 * 131_072))
    assert predict(model, figure) == pytest.approx(1e3 * call.seconds)


def test_relative_quantities(model):
    systems = model.paper.systems
    ours, other = systems["V-Rex8"], systems["AGX+FlexGen"]
    speedup = QUANTITIES["frame_speedup"](model, ours, other, 20_000, 4)
    assert speedup == pytest.approx(model.frame(other, 20_000, 4).seconds / model.frame(ours, 20_000, 4).seconds)
    assert QUANTITIES["frame_energy_gain"](model, ours, other, 20_000, 4) == pytest.approx(speedup * 40 / 35)
    tokens = QUANTITIES["token_speedup"](model, ours, other, 20_000, 1)
    assert tokens == pytest.approx(20_000 * 131_072 / 4e9 / model.token(ours, 20_000).seconds)
    assert QUANTITIES["token_energy_gain"](model, ours, other, 20_000, 1) == pytest.approx(tokens * 40 / 35)
    whole = {
        name: 26 * model.frame(one, 5000).seconds + model.question(one, 5000).seconds + 39 * model.token(one, 5000).seconds
        for name, one in (("ours", ours), ("other", other))
    }
    assert QUANTITIES["answer_speedup"](model, ours, other, 5000, 1) == pytest.approx(whole["other"] / whole["ours"])
    share = QUANTITIES["prefill_share"](model, ours, None, 5000, 1)
    assert share == pytest.approx(1 - 39 * model.token(ours, 5000).seconds / whole["ours"])
    call = model.frame(systems["AGX+ReSV"], 40_000)
    retrieval = QUANTITIES["retrieval_share"](model, systems["AGX+ReSV"], None, 40_000, 1)
    assert retrieval == pytest.approx((call.prediction + call.fetch - call.decoder) / call.seconds)
    watts = QUANTITIES["frame_tops_a_watt"](model, systems["AGX+ReSV"], None, 40_000, 1)
    assert watts == pytest.approx(call.operations / 1e12 / call.seconds / 40)


def test_least_and_most_are_of_all_lengths(model):
    times = [1e3 * model.token(model.paper.systems["V-Rex48"], length).seconds for length in model.paper.lengths]
    found = {one.figure.pick: one.predicted for one in predictions(model)
             if (one.figure.system, one.figure.quantity) == ("V-Rex48", "token_ms")}  # fmt: skip
    assert found == {"least": pytest.approx(min(times)), "most": pytest.approx(max(times))}


def test_the_middle_error_leaves_out_what_fixes(model):
    found = list(predictions(model))
    sizes = sorted(abs(one.predicted / one.figure.value - 1) for one in found if one.figure.fixes is None)
    count = len(sizes)
    assert count == len(found) - 4
    assert middle_error(found) == pytest.approx((sizes[(count - 1) // 2] + sizes[count // 2]) / 2)


def test_every_figure_has_its_place():
    paper = load_paper()
    for figure in paper.figures:
        assert figure.at.startswith("Fig. ")
        assert figure.quantity in QUANTITIES
        assert (figure.length is None) == (figure.pick is not None), figure
        assert ("speedup" in figure.quantity or "gain" in figure.quantity) == (figure.over is not None), figure
    assert all(system.hardware.source == "Table I" for system in paper.systems.values())
    assert all(system.method.source for system in paper.systems.values())
