"""A contender in a process of its own: nothing that one imports or leaves behind is there for the next.

Adds: `run_child`. Leaves out: what a child does, and which of its figures count.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run_child(
    command: Sequence[str], environment: Mapping[str, str], *, timeout: float, look: Callable[[int], Any] | None = None
) -> tuple[Any, Any]:
    """The JSON in a child's last line of output, and what `look` gave.

    Args:
        command: of the child.
        environment: all of it.
        timeout: seconds from when `look` returns, or from the start.
        look: called with the child's process id while it runs.

    Raises:
        RuntimeError: it failed; with what it wrote to stderr.
        TimeoutExpired: it took too long. It is ended then, as it is when anything else is raised here.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            seen = look(process.pid) if look is not None else None
            told = process.communicate(timeout=timeout)[0]
        except BaseException:
            process.terminate()
            raise
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()}")
        return json.loads(told.splitlines()[-1]), seen
