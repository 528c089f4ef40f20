"""A cluster on hosts of its own: an object store, nodes of Ray, a program that coordinates, and one for each rank.

Adds: `cluster`, a block in which it runs; `Size` and what it is made of; `Program`, to which commands are sent.
Leaves out: hosts (`hosts.py`), what the programs do (`cluster_programs.py`), measuring (`cluster.py`).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from cluster_programs import SAMPLES, SIDE
from hosts import Host, Hosts, hosts
from PIL import Image

from mmdp.local_store import BUCKET
from mmdp.progress import track
from mmdp.ray_start import load_ray

ROWS = 4  # a batch and rank
TRAIN_MS = 50 * ROWS * SAMPLES
WORKER_ROWS = 16  # that a worker has at a time
WORKER_CPUS, _HOST_CPUS = 2, 32  # twice as many as all workers ask for: Ray fills half a node, then takes the next
NEAR_CPUS, _RANK_CPUS = 0.1, 1  # not 0: for an actor that asks for nothing Ray takes any node, wherever it is wanted
_IMAGES = 512
_STORE_BYTES = 512 * 2**20  # object store of a node
_PORT, _STORE_PORT = 6379, 9000

UP_SECONDS = 120.0  # for a node of Ray, or a program that imports all it needs
ASK_SECONDS = 60.0


@dataclass(frozen=True)
class Cell:
    """A way to place workers, and to pass rows on."""

    placement: str
    by_value: bool

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.placement} by {'value' if self.by_value else 'reference'}"


@dataclass(frozen=True)
class Scale:
    """How much is wanted.

    Attributes:
        name: of it.
        ranks: that train.
        depth: rows in flight for each.
    """

    name: str
    ranks: int
    depth: int


@dataclass(frozen=True)
class Size:
    """A cluster and what is measured on it.

    Attributes:
        worker_hosts: the first is the head, too.
        rank_hosts: ranks take turns on them.
        megabits: a second of a worker host's card.
        rank_megabits: of a rank host's.
        workers: actors.
        scales, cells: that are measured.
        settle: seconds from the first batches on that are not measured: what was read ahead is used up in them.
        seconds: that are.
    """

    worker_hosts: tuple[str, ...]
    rank_hosts: tuple[str, ...]
    megabits: float
    rank_megabits: float
    workers: int
    scales: tuple[Scale, ...]
    cells: tuple[Cell, ...]
    settle: float
    seconds: float

    @property
    def hosts(self) -> list[Host]:
        """All of them, the store's too."""
        workers = [Host(name, self.megabits) for name in self.worker_hosts]
        return [*workers, *(Host(name, self.rank_megabits) for name in self.rank_hosts), Host("s3")]


class Program:
    """A program of `cluster_programs` on a host; commands go to it as lines, and answers come back."""

    def __init__(self, here: Hosts, host: str, role: str) -> None:
        script = Path(__file__).with_name("cluster_programs.py")
        command = [sys.executable, str(script), role, f"{here.address('g')}:{_PORT}"]
        self._name = f"{role} on {host}"
        self._here = here
        self._process = here.start(host, command, _environment(here))
        self._said: Queue[str] = Queue()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(line)
        self._said.put("")

    def tell(self, **command: Any) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self, seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """The next answer; RuntimeError where none comes, with what the program has complained of."""
        try:
            line = self._said.get(timeout=seconds)
        except Empty:
            line = None
        if not line:
            what = f"no answer within {seconds:.0f} s" if line is None else "it has ended"
            raise RuntimeError(f"{self._name}: {what}. It said: {self._here.errors(self._process) or 'nothing'}")
        return json.loads(line)

    def ask(self, seconds: float = ASK_SECONDS, **command: Any) -> dict[str, Any]:
        """Sends a command, and waits for its answer."""
        self.tell(**command)
        return self.hear(seconds)


@dataclass(frozen=True)
class Cluster:
    """What runs on the hosts.

    Attributes:
        hosts: they.
        size: of it all.
        coordinate: the program that coordinates.
        ranks: the programs that read.
    """

    hosts: Hosts
    size: Size
    coordinate: Program
    ranks: Sequence[Program]


@contextlib.contextmanager
def cluster(size: Size) -> Iterator[Cluster]:
    """A cluster with an object store, nodes of Ray and programs; all of it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="mmdp-cluster-") as folder, hosts(size.hosts) as here:
        data = write_data(Path(folder) / "buckets" / BUCKET, rows_of(size))
        (Path(folder) / "config").touch()  # rclone's, not the user's own
        load_ray(starts=True)  # sets what every Ray process is to find in its environment
        options = ["--config", f"{folder}/config", "--addr", f"{here.address('s3')}:{_STORE_PORT}", "--read-only"]
        here.start("s3", [_program("rclone"), "serve", "s3", *options, f"{folder}/buckets"])
        names = [*size.worker_hosts, *size.rank_hosts]
        for name in track(names, "nodes of Ray"):  # one after the other: each has but 30 s to register
            start_node(here, name, cpus=_HOST_CPUS if name in size.worker_hosts else _RANK_CPUS)
        num_ranks = max(scale.ranks for scale in size.scales)
        coordinate = Program(here, "g", "coordinate")
        ranks = [Program(here, size.rank_hosts[n % len(size.rank_hosts)], "read") for n in range(num_ranks)]
        for program in [coordinate, *ranks]:
            program.hear(UP_SECONDS)
        num_nodes = coordinate.ask(do="nodes")["nodes"]
        if num_nodes != len(names):
            raise RuntimeError(f"{num_nodes} of {len(names)} nodes are on the cluster")
        endpoint = f"http://{here.address('s3')}:{_STORE_PORT}"
        uri, cache = f"s3://{BUCKET}/{data.name}", f"{folder}/cache"
        coordinate.ask(UP_SECONDS, do="plan", endpoint=endpoint, cache=cache, uri=uri)
        yield Cluster(here, size, coordinate, ranks)


def start_node(here: Hosts, name: str, *, cpus: int) -> None:
    """A node of Ray on a host; the one on g is the head."""
    head = here.address("g")
    joins = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={here.folder}"]
    command = [_program("ray"), "start", *(joins if name == "g" else [f"--address={head}:{_PORT}"])]
    command += [f"--node-ip-address={here.address(name)}", f"--num-cpus={cpus}"]
    command += [f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"]
    for is_last in (False, True):
        try:
            here.run(name, command, _environment(here), seconds=UP_SECONDS)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # on a busy machine a node may come up too late
            if is_last:
                raise RuntimeError(f"no node of Ray on {name}: {error}") from error
            here.clear(name)
        else:
            return


def _environment(here: Hosts) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**known, "RAY_TMPDIR": str(here.folder)}


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def rows_of(size: Size) -> int:
    """Rows of an epoch: more than a cell may use, since at an epoch's end nothing is read ahead."""
    most = max(scale.ranks * (scale.depth + 3 * ROWS) for scale in size.scales)
    wanted = max(scale.ranks for scale in size.scales) * 1000 / (TRAIN_MS / ROWS) * (size.settle + size.seconds + 15)
    return most + int(wanted)


def write_data(folder: Path, num_rows: int) -> Path:
    """A JSONL of samples with an image each; a JPEG of some 11 KB is used several times over."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(_IMAGES):
        coarse = Image.fromarray(random.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=75)
    turn = {"user": "what is shown here?", "assistant": "coloured clouds"}
    lines = [
        json.dumps({"id": f"s{number}", "images": [f"{number % _IMAGES}.jpg"], "texts": [turn]})
        for number in range(num_rows * SAMPLES)
    ]
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
