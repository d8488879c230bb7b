"""Check this machine for ``edgevlm doctor``, and suggest fixes.

A check is a function in :data:`CHECKS`. A check returns a status, a finding and a fix, or None if the check does not apply to
this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from edgevlm.apps.bundles.cache import cache_folder
from edgevlm.apps.doctor.cameras import check_cameras
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices import device_names
from edgevlm.engines.devices.jetson import (
    GPU_CLOCKS,
    is_jetson,
    l4t_of,
    module_of,
    power_modes,
    profile_of,
    release_of,
    toolkit_of,
)
from edgevlm.engines.devices.machine import Machine, Outcome, Status
from edgevlm.errors import UserError
from edgevlm.packages import install
from edgevlm.progress import counted
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.free_memory import group_limits

OLDEST = (3, 10)
KERNELS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))
LITTLE, SCARCE = 500_000, 2_000_000  # fail below LITTLE and warn below SCARCE kB of available memory
FULL, NARROW = 0.2e9, 2e9
ON_CPU = {"onnxruntime-cpu"}  # engines that need no GPU
NVIDIA = "0x10de"
NODES = ("dev/nvidia0", "dev/nvhost-ctrl-gpu", "dev/nvmap", "dev/nvgpu/igpu0/ctrl")
ASK = "import onnxruntime; print(*onnxruntime.get_available_providers())"
REFUSED = "cannot import: "
IMPORT = f"""
import sys; sys.path[:] = {{path!r}}
try: import {{module}}
except Exception as error: print({REFUSED!r}, *str(error).split())
"""
FASTER = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
CUDNN = "9"  # the major version of cuDNN that onnxruntime-gpu 1.19 and newer needs
FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/cuda/lib64", "usr/local/lib")
CMA_KB = 64_000
SMALL_KB = 9_000_000  # a device with less memory needs swap for building engines and loading models
JETPACK = "sudo apt install nvidia-jetpack"


def has_gpu(machine: Machine) -> bool:
    return is_jetson(machine) or machine.read("proc/driver/nvidia/version") is not None or _on_pci(machine)


def _on_pci(machine: Machine) -> bool:
    found = machine.path("sys/bus/pci/devices").glob("*/vendor")
    return any(machine.read(str(vendor.relative_to(machine.root))) == NVIDIA for vendor in found)


def python(machine: Machine) -> Outcome:
    here, release = "{}.{}".format(*sys.version_info[:2]), release_of(machine)
    if sys.version_info[:2] < OLDEST:
        return "fail", f"Python {here}", f"install Python {OLDEST[0]}.{OLDEST[1]} or newer"
    if release is not None and release["python"] != here:
        wanted = f"JetPack {release['jetpack']}'s wheels are for {release['python']}"
        return "warn", f"Python {here}, but {wanted}", f"create the venv with python{release['python']}"
    return "ok", f"Python {here}"


def extension(machine: Machine) -> Outcome:
    why = import_problem(machine, "edgevlm.runtime._native")
    return ("fail", why, "build it with this Python: pip install .") if why else ("ok", "the cache's extension loads")


def import_problem(machine: Machine, module: str) -> str:
    """Import a module in a separate process, in case the import crashes. Return the error, or ``""`` if the import succeeds."""
    said = machine.run([sys.executable, "-c", IMPORT.format(path=sys.path, module=module)])
    if said is None:
        return f"importing {module} crashes, or takes more than {machine.limit_s:g} s"
    return f"cannot be loaded ({said.removeprefix(REFUSED).strip()})" if said.startswith(REFUSED) else ""


def one_build(
    machine: Machine, packages: str, module: str, best: str, status: Status, missing: str, fix: str, why: str = ""
) -> Outcome:
    """Check that at most one of these packages is installed. All use the same folder, so a second overwrites the first."""
    found = sorted(_wheels(machine, packages).items())
    text = " and ".join(f"{name} {version}" for name, version in found)
    if len(found) > 1:
        names = " ".join(name for name, _ in found)
        return status, f"{text} are installed over each other{why}", f"pip uninstall -y {names} && pip install {best}"
    if found and (problem := import_problem(machine, module)):
        return status, f"{text} {problem}", f"pip install --force-reinstall {best}"
    return ("ok", text) if found else (status, missing, fix)


def cpu(machine: Machine) -> Outcome:
    """Return which processor features the cache's kernels can use."""
    fields = machine.fields("proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or fields.get("Model") or fields.get("CPU part") or "an unknown processor"
    if not flags:
        return "warn", "processor features not found in /proc/cpuinfo"
    best = next((text for flag, text in KERNELS if flag in flags), None)
    if best is None:
        return "warn", f"{name} has neither AVX2 nor NEON: the cache's kernels are plain C++", "use a newer processor"
    return "ok", f"{name}, {best}"


def _kilobytes(machine: Machine, *names: str) -> list[int] | None:
    fields = machine.fields("proc/meminfo")
    sizes = [fields.get(name, "").split(" ")[0] for name in names]
    return [int(size) for size in sizes] if all(size.isdigit() for size in sizes) else None


def memory(machine: Machine) -> Outcome:
    if (sizes := _kilobytes(machine, "MemTotal", "MemAvailable")) is None:
        return "warn", "memory size not found in /proc/meminfo"
    groups = ((each.free // 1024, each.total // 1024, " in this control group") for each in group_limits(machine.root))
    free, total, where = min([(sizes[1], sizes[0], ""), *groups])
    text = f"{free / 1e6:.1f} of {total / 1e6:.1f} GB available{where}"
    if free < LITTLE:
        return "fail", text, "stop other programs, or the desktop: sudo systemctl isolate multi-user.target"
    return ("warn", text, "enough for the demo; edgevlm plan predicts a model's memory") if free < SCARCE else ("ok", text)


def disk(machine: Machine) -> Outcome:
    """Return the free space for bundles, and whether the folder is writable."""
    folder = cache_folder().absolute()
    place = machine.path(str(folder.relative_to(folder.anchor)))
    there = next((parent for parent in (place, *place.parents) if parent.exists()), machine.root)
    elsewhere = "set EDGEVLM_CACHE to another folder"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return "warn", f"{folder}: bundles cannot be written here", f"take ownership of it, or {elsewhere}"
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free for bundles in {folder}"
    if free < FULL:
        return "fail", text, f"free up space, or mount an NVMe disk and {elsewhere}"
    if free < NARROW:
        return "warn", text, f"a bundle takes up to 4 bytes a parameter of its model; free up space, or {elsewhere}"
    return "ok", text


def device(machine: Machine) -> Outcome:
    profile = profile_of(machine)
    model = machine.read("proc/device-tree/model") or "an unknown Jetson"
    text = f"{model}, module {module_of(machine) or 'not found'}"
    if profile is None:
        return "warn", f"{text}: no matching profile", f"set --device to one of {', '.join(device_names())}"
    return "ok", f"{text}: --device {profile.name}"


def jetpack(machine: Machine) -> Outcome:
    version, release = l4t_of(machine), release_of(machine)
    if version is None:
        return "warn", "/etc/nv_tegra_release: not found", "mount it into the container"
    if release is None:
        return "fail", f"Jetson Linux {version}", "flash JetPack 6.2 or newer, which has a newer Python"
    return "ok", f"Jetson Linux {version} (JetPack {release['jetpack'].split('.')[0]})"


def of_release(machine: Machine, name: str, find: Callable[[Machine], str | None], fix: str) -> Outcome | None:
    """Check that a package has the version that this Jetson Linux release needs."""
    if (release := release_of(machine)) is None:
        return None
    found, wanted = find(machine), release[name]
    if found is None or found.split(".")[:2] != wanted.split("."):
        return "warn", f"{'not found;' if found is None else f'{found}, but'} this release requires {wanted}", fix
    return "ok", found


def cma(machine: Machine) -> Outcome:
    """Check the contiguous memory that CSI cameras and video decoders need."""
    if (sizes := _kilobytes(machine, "CmaFree", "CmaTotal")) is None:
        return "warn", "CMA not found in /proc/meminfo"
    text = f"{sizes[0] / 1e3:.0f} of {sizes[1] / 1e3:.0f} MB contiguous memory free"
    if sizes[0] < CMA_KB:
        return "warn", text, "add cma=256M to APPEND in /boot/extlinux/extlinux.conf and reboot"
    return "ok", text


def swap(machine: Machine) -> Outcome | None:
    if (sizes := _kilobytes(machine, "MemTotal", "SwapTotal")) is None:
        return None
    if sizes[0] < SMALL_KB and not sizes[1]:
        fix = "sudo fallocate -l 8G /swap && sudo chmod 600 /swap && sudo mkswap /swap && sudo swapon /swap (on NVMe)"
        return "warn", f"no swap, and {sizes[0] / 1e6:.1f} GB of memory", fix
    return "ok", f"{sizes[1] / 1e6:.1f} GB"


def power_mode(machine: Machine) -> Outcome:
    """Return whether the fastest power mode is set: MAXN_SUPER, else MAXN, else the mode with the most watts."""
    modes = power_modes(machine)
    found = re.search(r"pmode:\s*(\d+)", machine.read("var/lib/nvpmodel/status") or "")
    if not modes or found is None:
        return "warn", "not found", "run sudo nvpmodel -q"
    now, best = int(found[1]), max(modes, key=lambda number: _rank(modes[number]))
    text = f"{modes.get(now, 'unknown')} (mode {now})"
    if _rank(modes.get(now, "")) < _rank(modes[best]):
        return "warn", f"{text}; {modes[best]} is faster", f"sudo nvpmodel -m {best}"
    return "ok", text


def _rank(name: str) -> tuple[bool, bool, int]:
    watts = re.search(r"(\d+)W", name)
    return name == "MAXN_SUPER", name.startswith("MAXN"), int(watts[1]) if watts else 0


def clocks(machine: Machine) -> Outcome:
    """Return whether the GPU's clock is fixed at its maximum. A varying clock makes the first frames slower."""
    place = next((place for place in GPU_CLOCKS if machine.path(place).exists()), None)
    low, high = (machine.number(f"{place}/{name}") if place else None for name in ("min_freq", "max_freq"))
    if low is None or high is None:
        return "warn", "the GPU's clock: not found"
    if low < high:
        return "warn", f"the GPU's clock varies from {low / 1e6:.0f} to {high / 1e6:.0f} MHz", "sudo jetson_clocks"
    return "ok", f"the GPU's clock is fixed at {high / 1e6:.0f} MHz"


def gpu(machine: Machine) -> Outcome:
    version = machine.read("proc/driver/nvidia/version")
    nodes = [f"/{node}" for node in NODES if machine.path(node).exists()]
    if version is not None:
        number = re.search(r"Kernel Module[^\d]*([\d.]+)", version)
        return "ok", f"NVIDIA's driver {number[1] if number else '(unknown version)'}"
    if is_jetson(machine):
        if nodes:
            return "ok", f"the Jetson's own GPU ({', '.join(nodes)})"
        fix = "in a container, add --runtime nvidia; otherwise reinstall nvidia-l4t-core"
        return "warn", "device node of the Jetson's GPU not found under /dev", fix
    if _on_pci(machine):
        return "warn", "an NVIDIA GPU without a driver", "install NVIDIA's driver, or continue with the CPU"
    return "ok", "no NVIDIA GPU found: models run on the CPU"


def gpu_in_use(machine: Machine) -> Outcome:
    """Test in a separate process whether ONNX Runtime can use the GPU."""
    if (text := machine.run([sys.executable, "-c", ASK])) is None:
        return "warn", "ONNX Runtime did not respond", f"find the cause: {sys.executable} -c '{ASK}'"
    providers = ", ".join(name for name in text.split() if name in FASTER)
    if not providers:
        fix = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu (on a Jetson its JetPack's wheel)"
        return "warn", f"no: ONNX Runtime supports only {text.strip() or 'nothing'}", fix
    return "ok", f"ONNX Runtime was built with {providers}: use run --engine onnxruntime-cuda to test them"


def permissions(machine: Machine) -> Outcome | None:
    """Return whether this user may open the GPU's device nodes, which only GPU engines need."""
    found = [machine.path(node) for node in NODES if machine.path(node).exists()]
    closed = [str(path.relative_to(machine.root)) for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        text, fix = f"/{', /'.join(closed)}: permission denied", "sudo usermod -aG video,render $USER, and log in again"
        return ("warn" if DEFAULT_ENGINE in ON_CPU else "fail"), text, fix
    return ("ok", f"{len(found)} device nodes can be opened") if found else None


def cudnn(machine: Machine) -> Outcome:
    """Look for cuDNN, which ONNX Runtime loads on a GPU, in system packages, wheels and the loader's paths."""
    found = _debs(machine, r"libcudnn\d+(?:-cuda-\d+)?") | _wheels(machine, r"nvidia-cudnn(?:-cu\d+)?")
    for folder in FOLDERS:
        names = (path.name.removeprefix("libcudnn.so.") for path in machine.path(folder).glob("libcudnn.so.*"))
        if versions := [name for name in names if re.fullmatch(r"\d+(\.\d+)*", name)]:
            found[f"/{folder}"] = max(versions, key=len)
    fix = "install NVIDIA's cudnn9-cuda-12, or cudnn9-cuda-13 for an ONNX Runtime built for CUDA 13"
    fix = JETPACK if is_jetson(machine) else fix
    if not found:
        return "warn", "not found: ONNX Runtime falls back to the CPU without it", fix
    if not any(version.split(".")[0] == CUDNN for version in found.values()):
        return "warn", f"{_listed(found)}, but ONNX Runtime loads cuDNN {CUDNN}", fix
    return "ok", _listed(found)


def cuda_runtime(machine: Machine) -> Outcome | None:
    """Check CUDA's runtime libraries, except on a Jetson, where a separate check covers them."""
    if is_jetson(machine):
        return None
    found = _debs(machine, r"cuda-cudart-\d+-\d+") | _wheels(machine, r"nvidia-cuda-runtime(?:-cu\d+)?")
    if toolkit := toolkit_of(machine):
        found["/usr/local/cuda"] = toolkit
    return ("ok", _listed(found)) if found else ("warn", "CUDA's libraries: not found", "install NVIDIA's cuda-toolkit")


def cuda_wheels(machine: Machine) -> Outcome:
    """Check the packages that GPU engines and the GPU's power meter import."""
    packages = machine.packages()
    wanted = ["onnxruntime-gpu"] + ["nvidia-ml-py"] * (not is_jetson(machine))  # a Jetson's power is read from the board
    if missing := [name for name in wanted if name not in packages]:
        fix = "install the onnxruntime-gpu wheel for its JetPack" if is_jetson(machine) else install("cuda")
        return "warn", f"not found: {', '.join(missing)}", fix
    return "ok", ", ".join(f"{name} {packages[name]}" for name in wanted)


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{version} ({where})" for where, version in sorted(found.items()))


def _debs(machine: Machine, name: str) -> dict[str, str]:
    found = {}
    for about in (machine.read("var/lib/dpkg/status") or "").split("\n\n"):
        package = re.search(rf"^Package: ({name})$", about, re.MULTILINE)
        version = re.search(r"^Version: (?:\d+:)?([\d.]+)", about, re.MULTILINE)
        if package and version and re.search(r"^Status: .* installed$", about, re.MULTILINE):
            found[package[1]] = version[1]
    return found


def _wheels(machine: Machine, name: str) -> dict[str, str]:
    return {package: version for package, version in machine.packages().items() if re.fullmatch(name, package)}


ONNXRUNTIME = partial(
    one_build, packages=r"onnxruntime(-.+)?", module="onnxruntime", best="onnxruntime-gpu", status="fail", missing="not found",
    fix=f"{install('cpu')}, or on a Jetson the wheel for its JetPack", why=": a GPU may silently be ignored",
)  # fmt: skip
OPENCV = partial(
    one_build, packages=r"opencv(-contrib)?-python(-headless)?", module="cv2", best="opencv-python-headless", status="warn",
    missing="no wheel found: cameras and videos need it", fix="pip install opencv-python-headless",
)  # fmt: skip
CUDA = partial(of_release, name="cuda", find=toolkit_of, fix=f"{JETPACK}, and /usr/local/cuda/bin in PATH")
TENSORRT = partial(of_release, name="tensorrt", find=lambda of: _debs(of, "libnvinfer10").get("libnvinfer10"), fix=JETPACK)
Applies = Callable[[Machine], bool]
CHECKS: dict[str, tuple[Applies | None, Callable[[Machine], Outcome | list[Outcome] | None]]] = {
    "python": (None, python), "extension": (None, extension), "onnxruntime": (None, ONNXRUNTIME), "opencv": (None, OPENCV),
    "cpu": (None, cpu), "memory": (None, memory), "disk": (None, disk),
    "device": (is_jetson, device), "jetpack": (is_jetson, jetpack), "cuda": (is_jetson, CUDA),
    "tensorrt": (is_jetson, TENSORRT), "cma": (is_jetson, cma), "swap": (is_jetson, swap),
    "power mode": (is_jetson, power_mode), "clocks": (is_jetson, clocks),
    "gpu": (None, gpu), "gpu in use": (has_gpu, gpu_in_use), "cudnn": (has_gpu, cudnn), "cuda runtime": (has_gpu, cuda_runtime),
    "cuda wheels": (has_gpu, cuda_wheels), "permissions": (None, permissions), "cameras": (None, check_cameras),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    ``status``: ``ok``, ``warn`` (a run works, but badly) or ``fail`` (a run would fail).
    """

    check: str
    status: Status
    found: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.status:<5}{self.check:<13}{self.found}"
        return f"{text}\n{'':<18}-> {self.fix}" if self.fix else text


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    """Run all checks in order and yield their findings. If a check crashes, yield a warning."""
    machine = machine or Machine()
    for name, (applies, check) in CHECKS.items():
        try:
            found = check(machine) if applies is None or applies(machine) else None
        except UserError as error:
            what, _, fix = str(error).partition("; ")
            found = "warn", what, fix
        except Exception as error:
            found = "warn", f"the check failed ({error!r})", "please report this"
        if found is not None:
            yield from (Finding(name, *outcome) for outcome in (found if isinstance(found, list) else [found]))


def report(as_json: bool, machine: Machine | None = None, more: Sequence[Finding] = ()) -> tuple[list[str], bool]:
    """Return the lines that ``edgevlm doctor`` prints, and whether this machine is ready. ``more``: findings to add."""
    found = [*examine(machine), *more]
    statuses = [finding.status for finding in found]
    if as_json:
        return [json_line("finding", asdict(finding)) for finding in found], "fail" not in statuses
    verdict = "not ready" if "fail" in statuses else "ready"
    warnings, failures = counted(statuses.count("warn"), "warning"), counted(statuses.count("fail"), "failure")
    return [*map(str, found), "", f"{verdict}: {statuses.count('ok')} ok, {warnings}, {failures}"], "fail" not in statuses
