"""Jetsons made of files, laid out as JetPack 6 and 7 lay out /proc, /sys, /etc and /dev on an AGX, an NX and a Nano."""

GPU = "sys/class/devfreq/17000000.gpu"
MODES = {
    "agx": ["MAXN", "MODE_15W", "MODE_30W", "MODE_50W"],
    "nx": ["MAXN", "10W", "15W", "25W"],
    "nano": ["15W", "7W"],
    "nano-super": ["15W", "25W", "MAXN_SUPER", "7W"],
}
MODELS = {
    "agx": ("NVIDIA Jetson AGX Orin Developer Kit", "nvidia,p3737-0000+p3701-0005", 64_350_000),
    "nx": ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "nvidia,p3768-0000+p3767-0000", 16_032_000),
    "nano": ("NVIDIA Jetson Orin Nano Developer Kit", "nvidia,p3768-0000+p3767-0005", 7_802_000),
    "nano-super": (
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "nvidia,p3768-0000+p3767-0005-super", 7_802_000
    ),
}  # fmt: skip
CPUINFO = (
    "processor\t: 0\nBogoMIPS\t: 62.50\nFeatures\t: fp asimd evtstrm aes asimdhp\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n"
)
DPKG = (
    "Package: libnvinfer-bin\nVersion: 1.0\n\nPackage: libnvinfer10\nStatus: install ok installed\nVersion: {}-1+cuda12.6\n\n"
)
RAILS = {  # the address of each INA3221 and its channels, millivolts and milliamperes
    "agx": {
        "1-0040": [("VDD_GPU_SOC", 843, 6170), ("VDD_CPU_CV", 780, 3437), ("VIN_SYS_5V0", 4968, 953)],
        "1-0041": [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 4968, 80), ("NC", 0, 0)],
    },
    "nx": {"1-0040": [("VDD_IN", 19600, 400), ("VDD_CPU_GPU_CV", 19600, 90), ("VDD_SOC", 19600, 80)]},
}
RAILS |= {"nano": RAILS["nx"], "nano-super": RAILS["nx"]}
MEMINFO = "MemTotal: {} kB\nMemAvailable: {} kB\nSwapTotal: {} kB\nCmaTotal: {} kB\nCmaFree: {} kB\n"


class Jetson:
    """A folder that stands for / of a healthy Jetson; methods take health from it."""

    def __init__(self, root, kind="nx", l4t=("36", "4.3"), mode=0):
        self.root, self.kind = root, kind
        model, compatible, total = MODELS[kind]
        self.put("proc/device-tree/model", model + "\0")
        self.put(
            "proc/device-tree/compatible",
            f"{compatible}\0{compatible.partition('+')[2].join(['nvidia,', ''])}\0nvidia,tegra234\0",
        )
        self.put("etc/nv_tegra_release", f"# R{l4t[0]} (release), REVISION: {l4t[1]}, GCID: 1, BOARD: generic, EABI: aarch64\n")
        self.put("etc/nvpmodel.conf", "".join(f"< POWER_MODEL ID={n} NAME={name} >\n" for n, name in enumerate(MODES[kind])))
        self.put("var/lib/nvpmodel/status", f"pmode:{mode:04d}")
        self.put("proc/cpuinfo", CPUINFO)
        self.memory(total)
        self.clocks(1_020_000_000, 1_020_000_000)
        self.rails()
        self.put("usr/local/cuda/version.json", '{"cuda": {"name": "CUDA SDK", "version": "12.6.68"}}')
        self.put("var/lib/dpkg/status", DPKG.format("10.3.0.30"))
        self.put("dev/nvmap", "")
        self.put("dev/nvhost-ctrl-gpu", "")

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def memory(self, total, available=None, swap=4_000_000, cma=262_144, cma_free=200_000):
        self.put("proc/meminfo", MEMINFO.format(total, total // 2 if available is None else available, swap, cma, cma_free))

    def clocks(self, low, high):
        self.put(f"{GPU}/min_freq", f"{low}\n")
        self.put(f"{GPU}/max_freq", f"{high}\n")

    def rails(self):
        for monitor, channels in enumerate(RAILS[self.kind].values(), 3):
            place = f"sys/class/hwmon/hwmon{monitor}"
            self.put(f"{place}/name", "ina3221\n")
            for n, (label, millivolts, milliamperes) in enumerate(channels, 1):
                self.put(f"{place}/in{n}_label", f"{label}\n")
                self.put(f"{place}/in{n}_input", f"{millivolts}\n")
                self.put(f"{place}/curr{n}_input", f"{milliamperes}\n")
            self.put(f"{place}/in7_label", "sum of shunt voltages\n")
            self.put(f"{place}/in7_input", "12345\n")
