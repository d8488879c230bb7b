"""Power: meters of machines made of files, and energy by a clock that is told the time."""

import json
import sys
import types

import pytest
from jetsons import Jetson

from edgevlm.apps.doctor import power as show
from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import METERS, Energy, Reading, find_meter


@pytest.fixture(autouse=True)
def _no_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def meter_of(root):
    meter, missing = find_meter(Machine(root))
    assert meter is not None, missing
    return meter


def watts(meter):
    return {rail: round(reading.watts, 3) for rail, reading in meter.read().items()}


def test_an_agx_has_rails_and_no_total(tmp_path):
    Jetson(tmp_path, "agx")
    meter = meter_of(tmp_path)
    assert watts(meter) == {"VDD_GPU_SOC": 5.201, "VDD_CPU_CV": 2.681, "VIN_SYS_5V0": 4.735, "VDDQ_VDD2_1V8AO": 0.397}
    assert meter.summed == ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")


@pytest.mark.parametrize("kind", ["nx", "nano"])
def test_a_module_with_its_input_measured_is_its_input(tmp_path, kind):
    Jetson(tmp_path, kind)
    meter = meter_of(tmp_path)
    assert watts(meter) == {"VDD_IN": 7.84, "VDD_CPU_GPU_CV": 1.764, "VDD_SOC": 1.568}
    assert meter.summed == ("VDD_IN",)


def test_where_nothing_measures_each_kind_says_why(tmp_path):
    meter, missing = find_meter(Machine(tmp_path))
    assert meter is None
    assert [line.partition(":")[0] for line in missing] == list(METERS)


def packages(root, **counters):
    for index, (name, microjoules) in enumerate(counters.items()):
        place = root / "sys/class/powercap" / (f"intel-rapl:{index}" if name != "dram" else "intel-rapl:0:0")
        place.mkdir(parents=True, exist_ok=True)
        (place / "name").write_text(f"{name.replace('_', '-')}\n")
        (place / "energy_uj").write_text(f"{microjoules}\n")
        (place / "max_energy_range_uj").write_text("1000000000\n")


def test_rapl_counts_sockets_and_their_memory_and_wraps(tmp_path):
    packages(tmp_path, package_0=999_000_000, dram=5_000_000)
    (tmp_path / "sys/class/powercap/intel-rapl-mmio:0").mkdir()
    meter = meter_of(tmp_path)
    assert (meter.name, set(meter.summed)) == ("rapl", {"package-0", "package-0 dram"})
    times = iter([10.0, 12.0])
    energy = Energy(meter, clock=lambda: next(times))
    energy.sample()
    packages(tmp_path, package_0=2_000_000, dram=6_000_000)
    energy.sample()
    assert energy.joules == pytest.approx(3 + 1)
    assert energy.watts == pytest.approx(2)


class Script:
    """A meter that reads what it is told, one mapping a call."""

    name, why = "script", ""

    def __init__(self, rails, summed, readings):
        self.rails, self.summed, self._readings = rails, summed, iter(readings)

    def read(self):
        return next(self._readings)


def measured(readings, times):
    clock = iter(times)
    energy = Energy(Script(("a", "b"), ("a",), readings), clock=lambda: next(clock))
    for _ in times:
        energy.sample()
    return energy


def test_watts_are_integrated_by_trapezoids():
    readings = [{"a": Reading(watts=w), "b": Reading(watts=1)} for w in (2.0, 4.0, 4.0)]
    energy = measured(readings, [0.0, 1.0, 3.0])
    assert energy.joules == pytest.approx(3 + 8)
    assert energy.figures()["rails"]["b"] == {"joules": 3.0, "gap_s": 0.0}


def test_a_rail_that_vanishes_is_not_guessed():
    readings = [{"a": Reading(watts=2)}, {}, {"a": Reading(watts=2)}, {"a": Reading(watts=2)}]
    energy = measured(readings, [0.0, 1.0, 2.0, 3.0])
    assert (energy.joules, energy.watts) == (None, None)
    assert energy.figures()["rails"]["a"] == {"joules": 2.0, "gap_s": 2.0}


def test_a_block_is_read_at_both_ends_and_in_between():
    calls = []

    class Counting(Script):
        def read(self):
            calls.append(1)
            return {"a": Reading(watts=5)}

    meter = Counting(("a",), ("a",), [])
    with Energy(meter, interval_s=0.005) as energy:
        while len(calls) < 4:
            pass
    assert energy.joules == pytest.approx(5 * energy.seconds)


def fake_nvml(monkeypatch, cards):
    """``pynvml`` with as many cards: joules, or watts where it does not count, or None where it says nothing."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.NVMLError_NotSupported = type("NVMLError_NotSupported", (nvml.NVMLError,), {})

    def asked(kind, card):
        said = cards[card].get(kind)
        if said is None:
            raise nvml.NVMLError_NotSupported
        return said

    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(cards)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda card: b"Card"
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda card: asked("millijoules", card)
    nvml.nvmlDeviceGetPowerUsage = lambda card: asked("milliwatts", card)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_graphics_cards_count_joules_or_say_watts(monkeypatch, tmp_path):
    fake_nvml(monkeypatch, [{"millijoules": 7000, "milliwatts": 1}, {"milliwatts": 30_500}, {}])
    meter = meter_of(tmp_path)
    assert meter.read() == {"GPU 0 Card": Reading(joules=7.0), "GPU 1 Card": Reading(watts=30.5)}


def test_power_is_shown_live(tmp_path):
    Jetson(tmp_path, "agx")
    (_, note), *lines = show.show_power(0.05, 0.1, True, Machine(tmp_path))
    assert "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0" in note
    *shown, energy = (json.loads(line) for is_data, line in lines if is_data)
    assert 1 <= len(shown) <= 2  # fewer on a busy machine
    assert shown[0]["watts"] == pytest.approx(12.617, abs=0.01)
    assert shown[0]["mode"] == "MAXN"
    assert shown[0]["rails"]["VDDQ_VDD2_1V8AO"] == pytest.approx(0.397, abs=0.01)
    assert energy["watts"] == pytest.approx(12.617, rel=0.1)
    assert energy["joules"] > 0.9 * 12.617 * 0.1
    text = [line for _, line in show.show_power(0.05, 0.05, False, Machine(tmp_path))]
    assert "12.62 W  VDD_GPU_SOC 5.20 W" in text[1]


def test_ctrl_c_ends_it_with_the_sum(tmp_path, monkeypatch):
    Jetson(tmp_path, "nx")

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(show.time, "sleep", interrupted)
    *_, (_, last) = show.show_power(1.0, None, False, Machine(tmp_path))
    assert last.startswith("energy: ")
