"""Call TensorRT's Python API, version 10.3 or newer. Only this module imports ``tensorrt``.

Every variable that holds a TensorRT object is annotated with its class. The test tests/engines/test_tensorrt_api.py checks the
classes, members and argument counts used here against each TensorRT version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import tensorrt as trt
from numpy.typing import NDArray

from edgevlm.engines.tensorrt.jobs import BuildJob, Dims
from edgevlm.errors import UserError
from edgevlm.runtime.cuda.driver import Driver, WorkingMemory

VERSION: str = trt.__version__
DTYPES: dict[Any, np.dtype] = {
    trt.DataType.FLOAT: np.dtype(np.float32),
    trt.DataType.HALF: np.dtype(np.float16),
    trt.DataType.INT32: np.dtype(np.int32),
    trt.DataType.INT64: np.dtype(np.int64),
}
MOST_ERRORS = 3  # per message


class Log(trt.ILogger):
    """A TensorRT logger that keeps errors until :meth:`take` is called. Thread-safe."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self._lock = threading.Lock()
        self._errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Store error messages; ignore the others. TensorRT calls this method, which must not raise."""
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            with self._lock:
                self._errors.append(" ".join(msg.split()))

    def take(self) -> str:
        """Return the first errors logged since the last call, joined into one line."""
        with self._lock:
            found, self._errors = self._errors, []
        return "; ".join(found[:MOST_ERRORS]) or "no reason given"


def build(job: BuildJob, workspace: int, log: Log) -> memoryview:
    """Build a serialised, strongly typed engine. ``workspace`` limits each layer's working memory (in bytes).

    Raises UserError with TensorRT's message if TensorRT does not start, refuses the graph, or cannot build an engine.
    """
    builder: trt.Builder = _started(lambda: trt.Builder(log), log)
    network: trt.INetworkDefinition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser: trt.OnnxParser = trt.OnnxParser(network, log)
    if not parser.parse(job.model, job.path):
        said = []
        for index in range(min(parser.num_errors, MOST_ERRORS)):
            error: trt.ParserError = parser.get_error(index)
            where = error.node_name() or error.node()
            said.append(f"node {where} ({error.node_operator()}): {' '.join(error.desc().split())}")
        words = log.take()
        raise UserError(
            f"{job.path}: TensorRT {VERSION} cannot parse it: {'; '.join(said) or words}; export the checkpoint again for this "
            "TensorRT (edgevlm export --device NAME --jetpack VERSION)"
        )
    tensor: trt.ITensor
    for tensor in [network.get_output(index) for index in range(network.num_outputs)]:
        if tensor.name in job.dropped:
            network.unmark_output(tensor)
    if hasattr(trt, "IAttention"):  # 10.3 lacks IAttention
        _allow_several_kernels(network)
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    for name, inputs in job.calls.items():
        profile: trt.IOptimizationProfile = builder.create_optimization_profile()
        try:
            for tensor_name, (least, usual, most) in inputs.items():
                profile.set_shape(tensor_name, least, usual, most)
            is_taken = config.add_optimization_profile(profile) >= 0
        except ValueError as refused:
            raise UserError(f"{job.path}: TensorRT {VERSION} rejects the shapes of {name} calls ({refused})") from None
        if not is_taken:
            raise UserError(f"{job.path}: TensorRT {VERSION} rejects the shapes of {name} calls ({log.take()})")
    plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    words = log.take()
    if plan is None:
        raise UserError(f"{job.path}: TensorRT {VERSION} could not build an engine ({words})")
    return memoryview(plan)


def _started(start: Callable[[], Any], log: Log) -> Any:
    try:
        return start()
    except TypeError:  # the bindings raise TypeError for a null pointer
        raise UserError(f"TensorRT {VERSION} cannot start ({log.take()}); run edgevlm doctor to check the GPU") from None


def _allow_several_kernels(network: trt.INetworkDefinition) -> None:
    for index in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings return every layer as an ILayer
            boundary: trt.IAttentionInputLayer = layer
            attention: trt.IAttention = boundary.attention
            attention.decomposable = True


class Loaded:
    """A loaded engine and the TensorRT objects that it needs."""

    def __init__(self, plan: memoryview, name: str, log: Log) -> None:
        """Load an engine. Raises UserError if the engine was built for a different TensorRT version or GPU."""
        self._runtime: trt.Runtime = _started(lambda: trt.Runtime(log), log)
        engine: trt.ICudaEngine | None = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise UserError(
                f"{name}: TensorRT {VERSION} cannot load it ({log.take()}); build it again (edgevlm build BUNDLE --force)"
            )
        self.engine: trt.ICudaEngine = engine
        self.name, self.log = name, log
        self.scratch_bytes = int(engine.device_memory_size_v2)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.dtypes: Mapping[str, np.dtype] = {name: DTYPES[engine.get_tensor_dtype(name)] for name in names}

    def most(self, tensor: str, kind: int) -> Dims:
        return tuple(self.engine.get_tensor_profile_shape(tensor, kind)[2])


class Workspace(WorkingMemory):
    """The CUDA stream and memory blocks that a backend's engines share. A caller must hold ``lock``."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream, self.lock = driver, driver.stream(), threading.RLock()
        super().__init__(driver, self.stream)

    def at(self, name: str, nbytes: int) -> int:
        return self.block(name, nbytes).address


