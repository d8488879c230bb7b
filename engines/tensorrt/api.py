"""Every call of TensorRT's Python API, for 10.3 and newer: nothing else imports ``tensorrt``.

Each object of TensorRT stands in a variable annotated with its class, so that tests/engines/test_tensorrt_api.py can look up
every class, member and argument count in what each version really has. What TensorRT says goes to a :class:`Log`, whose errors
are part of what is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt as trt

from edgevlm.engines.tensorrt.jobs import CallShapes, Dims
from edgevlm.errors import UserError
from edgevlm.progress import Notify

VERSION: str = trt.__version__
DTYPES: dict[Any, np.dtype] = {
    trt.DataType.FLOAT: np.dtype(np.float32),
    trt.DataType.HALF: np.dtype(np.float16),
    trt.DataType.INT32: np.dtype(np.int32),
    trt.DataType.INT64: np.dtype(np.int64),
}
MOST_ERRORS = 3  # of one failure that are told


class Log(trt.ILogger):
    """Errors and warnings, kept until they are taken; from any thread."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self._lock = threading.Lock()
        self._errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT; must not raise."""
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            with self._lock:
                self._errors.append(" ".join(msg.split()))

    def take(self) -> str:
        """The errors since the last call, first ones first, in one line; empty for none."""
        with self._lock:
            found, self._errors = self._errors, []
        more = f" (and {len(found) - MOST_ERRORS} more)" if len(found) > MOST_ERRORS else ""
        return "; ".join(found[:MOST_ERRORS]) + more


class Monitor(trt.IProgressMonitor):
    """Tells how far a build has come, and stops it when it was cancelled. Called by TensorRT from its own threads."""

    def __init__(self, progress: Notify) -> None:
        trt.IProgressMonitor.__init__(self)
        self._progress, self._steps = progress, dict[str, int]()
        self.cancelled = threading.Event()

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        self._steps[phase_name] = num_steps

    def step_complete(self, phase_name: str, step: int) -> bool:
        with suppress(Exception):  # nothing may be raised into TensorRT
            self._progress(f"{phase_name}, step {step + 1} of {self._steps.get(phase_name, step + 1)}")
        return not self.cancelled.is_set()

    def phase_finish(self, phase_name: str) -> None:
        self._steps.pop(phase_name, None)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an engine is built from: the bytes of its ONNX file, the path its weights lie beside, and how it will be called.

    dropped: outputs of the graph that the engine is made without. workspace: bytes a layer may work with. cache: a timing cache
    of an earlier build, or empty.
    """

    model: bytes
    path: str
    calls: Sequence[CallShapes]
    dropped: frozenset[str]
    workspace: int
    cache: bytes


@dataclass(frozen=True, slots=True)
class Built:
    """A serialised engine, and the timing cache with what this build has measured."""

    plan: memoryview
    cache: bytes


def build(recipe: Recipe, monitor: Monitor, log: Log) -> Built:
    """Build an engine. Strongly typed: every type is the graph's.

    Raises UserError, with TensorRT's words, where it does not start, does not take the graph, or finds no engine for it;
    KeyboardInterrupt where the monitor was cancelled.
    """
    builder: trt.Builder = _started(lambda: trt.Builder(log), log)
    network: trt.INetworkDefinition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(network, recipe, log)
    _drop_outputs(network, recipe.dropped)
    if hasattr(trt, "IAttention"):  # 10.3 has none
        _allow_several_kernels(network)
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, recipe.workspace)
    config.progress_monitor = monitor
    timings: trt.ITimingCache = config.create_timing_cache(recipe.cache)
    if not config.set_timing_cache(timings, False):
        timings = config.create_timing_cache(b"")
        config.set_timing_cache(timings, False)
    for call in recipe.calls:
        _add_profile(builder, config, call, recipe.path, log)
    plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if monitor.cancelled.is_set():
        raise KeyboardInterrupt
    if plan is None:
        raise UserError(f"{recipe.path}: TensorRT {VERSION} made no engine of it ({log.take() or 'no reason given'})")
    log.take()
    serialised: trt.IHostMemory = timings.serialize()
    return Built(memoryview(plan), bytes(serialised))


def _started(start: Callable[[], Any], log: Log) -> Any:
    try:
        return start()
    except TypeError:  # what the bindings make of a null pointer
        reason = log.take() or "no reason given"
        raise UserError(
            f"TensorRT {VERSION} does not start here ({reason}); edgevlm doctor says whether the GPU can be used"
        ) from None


def _parse(network: trt.INetworkDefinition, recipe: Recipe, log: Log) -> None:
    parser: trt.OnnxParser = trt.OnnxParser(network, log)
    if parser.parse(recipe.model, recipe.path):
        return
    said = []
    for index in range(min(parser.num_errors, MOST_ERRORS)):
        error: trt.ParserError = parser.get_error(index)
        said.append(f"node {error.node_name() or error.node()} ({error.node_operator()}): {' '.join(error.desc().split())}")
    more = f" (and {parser.num_errors - MOST_ERRORS} more)" if parser.num_errors > MOST_ERRORS else ""
    words = "; ".join(said) + more or log.take() or "no reason given"
    log.take()
    raise UserError(
        f"{recipe.path}: TensorRT {VERSION} cannot parse it: {words}; export the checkpoint again for this TensorRT "
        "(edgevlm export --device NAME --jetpack VERSION)"
    )


