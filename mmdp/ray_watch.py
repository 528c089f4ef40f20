"""Says that the Ray of this machine has ended, before Ray ends the program.

Adds: `watch`; `raylet_pid`, whom it watches.

Where the Ray of this machine goes, Ray ends every program that reads from it, without an error, a `finally` or a line:
`_exit(1)`, deep in its C++, at the next use. A thread that waits for that end says on standard error what happened.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def raylet_pid() -> int | None:
    """Ray's own process on this machine, of the Ray that this program is on; None where nobody says so."""
    node: Any = getattr(import_module("ray._private.worker"), "_global_node", None)
    name = getattr(node, "raylet_socket_name", None)
    for process in Path("/proc").glob("[0-9]*") if name else ():
        with contextlib.suppress(OSError):  # it has just ended
            if f"--raylet_socket_name={name}".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return int(process.name)
    return None


def watch(raylet: int | None, who: str) -> Callable[[], None]:
    """Says on standard error, once, when Ray's process ends; on Linux only.

    Args:
        raylet: the process; with None nothing is watched.
        who: reads from it, for the message.

    Returns:
        What ends the watch, and its thread; it may be called twice.
    """
    try:
        process = os.pidfd_open(raylet) if raylet is not None and hasattr(os, "pidfd_open") else None
    except OSError:  # an old kernel; or it has gone, and the next call says so
        process = None
    if process is None:
        return lambda: None
    closed, close = os.pipe()
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(closed)

    def look() -> None:
        ended = [file for file, _ in poll.poll()]
        if closed not in ended:
            print(
                f"mmdp: {who}: Ray has ended on this machine, most likely because the program that started it was "
                "killed. It may end this program too, with exit code 1 and no error: start again from the last state. "
                "With a Ray that is started apart (`ray start --head`) ranks get an error instead",
                file=sys.stderr,
                flush=True,
            )
        os.close(process)
        os.close(closed)

    thread = threading.Thread(target=look, name="mmdp-raylet", daemon=True)
    thread.start()
    ends = [close]

    def end() -> None:
        if ends:
            os.close(ends.pop())
            thread.join()

    return end