class EngineCalls:
    """Runs one kind of call on a TensorRT engine. Addresses and shapes stay set until they are replaced.

    Methods raise RuntimeError with TensorRT's message on failure.
    """

    def __init__(self, workspace: Workspace, loaded: Loaded, kind: int) -> None:
        self._workspace, self._loaded, self._kind = workspace, loaded, kind
        engine: trt.ICudaEngine = loaded.engine
        context: trt.IExecutionContext | None = engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise RuntimeError(f"{loaded.name}: TensorRT could not create an execution context ({loaded.log.take()})")
        self._context: trt.IExecutionContext = context
        self._check(context.set_optimization_profile_async(kind, workspace.stream.handle), f"use profile {kind}")

    def most(self, tensor: str) -> Dims:
        return self._loaded.most(tensor, self._kind)

    def bind(self, tensor: str, address: int) -> None:
        self._check(self._context.set_tensor_address(tensor, address), f"set the address of {tensor}")

    def shape(self, tensor: str, dims: Dims) -> None:
        self._check(self._context.set_input_shape(tensor, dims), f"set {tensor} to {list(dims)}")

    def output(self, tensor: str, shape: Dims, block: str | None = None) -> int:
        """Assign device memory to an output and return the address. ``block``: the name of the memory block, by default the
        tensor's name.
        """
        address = self._workspace.at(block or tensor, prod(shape) * self._loaded.dtypes[tensor].itemsize)
        self.bind(tensor, address)
        return address

    def call(self, inputs: dict[str, NDArray], outputs: dict[str, Dims]) -> None:
        """Copy the inputs to the device and start a call, without waiting for its end."""
        workspace = self._workspace
        self._entered = [np.ascontiguousarray(array, self._loaded.dtypes[name]) for name, array in inputs.items()]
        for name, dense in zip(inputs, self._entered, strict=True):
            address = workspace.at(name, dense.nbytes)
            workspace.driver.copy_in(address, dense, workspace.stream)
            self.bind(name, address)
            self.shape(name, dense.shape)
        for name, shape in outputs.items():
            self.output(name, shape)
        needed = self._loaded.scratch_bytes  # other contexts may use this block between calls
        self._context.set_device_memory(workspace.at("scratch", needed), needed)
        self._check(self._context.execute_async_v3(workspace.stream.handle), "run")

    def fetch(self, shapes: dict[str, Dims]) -> dict[str, NDArray]:
        """Wait for the call's end and return copies of the outputs in host memory. ``shapes``: the outputs' shapes by name."""
        found = {name: np.empty(shape, self._loaded.dtypes[name]) for name, shape in shapes.items()}
        for name, array in found.items():
            self._workspace.driver.copy_out(array, self._workspace.at(name, 0), self._workspace.stream)
        self._workspace.stream.synchronize()
        return found

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._loaded.name}: TensorRT could not {what} ({self._loaded.log.take()})")