def _drop_outputs(network: trt.INetworkDefinition, dropped: frozenset[str]) -> None:
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    tensor: trt.ITensor
    for tensor in outputs:
        if tensor.name in dropped:
            network.unmark_output(tensor)


def _allow_several_kernels(network: trt.INetworkDefinition) -> None:
    """Let attention become several kernels where there is no fused one for it, as TensorRT does not by itself."""
    for index in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings give every layer as an ILayer
            boundary: trt.IAttentionInputLayer = layer
            attention: trt.IAttention = boundary.attention
            attention.decomposable = True


def _add_profile(builder: trt.Builder, config: trt.IBuilderConfig, call: CallShapes, path: str, log: Log) -> None:
    profile: trt.IOptimizationProfile = builder.create_optimization_profile()
    try:
        for name, (least, usual, most) in call.inputs.items():
            profile.set_shape(name, least, usual, most)
    except ValueError as error:
        raise UserError(f"{path}: TensorRT {VERSION} refuses the shapes of {call.name} calls ({error})") from None
    if config.add_optimization_profile(profile) < 0:
        raise UserError(f"{path}: TensorRT {VERSION} refuses the shapes of {call.name} calls ({log.take()})")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of an engine; a dimension of -1 is given with each call."""

    name: str
    is_input: bool
    dtype: np.dtype
    shape: Dims


class Loaded:
    """An engine in memory. Keeps what TensorRT needs of it alive."""

    def __init__(self, plan: memoryview, name: str, log: Log) -> None:
        """Raises UserError for a plan of another TensorRT or GPU."""
        self._runtime: trt.Runtime = _started(lambda: trt.Runtime(log), log)
        engine: trt.ICudaEngine | None = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise UserError(
                f"{name}: TensorRT {VERSION} cannot load it ({log.take() or 'no reason given'}); build it again "
                "(edgevlm build BUNDLE --force)"
            )
        self._engine: trt.ICudaEngine = engine
        self.name, self._log = name, log
        self.scratch_bytes = int(engine.device_memory_size_v2)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors: Mapping[str, Tensor] = {name: self._tensor(engine, name) for name in names}

    def _tensor(self, engine: trt.ICudaEngine, name: str) -> Tensor:
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        return Tensor(name, is_input, DTYPES[engine.get_tensor_dtype(name)], tuple(engine.get_tensor_shape(name)))

    def most(self, tensor: str, call: int) -> Dims:
        """The largest shape of an input in a kind of call, by its number."""
        return tuple(self._engine.get_tensor_profile_shape(tensor, call)[2])

    def context(self, call: int, stream: int) -> ExecutionContext:
        """For calls of one kind, and for them alone; its working memory is given with :meth:`ExecutionContext.work_in`."""
        context: trt.IExecutionContext | None = self._engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise RuntimeError(f"{self.name}: TensorRT made no execution context ({self._log.take() or 'no reason given'})")
        return ExecutionContext(context, self.name, call, stream, self._log)


class ExecutionContext:
    """An engine's calls of one kind. Addresses and shapes stay as they were given until they are given again.

    ``version`` counts every change: what was recorded of a call is good for as long as it stays the same.
    """

    def __init__(self, context: trt.IExecutionContext, name: str, call: int, stream: int, log: Log) -> None:
        self._context: trt.IExecutionContext = context
        self._name, self._stream, self._log = name, stream, log
        self._given = dict[Any, Any]()
        self.version = 0
        self._check(context.set_optimization_profile_async(call, stream), f"take calls of kind {call}")

    def work_in(self, address: int, nbytes: int) -> None:
        """Device memory to work in, which other contexts may use between the calls."""
        if self._is_new("", (address, nbytes)):
            self._context.set_device_memory(address, nbytes)

    def bind(self, tensor: str, address: int) -> None:
        """Read or write a tensor at a device address."""
        if self._is_new(("address", tensor), address):
            self._check(self._context.set_tensor_address(tensor, address), f"take an address for {tensor}")

    def shape(self, tensor: str, dims: Dims) -> None:
        """The shape of an input from now on."""
        if self._is_new(("shape", tensor), dims):
            self._check(self._context.set_input_shape(tensor, dims), f"take {list(dims)} for {tensor}")

    def run(self) -> None:
        """Ask the stream to run the engine; returns before it has. Raises RuntimeError with TensorRT's words."""
        self._check(self._context.execute_async_v3(self._stream), "run")

    def _is_new(self, key: Any, value: Any) -> bool:
        if self._given.get(key) == value:
            return False
        self._given[key] = value
        self.version += 1
        return True

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._name}: TensorRT did not {what} ({self._log.take() or 'no reason given'})")
