"""The folder that lowbit may write to: LOWBIT_CACHE, ~/.cache/lowbit, or a private folder where those refuse.

It must not know what is kept there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def default_directory() -> Path:
    """LOWBIT_CACHE if set, else ~/.cache/lowbit (XDG_CACHE_HOME respected). Not created, perhaps not writable."""
    named = os.environ.get("LOWBIT_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path("~/.cache").expanduser()) / "lowbit"


def writable_directory(wanted: Path) -> Path:
    """`wanted`, created if need be, when files can be made in it; else a private folder in the temporary directory.

    The probe makes a file: permission bits say nothing about read-only mounts, full disks or what root may do.
    """
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError:
        return _private_directory(Path(tempfile.gettempdir()) / f"lowbit-{os.geteuid()}")


def _private_directory(shared: Path) -> Path:
    """`shared` if it is this user's alone, so that later processes find it again; else a fresh one for this process.

    A folder of a known name under /tmp may have been put there by another user, and what is read from it runs.
    """
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        facts = shared.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
            return shared
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="lowbit-"))
