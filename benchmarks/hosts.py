"""Hosts of a cluster on one Linux machine: each with a network card, processes, shared memory and folders of its own.

Adds: `hosts`, a block in which they exist; `Hosts`, to run commands on them and to read what their cards have sent;
`why_not`, the reason where this machine does not allow it.
Leaves out: what runs on them (`cluster.py`).

A host is a set of kernel namespaces: network, process ids, shared memory, mounts and name. Its card is one end of a
pair of virtual cables; the other end is a port of a bridge, in namespaces that hold nothing else and lead nowhere. So
no byte leaves them. A token bucket on either end limits the rate, each way. Who is not root does it in a user
namespace.

All hosts lie inside the bridge's process namespace, whose first process reads a pipe of ours. When the pipe closes, by
the end of the block or by the end of this program, however sudden, it ends, and the kernel ends all the others; with
them go the mounts and the cards. There is nothing to undo.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_NEW = ("--net", "--pid", "--ipc", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
_USER = ("--user", "--map-root-user")
_SUBNET = "10.77.0"  # seen by nobody else
_GATE = f"{_SUBNET}.254"  # the default route: Ray finds its own address by it, though it leads nowhere
_BURST = "64kb"  # that passes at once: a packet as the kernel hands it on, before it is cut for the wire
_QUEUE = "100ms"  # that a packet may wait for its turn; then TCP slows down
_SECONDS = 20.0  # for a command that only sets something up
_END_SECONDS = 10.0
_SHM, _OWN = "2g", "512m"  # at most; memory is taken as it is used


@dataclass(frozen=True, slots=True)
class Host:
    """What a host is like.

    Attributes:
        name: its host name.
        megabits: a second that its card carries, each way; None for no limit.
    """

    name: str
    megabits: float | None = None


class Hosts:
    """Hosts that are there; made by `hosts`.

    Attributes:
        folder: of each host's own, empty at first, at the same short path on all of them.
    """

    def __init__(self, wanted: Sequence[Host], shared: Path, user: tuple[str, ...]) -> None:
        self.folder = shared / "own"
        self._shared = shared
        self._user = user
        self._addresses = {host.name: f"{_SUBNET}.{number}" for number, host in enumerate(wanted, 1)}
        self._pids: dict[str, int] = {}
        self._started: list[subprocess.Popen[str]] = []
        self._holders: list[subprocess.Popen[str]] = []

    def address(self, name: str) -> str:
        """Of a host, on the network that they share."""
        return self._addresses[name]

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on a host, with pipes for standard input and output; it ends with the block at the latest.

        Args:
            name: of the host.
            command: and its arguments.
            env: its environment; by default ours.
        """
        with (self._shared / f"stderr-{len(self._started)}").open("w+") as errors:
            process = subprocess.Popen(
                [*self._enter(self._pids[name]), *command],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C goes to this program alone
            )
        self._started.append(process)
        return process

    def errors(self, process: subprocess.Popen[str]) -> str:
        """The end of what a command that was started has written to standard error."""
        return (self._shared / f"stderr-{self._started.index(process)}").read_text(errors="replace")[-2000:].strip()

    def run(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, seconds: float = _SECONDS
    ) -> str:
        """What a command prints on a host. What it leaves running there goes on.

        Raises:
            RuntimeError: it failed.
            subprocess.TimeoutExpired: it took too long.
        """
        return _checked([*self._enter(self._pids[name]), *command], seconds, env)

    def clear(self, name: str) -> None:
        """Ends all that runs on a host."""
        self.run(
            name, ["sh", "-ec", "grep -qx cat /proc/1/comm; kill -9 -1 || true"]
        )  # sees but its own, spares the first

    def sent(self) -> dict[str, int]:
        """Bytes that each host's card has sent so far, headers included."""
        return {name: _sent(self._pids[name]) for name in self._addresses}

    def _enter(self, pid: int, *, only_network: bool = False) -> list[str]:
        """The command that runs another one where a process is."""
        user = ["--user", "--preserve-credentials"] if self._user else []
        rest = [] if only_network else ["--pid", "--ipc", "--mount", "--uts"]
        return ["nsenter", "--target", str(pid), *user, "--net", *rest, "--"]

    def _build(self, wanted: Sequence[Host]) -> None:
        names = "".join(f"{address} {name}\n" for name, address in self._addresses.items())
        (self._shared / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self._shared / "resolv.conf").touch()  # nobody to ask for other names
        self.folder.mkdir()
        bridge = self._hold(["unshare", *self._user, *_NEW])
        ports = self._enter(bridge, only_network=True)
        _script(ports, "ip link set lo up", "ip link add bridge type bridge", f"ip address add {_GATE}/24 dev bridge")
        # Whatever is meant for the world outside is refused at once, instead of waiting for an answer.
        _script(ports, "ip link set bridge up", "ip route add unreachable default")
        _script(self._enter(bridge), "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host in wanted:
            pid = self._pids[host.name] = self._hold([*self._enter(bridge), "unshare", *_NEW])
            port = f"to-{host.name}"
            _script(
                ports,
                f"ip link add {port} type veth peer name eth0 netns {pid}",
                f"ip link set {port} master bridge up",
                *_limit(port, host),
            )
            _script(
                self._enter(pid),
                f"echo {host.name} > /proc/sys/kernel/hostname",
                f"mount -t tmpfs -o size={_SHM},mode=1777 tmpfs /dev/shm",
                f"mount -t tmpfs -o size={_OWN},mode=1777 tmpfs {self.folder}",
                *(f"mount --bind {self._shared / name} /etc/{name}" for name in ("hosts", "resolv.conf")),
                "ip link set lo up",
                f"ip address add {self.address(host.name)}/24 dev eth0",
                "ip link set eth0 up",
                f"ip route add default via {_GATE}",
                *_limit("eth0", host),
            )

    def _hold(self, command: Sequence[str]) -> int:
        """Starts a process that does nothing in namespaces of its own, until our end of its pipe closes."""
        holder = subprocess.Popen(
            [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )
        self._holders.append(holder)
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end and holder.poll() is None:
            last = _last_child(holder.pid)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{last}/comm").read_text() == "cat\n":
                    return last
            time.sleep(0.01)
        raise RuntimeError(f"no namespaces within {_SECONDS:.0f} s: `{shlex.join(command)}` ended with {holder.poll()}")

    def _end(self) -> None:
        for holder in self._holders[:1]:  # the bridge's, around all others
            assert holder.stdin is not None
            holder.stdin.close()
        for process in [*self._holders, *self._started]:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # and with it, by --kill-child, what it holds
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


@contextlib.contextmanager
def hosts(wanted: Sequence[Host]) -> Iterator[Hosts]:
    """Hosts, for as long as the block runs. SIGTERM ends the block as Ctrl-C does.

    Args:
        wanted: at least one, each of another name of at most 12 characters, since a card's name is short.

    Raises:
        ValueError: names that can't be.
        RuntimeError: this machine does not allow it, with the reason.
    """
    names = [host.name for host in wanted]
    if not names or len(set(names)) < len(names) or not all(name.isalnum() and len(name) <= 12 for name in names):
        raise ValueError(f"hosts named {names}: give at least one, each another name of at most 12 letters and digits")
    for host in wanted:
        if host.megabits is not None and not 0.1 <= host.megabits <= 10_000:
            raise ValueError(f"a card of {host.megabits} Mbit/s: give 0.1 to 10,000, or None for no limit")
    if reason := why_not():
        raise RuntimeError(reason)
    user = _user()
    assert user is not None
    shared = Path(tempfile.mkdtemp(prefix="mmdp-hosts-", dir="/tmp"))  # a path of a socket must be short
    here = Hosts(wanted, shared, user)
    with _ended_by_sigterm():
        try:
            here._build(wanted)
            yield here
        finally:
            here._end()
            shutil.rmtree(shared, ignore_errors=True)


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts on this machine, and what would help; None where there can."""
    if sys.platform != "linux":
        return (
            f"hosts are made of namespaces of the Linux kernel, and this is {sys.platform}: use a Linux machine or VM"
        )
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here: install the packages util-linux and iproute2"
    if _user() is None:
        return (
            f"this machine does not allow namespaces: {_probe(_USER)}. Run it as root, or allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    return None


@functools.cache
def _user() -> tuple[str, ...] | None:
    """What `unshare` needs for it; None where nothing does."""
    ways: list[tuple[str, ...]] = [(), _USER] if os.geteuid() == 0 else [_USER]
    return next((way for way in ways if _probe(way) is None), None)


def _probe(user: tuple[str, ...]) -> str | None:
    """What goes wrong when namespaces, cards and limits are made for a moment; None where nothing does."""
    try:
        _script(
            ["unshare", *user, *_NEW],
            "ip link add bridge type bridge",
            "ip link add port type veth peer name eth0",
            *_limit("port", Host("probe", 1)),
            "mount -t tmpfs tmpfs /dev/shm",
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def _limit(card: str, host: Host) -> list[str]:
    if host.megabits is None:
        return []
    rate = f"{1000 * host.megabits:.0f}kbit"
    return [f"tc qdisc add dev {card} root tbf rate {rate} burst {_BURST} latency {_QUEUE}"]


def _script(where: Sequence[str], *lines: str) -> None:
    """Runs lines of a shell, and stops at the first that fails."""
    _checked([*where, "sh", "-ec", "\n".join(lines)], _SECONDS)


def _checked(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(f"`{command[0]}` ended with {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def _last_child(pid: int) -> int:
    """The child of the child, and so on, of processes that have one each."""
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return pid
        if not children:
            return pid
        pid = int(children[0])


def _sent(pid: int) -> int:
    """Bytes sent by the card of the host where a process is: what its /sys/class/net tells, seen from outside."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        card, _, counters = line.partition(":")
        if card.strip() == "eth0":
            return int(counters.split()[8])  # eight counters of what came in are before it
    raise RuntimeError("the host has lost its card")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile, so that blocks end in order; only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
