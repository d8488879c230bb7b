"""What a plan chooses for a model and a machine, and this machine as Linux describes it. No hardware is looked at."""

import pytest
from planned import SMALL, with_figures

from edgevlm.apps.planning.plan import PlanRequest, choose, default_budget
from edgevlm.apps.planning.this_machine import assumptions, this_machine
from edgevlm.engines.devices import load_device
from edgevlm.engines.devices.machine import Machine

USUAL = default_budget(SMALL)


def chosen(device, model=SMALL, **asked):
    plan = choose(model, device, PlanRequest("a model", **asked))
    return plan.roofline.precision, plan.roofline.model.tower.precision, plan.budget


def cpu(times=1.0, gib=64):
    """The example CPU, so many times as fast."""
    device = load_device("cpu")
    rates = {name: times * device[name] for name in ("fp32_tflops", "int8_tops", "bandwidth_gb_s")}
    return with_figures(device, usable_mib=gib << 10, **rates)


def test_the_most_accurate_weights_that_keep_up_are_chosen():
    assert chosen(cpu(100)) == ("fp32", "fp32", USUAL)
    assert chosen(cpu(5)) == ("int8", "int8", USUAL)
    assert chosen(cpu(5), fps=0.1) == ("fp32", "fp32", USUAL)


def test_where_memory_is_short_weights_shrink_and_then_the_budget():
    fast = load_device("orin-agx-64")
    room = {gib: with_figures(fast, usable_mib=int(gib * 1024), system_mib=0) for gib in (16, 4.2, 3.2, 1)}
    assert [chosen(device)[0] for device in room.values()] == ["fp16", "int8", "int4", "int4"]
    need = choose(SMALL, fast, PlanRequest("a model", precision="int4")).memory.total
    short = choose(SMALL, with_figures(fast, usable_mib=(need >> 20) - 50, system_mib=0), PlanRequest("a model"))
    assert short.fits
    assert 0 < short.budget < USUAL
    assert short.budget % SMALL.tower.rows == 0
    tight = choose(SMALL, with_figures(fast, usable_mib=1000, system_mib=0), PlanRequest("a model"))
    assert not tight.fits


# This machine.


def described(root, cpuinfo, **files):
    for name, text in {"proc/cpuinfo": cpuinfo, "proc/meminfo": "MemTotal:       16384000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root=root)


def test_memory_cores_and_clock_are_linuxs(tmp_path):
    files = {"sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n", "sys/fs/cgroup/memory.max": "max\n"}
    device = this_machine(described(tmp_path, "model name : A CPU\nflags : sse2 avx2 fma\n", **files), cores=8)
    example = load_device("cpu")
    assert {name: device[name] for name in ("fp32_tflops", "int8_tops", "bandwidth_gb_s")} == pytest.approx(
        {"fp32_tflops": 0.768, "int8_tops": 1.536, "bandwidth_gb_s": example["bandwidth_gb_s"]}
    )
    assert (device.kind, device["usable_mib"], device["max_watts"]) == ("cpu", 16000, None)
    assert "A CPU, 8 cores with AVX2 at 3.0 GHz, 16 GiB" in device.title
    assert "assumed: 51.2 GB/s" in assumptions(device)
    assert assumptions(example) == ""
    assert device.figures["bandwidth_gb_s"].checked is False
    assert choose(SMALL, device, PlanRequest("a model")).line()["j_per_frame"] is None
