# SPDX-License-Identifier: Apache-2.0
"""`jax.jit` with compiler options of the platform that it runs on."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from klear_jax.core import mesh as mesh_lib

OPTIONS: dict[str, dict[str, Any]] = {
    # A layer's weights are sliced out of the stack. The default scheduler slices them all before
    # the first product; this one slices just before each use, while the cache still has them: a
    # decode step of 16 rows takes a quarter less time (docs/performance.md).
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
}


class PlatformJit:
    """A function that is jitted with the options of the platform in use.

    The platform is looked up at the first call, since asking for it starts the devices, which must
    wait for `jax.distributed`.
    """

    def __init__(self, function: Callable, arguments: dict[str, Any]):
        self._function, self._arguments = function, arguments
        self._jitted: dict[str, Any] = {}
        functools.update_wrapper(self, function)

    def jitted(self, platform: str) -> Any:
        """What `jax.jit` made for a platform."""
        if platform not in self._jitted:
            self._jitted[platform] = jax.jit(
                self._function, compiler_options=OPTIONS.get(platform), **self._arguments
            )
        return self._jitted[platform]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.jitted(mesh_lib.platform())(*args, **kwargs)


def platform_jit(**arguments: Any) -> Callable[[Callable], PlatformJit]:
    """A decorator: `jax.jit(function, **arguments)` with `OPTIONS` of the platform in use."""
    return lambda function: PlatformJit(function, arguments)
