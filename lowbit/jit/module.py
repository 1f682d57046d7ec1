"""Cubins loaded into devices, and launches prepared so that one costs a few microseconds of host time.

It must not know about compilers, plans or tensors: it gets bytes, numbers and a struct.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.errors import LaunchError
from lowbit.jit.compile import Compiled
from lowbit.jit.driver import (
    ATTRIBUTE_CLUSTER_DIMENSION,
    ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    Driver,
    LaunchAttribute,
    LaunchConfig,
)

_PORTABLE_CLUSTER = 8
"""Clusters up to this size run on every device that has clusters; larger ones must be asked for."""

_DEFAULT_SMEM_BYTES = 48 * 1024
"""Dynamic shared memory a kernel may use without being asked for."""


class Kernel:
    """A kernel loaded into one context of one device. Made by `Modules.load`, usable from any thread."""

    def __init__(self, driver: Driver, label: str, device_index: int, context: int, function: int) -> None:
        self.driver = driver
        self.label = label
        self.device_index = device_index
        self.context = context
        self.function = function
        self._smem_bytes = _DEFAULT_SMEM_BYTES

    def prepare(
        self,
        params: ctypes.Structure,
        block: tuple[int, int, int],
        smem_bytes: int = 0,
        *,
        cluster: int = 1,
        pdl: bool = False,
    ) -> Launch:
        """Fix everything but grid x, grid y, the stream and the values in `params`.

        `params` is the kernel's one parameter, a struct passed by value; `smem_bytes` is dynamic shared memory;
        `cluster` is in blocks along grid x; `pdl` lets the kernel start before the one ahead of it in the stream ends.
        Raises LaunchError if the struct's size is not what the kernel declares, or the device refuses a figure.
        """
        self._check_params(ctypes.sizeof(params))
        if smem_bytes > self._smem_bytes:
            self._set(FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
            self._smem_bytes = smem_bytes
        if cluster > _PORTABLE_CLUSTER:
            self._set(FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        return Launch(self, params, block, smem_bytes, cluster=cluster, pdl=pdl)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        params: ctypes.Structure,
        stream: int,
        *,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        """Prepare and launch at once, for what runs rarely; errors as in `prepare` and `Launch.__call__`."""
        prepared = self.prepare(params, block, smem_bytes, cluster=cluster, pdl=pdl)
        prepared.config.grid_z = grid[2]
        prepared(grid[0], grid[1], stream)

    def _set(self, attribute: int, value: int) -> None:
        with _current(self.driver, self.context):
            doing = f"{self.label} on device {self.device_index}, function attribute {attribute} = {value}"
            self.driver.call(doing, "cuFuncSetAttribute", ctypes.c_void_p(self.function), attribute, value)

    def _check_params(self, size: int) -> None:
        """The driver copies as many bytes as the kernel declares, whatever the struct given to it holds."""
        query = getattr(self.driver.library, "cuFuncGetParamInfo", None)  # since CUDA 12.4
        offset, declared = ctypes.c_size_t(), ctypes.c_size_t()
        arguments = (ctypes.c_void_p(self.function), ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(declared))
        if query is not None and query(*arguments) == 0 and declared.value != size:
            sizes = f"its parameter struct has {declared.value} bytes, the one given has {size}"
            raise LaunchError(f"{self.label}: {sizes}; both sides must declare the same fields")


class Launch:
    """One launch of a kernel, all prepared: fill `params`, then call with the grid and the stream.

    `params` and the configuration are reused by every call and read before it returns, so one Launch serves one thread
    at a time: each thread prepares its own, or a lock covers filling `params` and the call.
    """

    def __init__(
        self,
        kernel: Kernel,
        params: ctypes.Structure,
        block: tuple[int, int, int],
        smem_bytes: int,
        *,
        cluster: int,
        pdl: bool,
    ) -> None:
        self.kernel = kernel
        self.params = params
        self._attributes = _attributes(cluster, pdl)
        num_attributes = len(self._attributes)
        self.config = LaunchConfig(1, 1, 1, *block, smem_bytes, None, self._attributes, num_attributes)
        # What a call needs and would otherwise make or look up anew, 0.1 us a piece.
        self._config_ref = ctypes.byref(self.config)
        self._function = ctypes.c_void_p(kernel.function)
        self._params_ref = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._launch = kernel.driver.library.cuLaunchKernelEx
        self._get_current = kernel.driver.library.cuCtxGetCurrent
        self._current = ctypes.c_void_p()
        self._current_ref = ctypes.byref(self._current)
        self._context = kernel.context

    def __call__(self, grid_x: int, grid_y: int, stream: int) -> None:
        """Launch a grid of (grid_x, grid_y, 1) blocks, at least one, into `stream` (its handle as an integer).

        The kernel's device must be the current one, since a handle of 0 means the current device's stream; a thread
        that has used no device yet gets the kernel's.
        Raises LaunchError if it is not, or if the driver refuses the launch.
        """
        self.bind()
        config = self.config
        config.grid_x = grid_x
        config.grid_y = grid_y
        config.stream = stream
        status = self._launch(self._config_ref, self._function, self._params_ref, None)
        if status:
            raise self._refused(status)

    def bind(self) -> None:
        """Give the kernel's context to a thread that has none yet; LaunchError where another device's is current.

        The CUDA runtime, and torch with it, binds a context to a new thread only at its first call that needs one. Every launch does
        this; other calls of the driver that serve one must come after it.
        """
        self._get_current(self._current_ref)
        if self._current.value == self._context:
            return
        index, label = self.kernel.device_index, self.kernel.label
        if self._current.value is not None:
            raise LaunchError(
                f"{label} is loaded on device {index}, which is not current: use torch.cuda.device({index})"
            )
        self.kernel.driver.call(f"{label} on device {index}", "cuCtxSetCurrent", ctypes.c_void_p(self._context))

    def _refused(self, status: int) -> LaunchError:
        config, kernel = self.config, self.kernel
        grid = f"grid {(config.grid_x, config.grid_y, config.grid_z)}"
        block = f"block {(config.block_x, config.block_y, config.block_z)}"
        rest = f"{config.smem_bytes} bytes of dynamic shared memory, {config.num_attributes} attributes"
        doing = f"{kernel.label} on device {kernel.device_index} ({grid}, {block}, {rest})"
        return kernel.driver.error(doing, "cuLaunchKernelEx", status)


class Modules:
    """Every kernel this process has loaded, by device, context and content; loading twice gives the same Kernel.

    Nothing is ever unloaded: a captured CUDA graph may still hold any of them, and a cubin takes some 50 KB.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        """Uses `driver`, or libcuda, which is then opened by the first `load`."""
        self._driver = driver
        self._contexts: dict[int, int] = {}
        self._kernels: dict[tuple[int, int, bytes, str], Kernel] = {}
        self._lock = threading.Lock()

    def load(self, compiled: Compiled, device_index: int) -> Kernel:
        """The kernel of `compiled` in the primary context of device `device_index`, which need not be current.

        Raises Unsupported without a driver, LaunchError if the driver refuses the cubin.
        """
        entry = compiled.source.entry
        with self._lock:
            self._driver = self._driver or Driver.open()
            if device_index not in self._contexts:
                self._contexts[device_index] = self._driver.primary_context(device_index)
            context = self._contexts[device_index]
            key = (device_index, context, hashlib.sha256(compiled.cubin).digest(), entry)
            if key not in self._kernels:
                source = compiled.source
                doing = f"loading {source.label} for {source.arch} on device {device_index}"
                with _current(self._driver, context):
                    function = _load_function(self._driver, doing, compiled.cubin, entry)
                self._kernels[key] = Kernel(self._driver, source.label, device_index, context, function)
            return self._kernels[key]


