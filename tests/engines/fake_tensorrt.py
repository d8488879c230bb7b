"""What the adapter uses of the module ``tensorrt``, without TensorRT: engines are sessions of ONNX Runtime.

Every class and member here is one of the real module's (test_tensorrt_api.py). A plan is the graph's own bytes and what it was
built for. What TensorRT demands is demanded: profiles before shapes, shapes within them, addresses for all tensors, working
memory that is large enough and aligned, a stream that there is. ``world`` says what fails, and keeps what was called.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from fake_cuda import ALIGNMENT, FakeStream, at

MAGIC = b"fake plan\n"
SCRATCH = 4096


@dataclass
class World:
    """What this TensorRT does, and what was asked of it."""

    version: str = "10.3.0"
    starts: bool = True
    builds: bool = True
    runs: bool = True
    steps: int = 3
    on_step: Callable[[str, int], None] | None = None
    errors: list[str] = field(default_factory=list)  # said while it builds, parses or loads
    calls: list[str] = field(default_factory=list)


world = World()
__version__ = world.version


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING = Severity

    def __init__(self) -> None: ...

    def log(self, severity: Severity, msg: str) -> None: ...


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class DataType(enum.Enum):
    FLOAT = np.dtype(np.float32)
    HALF = np.dtype(np.float16)
    INT32 = np.dtype(np.int32)
    INT64 = np.dtype(np.int64)


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


@dataclass
class ITensor:
    name: str
    shape: tuple[int, ...]
    dtype: DataType


class LayerType(enum.Enum):
    SCATTER = 0
    ATTENTION_INPUT = 1


@dataclass
class IAttention:
    """A property in the real one; None until it is set."""

    decomposable: bool | None = None


class ILayer:
    def __init__(self, kind: LayerType) -> None:
        self._kind, self._attention = kind, IAttention()

    @property
    def type(self) -> LayerType:
        return self._kind


class IAttentionInputLayer(ILayer):
    @property
    def attention(self) -> IAttention:
        return self._attention


class IHostMemory(bytearray):
    """Bytes; the real one has the buffer protocol too."""


class INetworkDefinition:
    def __init__(self) -> None:
        self.model: bytes = b""
        self.path = ""
        self.inputs: list[ITensor] = []
        self.outputs: list[ITensor] = []

        self.layers: list[ILayer] = []

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, index: int) -> ILayer:
        return self.layers[index]

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]

    def unmark_output(self, tensor: ITensor) -> None:
        self.outputs.remove(tensor)


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        complain(logger)

    def parse(self, model: bytes, path: str) -> bool:
        world.calls.append(f"parse {Path(path).stem}")
        graph = onnx.load_model_from_string(model).graph
        self._network.model, self._network.path = model, path
        kinds = [LayerType.ATTENTION_INPUT if node.op_type == "Attention" else LayerType.SCATTER for node in graph.node]
        self._network.layers = [ILayer(kind) for kind in kinds]
        initial = {tensor.name for tensor in graph.initializer}
        self._network.inputs = [tensor_of(value) for value in graph.input if value.name not in initial]
        self._network.outputs = [tensor_of(value) for value in graph.output]
        return True


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, input: str, min: tuple, opt: tuple, max: tuple) -> None:
        if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise ValueError(f"{input}: {min}, {opt}, {max} are in no order")
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiles: list[IOptimizationProfile] = []
        self.workspace = 0

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self.workspace = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, logger: ILogger) -> None:
        complain(logger)
        if not world.starts:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        name = Path(network.path).stem
        world.calls.append(f"build {name} workspace {config.workspace}")
        complain(self._logger)
        check_profiles(network, config.profiles)
        attention = [layer._attention for layer in network.layers if layer.type is LayerType.ATTENTION_INPUT]
        assert all(layer.decomposable for layer in attention), "no fused kernel for attention"
        for step in range(world.steps):
            if world.on_step:
                world.on_step(name, step)
        if not world.builds:
            return None
        about = {
            "version": world.version,
            "path": network.path,
            "profiles": [profile.shapes for profile in config.profiles],
            "inputs": [described(tensor) for tensor in network.inputs],
            "outputs": [described(tensor) for tensor in network.outputs],
        }
        return IHostMemory(MAGIC + json.dumps(about).encode() + b"\n" + network.model)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        if not world.starts:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        head, about, model = bytes(serialized_engine).split(b"\n", 2)
        complain(self._logger)
        found = json.loads(about)
        if head + b"\n" != MAGIC or found["version"] != world.version:
            self._logger.log(ILogger.ERROR, f"the plan is of version {found['version']}, expecting\n {world.version}")
            return None
        return ICudaEngine(found, model, self._logger)


class ICudaEngine:
    def __init__(self, about: dict[str, Any], model: bytes, logger: ILogger) -> None:
        self.logger = logger
        self.profiles = [{name: [tuple(d) for d in dims] for name, dims in shapes.items()} for shapes in about["profiles"]]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(Path(about["path"]).parent)
        )
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        tensors = {"inputs": TensorIOMode.INPUT, "outputs": TensorIOMode.OUTPUT}
        self.io = {
            name: (mode, DataType[kind], tuple(shape)) for part, mode in tensors.items() for name, kind, shape in about[part]
        }

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH

    @property
    def num_io_tensors(self) -> int:
        return len(self.io)

    def get_tensor_name(self, index: int) -> str:
        return list(self.io)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.io[name][1]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return self.profiles[profile_index][name]

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._memory = (0, 0)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        self._shapes.clear()
        return 0 <= profile_index < len(self._engine.profiles) and stream_handle in FakeStream.streams

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        world.calls.append(f"address {name}")
        self._addresses[name] = memory
        return name in self._engine.io and memory != 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        world.calls.append(f"shape {name}")
        if self._profile is None or self._engine.io[name][0] is not TensorIOMode.INPUT:
            return self._no(f"{name} takes no shape now")
        static = self._engine.io[name][2]
        if len(shape) != len(static) or any(want not in (-1, have) for want, have in zip(static, shape, strict=True)):
            return self._no(f"{name} is {static}, not {shape}")
        if -1 in static:
            least, _, most = self._engine.profiles[self._profile][name]
            if not all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True)):
                return self._no(f"{name}: {shape} is not within {least} to {most}")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        dynamic = [name for name, (mode, _, shape) in self._engine.io.items() if mode is TensorIOMode.INPUT and -1 in shape]
        return [name for name in dynamic if name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        world.calls.append(f"run {self._profile}")
        if not world.runs:
            return self._no("illegal memory access")
        missing = self.infer_shapes() + [name for name in self._engine.io if name not in self._addresses]
        address, size = self._memory
        if missing or not address or address % ALIGNMENT or size < SCRATCH:
            return self._no(f"nothing is known of {missing}, or of the memory to work in ({address:#x}, {size} bytes)")
        stream, addresses = FakeStream.streams[stream_handle], dict(self._addresses)
        shapes = {name: self._shapes.get(name, shape) for name, (_, _, shape) in self._engine.io.items()}

        def work() -> None:
            at(address, (size,), np.dtype(np.uint8))[:] = 0xFF  # whoever left something there has lost it
            self._compute(shapes, addresses)

        stream.ask(work)
        return True

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        io = self._engine.io
        inputs = {
            name: at(addresses[name], shapes[name], io[name][1].value) for name in io if io[name][0] is TensorIOMode.INPUT
        }
        outputs = [name for name in io if io[name][0] is TensorIOMode.OUTPUT]
        found = self._engine.session.run(outputs, {name: array.copy() for name, array in inputs.items()})
        for name, array in zip(outputs, found, strict=True):
            at(addresses[name], array.shape, array.dtype)[...] = array

    def _no(self, words: str) -> bool:
        self._engine.logger.log(ILogger.ERROR, words)
        return False


def complain(logger: Any) -> None:
    for words in world.errors:
        logger.log(ILogger.ERROR, words)


def check_profiles(network: INetworkDefinition, profiles: list[IOptimizationProfile]) -> None:
    """Every input with a dimension to give has a range in every profile, in which all else is as it is."""
    assert profiles
    for tensor in network.inputs:
        for profile in profiles:
            if -1 in tensor.shape:
                for dims in profile.shapes[tensor.name]:
                    assert all(want in (-1, have) for want, have in zip(tensor.shape, dims, strict=True)), tensor


def described(tensor: ITensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype.name, tensor.shape


def tensor_of(value: Any) -> ITensor:
    kind = value.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return ITensor(value.name, dims, DataType(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))))
