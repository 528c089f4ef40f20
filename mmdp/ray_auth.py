"""A token that a cluster asks for: shown by this program too, where Ray itself would show it.

Adds: `TokenMode`, which follows a cluster, and lets go again; `AskedForToken`, what to do where it can't.
Leaves out: joining (`ray_start`).

`ray start` asks everybody for a token as soon as this user has one, in `RAY_AUTH_TOKEN`, in the file of
`RAY_AUTH_TOKEN_PATH`, or in `~/.ray/auth_token`; the first plain `ray.init()` has written that. A program shows its
token only with `RAY_AUTH_MODE=token`. Ray sets that by itself for a cluster that it finds, and never for an address.
Here it is set for an address as well, if the cluster is on this machine and asks: a token is shown to no other machine
unless the user says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

AUTH_MODE = "RAY_AUTH_MODE"
_PLACES = "RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token"
_REMEDY = "`ray get-auth-token` prints it where that Ray was started"
_OWN_LINE = b"gcs_client.cc"  # in what Ray writes to stderr about a refusal, whatever is done about it


class AskedForToken(RuntimeError):  # noqa: N818 - says what happened
    """A cluster asks for a token that this program does not show."""


class TokenMode:
    """Whether this program shows its token, where the user has not said it."""

    def __init__(self) -> None:
        self._is_ours = False
        self._before: str | None = None

    def follow(self, address: str, mode: str | None) -> None:
        """Shows the token from now on, if the cluster asks for it.

        Args:
            address: of the cluster, host:port.
            mode: `RAY_AUTH_MODE` as the user has set it; None where he has not.

        Raises:
            AskedForToken: it asks, and there is none, or the user has said otherwise.
        """
        self.leave()
        _read_again()  # it may have been set since ray was imported
        is_shown = mode is not None and mode.lower() == "token"
        if is_shown and not _has_token():  # Ray would end the whole program
            raise AskedForToken(f"{AUTH_MODE} is token, and there is no token here, in {_PLACES}: {_REMEDY}")
        if not _asks(address):
            return
        if mode is None and _is_here(address.rsplit(":", 1)[0]) and _has_token():
            self._before, self._is_ours = os.environ.get(AUTH_MODE), True
            os.environ[AUTH_MODE] = "token"
            _read_again()
            if not _asks(address):
                return
            self.leave()
            is_shown = True
        if is_shown:
            raise AskedForToken(
                f"the Ray at {address} asks for another token than there is here, in {_PLACES}: {_REMEDY}"
            )
        raise AskedForToken(
            f"the Ray at {address} asks for a token: set {AUTH_MODE}=token here (or =disabled at `ray start`)"
            + ("" if _has_token() else f"; there is none here, in {_PLACES}: {_REMEDY}")
        )

    def leave(self) -> None:
        """As before; what the user has set stays."""
        if self._is_ours:
            self._is_ours = False
            if self._before is None:
                os.environ.pop(AUTH_MODE, None)
            else:
                os.environ[AUTH_MODE] = self._before
            _read_again()


def _read_again() -> None:
    """Ray has read the environment when it was imported."""
    import_module("ray._raylet").Config.initialize("")


def _asks(address: str) -> bool:
    """Whether a cluster refuses this program, as it is set now. It takes some milliseconds."""
    raylet: Any = import_module("ray._raylet")
    with _without_own_line():
        try:
            raylet.GcsClient(address=address)
        except import_module("ray.exceptions").AuthenticationError:
            return True
        except Exception:
            return False
    return False


def _has_token() -> bool:
    tokens = import_module("ray._raylet").AuthenticationTokenLoader.instance()
    tokens.reset_cache()
    return bool(tokens.has_token(ignore_auth_mode=True))


def _is_here(host: str) -> bool:
    """Whether a host is this machine: only then may a socket have its address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind((socket.gethostbyname(host), 0))
        return True
    return False


@contextlib.contextmanager
def _without_own_line() -> Iterator[None]:
    """What is written to stderr inside comes after it, but for the line that Ray's own C++ writes about a refusal."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        before = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            rest = b"".join(line for line in kept if _OWN_LINE not in line)
            if rest:
                os.write(2, rest)