@functools.cache
def default_modules() -> Modules:
    """The process's own registry, made when first asked for: a device's memory is shared by the process, so is this."""
    return Modules()


def load(compiled: Compiled, device_index: int) -> Kernel:
    """`Modules.load` of the process's own registry."""
    return default_modules().load(compiled, device_index)


def _load_function(driver: Driver, doing: str, cubin: bytes, entry: str) -> int:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call(doing, "cuModuleLoadData", ctypes.byref(module), cubin)
    try:
        driver.call(doing, "cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if hasattr(driver.library, "cuFuncLoad"):
            # Since CUDA 12.4. Modules load lazily by default, at the first launch, which may be inside a graph capture.
            driver.call(doing, "cuFuncLoad", function)
    except LaunchError:
        driver.library.cuModuleUnload(module)
        raise
    return function.value or 0


@contextmanager
def _current(driver: Driver, context: int) -> Iterator[None]:
    """Make `context` current for a while and leave what was current as it was."""
    current = ctypes.c_void_p()
    driver.call("asking for the current context", "cuCtxGetCurrent", ctypes.byref(current))
    if current.value == context:
        yield
        return
    driver.call("changing the current context", "cuCtxPushCurrent_v2", ctypes.c_void_p(context))
    try:
        yield
    finally:
        driver.library.cuCtxPopCurrent_v2(ctypes.byref(current))


def _attributes(cluster: int, pdl: bool) -> ctypes.Array[LaunchAttribute]:
    attributes = []
    if cluster > 1:
        attributes.append(LaunchAttribute(ATTRIBUTE_CLUSTER_DIMENSION))
        attributes[-1].value.cluster[:] = (cluster, 1, 1)
    if pdl:
        attributes.append(LaunchAttribute(ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION))
        attributes[-1].value.flag = 1
    return (LaunchAttribute * len(attributes))(*attributes)
