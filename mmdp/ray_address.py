"""Addresses of a cluster: whether two mean the same one, and whether one is reached on this machine alone.

Adds: `is_at`, `is_on_loopback_alone`. Leaves out: joining it (`ray_start`), tokens (`ray_auth`).
"""

from __future__ import annotations

import socket
from typing import Any

REACH_SECONDS = 10.0
"""For a cluster to take a connection."""


def is_at(address: str, here: str) -> bool:
    """Whether an address, as a user gives it, is that of a cluster, as Ray knows it."""
    if ":" not in address or "://" in address:  # such as "auto"
        return True
    host, port = address.rsplit(":", 1)
    there, known = here.rsplit(":", 1)
    if port != known:
        return False
    found = _resolved(host)
    return found == there or found.startswith("127.")


def _resolved(host: str) -> str:
    """The number of a host; the host as it is, where nobody knows it."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def is_on_loopback_alone(ray: Any, host: str, port: int) -> bool:
    """Whether a Ray that answers at this host does not where Ray itself would look for it, at a network card."""
    if not _resolved(host).startswith("127."):
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), port), REACH_SECONDS).close()
    except OSError:
        return True
    return False
