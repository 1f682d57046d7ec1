"""Every error lowbit raises on purpose.

A message holds the rule, the value found and the remedy; nothing here knows about tensors, compilers or chips.
"""

from __future__ import annotations

from collections.abc import Sequence


class LowbitError(Exception):
    """Base of all errors raised by lowbit."""


class Unsupported(LowbitError):
    """What was asked for cannot be done; `reasons` holds one sentence per obstacle, each with its remedy."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[tuple[str, ...]]]:
        return Unsupported, (self.reasons,)  # the default would rebuild it from the joined message


class BadInput(LowbitError, ValueError):
    """An argument has a wrong value or shape."""


class BadType(LowbitError, TypeError):
    """An argument has a wrong type or dtype."""


class UnknownSpec(BadInput):
    """A weight-spec or number-format name that does not parse; the message suggests the nearest valid one."""


class MissingKernel(LowbitError):
    """Compiling is switched off and the kernel is not in the cache."""


class CompileError(LowbitError):
    """A generated kernel did not compile; the message has the command and the first lines of the compiler's log."""


class LaunchError(LowbitError):
    """The CUDA driver refused to load or to launch a kernel."""


class BadCheckpoint(LowbitError):
    """A checkpoint contradicts its own description."""
