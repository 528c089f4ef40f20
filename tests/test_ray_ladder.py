"""Laws of the ladder: the same batches on every rung, less waiting the higher one climbs, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from processes import children, still_running
from ray_work import Plain
from small import tokenizer, write_data
from test_stages import ROOT, judged

import mmdp
from mmdp import ladder, ray_reader
from mmdp.climb import run_rung
from mmdp.ladder import RUNGS, Setup, open_rung, simulated
from mmdp.rung_figures import forecast, prediction_misses

pytest.importorskip("ray")

climbs = pytest.mark.long  # the whole stage, or a cluster of its own
pytestmark = pytest.mark.timeout(400)  # six rungs, each with actors of its own

STEPS, TRAIN_MS, LATENCY_MS = 5, 150, 20
SETTINGS = ("--steps", STEPS, "--train-ms", TRAIN_MS, "--latency-ms", LATENCY_MS, "--samples", 150, "--batch-size", 4)


def digest(batch) -> str:
    """All of a batch that a model sees."""
    images = batch.images
    parts = (batch.input_ids, batch.labels, batch.position_ids, batch.segments, images.pixels, images.offsets)
    return blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=16).hexdigest()


def is_in_the_store(array: np.ndarray) -> bool:
    """Whether its memory is that of Ray's object store."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start <= address < end:
            return "plasma" in line
    return False


@pytest.fixture(scope="module")
def climbed(ray_cluster, tmp_path_factory) -> dict:
    """The stage, all rungs, as a person runs it; its report, and what its trainer and its ranks saw."""
    folder = tmp_path_factory.mktemp("stage")
    trained: list[str] = []
    read: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:

        def train(milliseconds):
            sleep = simulated(milliseconds)

            def step(batch):
                trained.append(digest(batch))
                sleep(batch)

            return step

        def batch(rows, **more):
            read.extend((image.flags.writeable, is_in_the_store(image)) for row in rows for image in row.images[:1])
            return mmdp.batch(rows, **more)

        patch.setattr(ladder, "simulated", train)
        patch.setattr(ray_reader, "batch", batch)
        names = [*(f"06_{name}" for name in RUNGS), "06_flame", "06_row_map", "06_saw_tooth"]
        trace = folder / "trace.json"
        found = judged("06_ray_pipeline.py", folder, names, *SETTINGS, "--num-workers", 1, "--trace", trace)
    return {**found, "trained": trained, "read": read, "trace": json.loads(trace.read_text())}


@climbs
def test_every_rung_gives_the_same_batches(climbed):
    """Bit for bit, in the same order: when, where and how a row is made is no matter."""
    by_rung = np.array(climbed["trained"])[-STEPS * len(RUNGS) :].reshape(len(RUNGS), STEPS)
    assert STEPS == len(set(by_rung[0])), "the case did not arise: batches are alike"
    assert (by_rung[0] == by_rung).all()


@climbs
def test_waiting_shrinks(climbed):
    """Serial waits most, concurrent less, and ahead of the trainer next to nothing; the reports say so."""
    rungs = climbed["rungs"]
    assert list(RUNGS) == list(rungs)
    waits = {name: rung["wait_ratio"] for name, rung in rungs.items()}
    assert waits["serial"] > waits["concurrent"] > waits["references"]
    assert waits["serial"] > 0.5
    for rung in rungs.values():
        assert rung["wait_ratio"] == pytest.approx(sum(rung["waits"]) / (sum(rung["waits"]) + sum(rung["trains"])))
        assert STEPS - 1 == len(rung["waits"])
        assert 0.001 * TRAIN_MS == pytest.approx(min(rung["trains"]), rel=0.2)
        assert 0 < rung["samples_per_second"] <= 1.02 * rung["ceiling"]
    assert "I/O" == rungs["serial"]["bound"]
    order = list(rungs)
    named = [rung["predicted_rung"] for rung in rungs.values()]
    predicted = [name for place, name in enumerate(order) if name in named[:place]]
    assert predicted, "the case did not arise"
    assert len(predicted) == len(climbed["prediction_misses"])
    assert all(name not in order[: place + 1] for place, name in enumerate(named)), "no rung is its own next lever"


@climbs
def test_what_goes_through_the_coordinator(climbed):
    """By value every byte, by reference none but those of rows so small that Ray sends them with an answer."""
    rungs = climbed["rungs"]
    pixels = 256 * 256 * 3
    per_batch = climbed["images"] / STEPS * pixels
    assert rungs["serial"]["coordinator_bytes"] is None
    for name in ("concurrent", "prefetch"):
        assert 0.9 * per_batch < rungs[name]["coordinator_bytes"]
    for name in ("references", "spread", "near"):
        assert 0.01 * per_batch > rungs[name]["coordinator_bytes"]
    # A put for a row; by value, one more for the answer with all of them. The window is ahead of what was trained.
    assert 0 == rungs["serial"]["puts"]
    assert 3 < rungs["references"]["puts"] < rungs["prefetch"]["puts"]


@climbs
def test_a_rank_reads_the_memory_of_the_store(climbed):
    """Each row that a rank joins lies in the object store itself, and nobody can write to it."""
    assert 4 * STEPS <= len(climbed["read"])
    assert {(False, True)} == set(climbed["read"])


@climbs
def test_the_trace_has_every_process(climbed):
    """Fetching and decoding of the actors, training and waiting of the trainer, on one clock."""
    spans = [event for event in climbed["trace"]["traceEvents"] if event["ph"] == "X"]
    pids: dict[str, set[int]] = {}
    for span in spans:
        pids.setdefault(span["name"], set()).add(span["pid"])
    assert {os.getpid()} == pids["train"] == pids["wait"]
    assert 5 + 1 == len(pids["decode"]), "an actor on each of five rungs, and the serial trainer"
    assert pids["decode"] >= pids["fetch"] > pids["train"]
    told = {one["pid"]: one["args"]["name"] for one in climbed["trace"]["traceEvents"] if one["name"] == "process_name"}
    assert told.pop(os.getpid()).startswith("trainer, process ")
    assert {f"{rung}: worker 1" for rung in [*RUNGS][1:]} == {name.partition(",")[0] for name in told.values()}


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    """Small data on the local disk."""
    source = mmdp.open_source(write_data(tmp_path_factory.mktemp("rows")))
    encoder = mmdp.Encoder(tokenizer(), "fixed:4")
    plan = mmdp.plan(mmdp.measure(source, encoder), mmdp.Budget(64, 4))
    return Setup(source, encoder, plan, batch_size=2)


def test_references_give_the_batches_of_the_serial_rung(ray_cluster):
    """Bit for bit, in the same order, with no tensor through the coordinator; in small, what `climbed` does in full."""
    plain = Plain(24, side=200)  # an image is more than what comes with the answer of a call
    plan = mmdp.plan(mmdp.measure(plain, plain), mmdp.Budget(64, 2))
    setup = Setup(plain, plain, plan, batch_size=2, num_workers=1, num_cpus=0.1)
    trained: dict[str, list[str]] = {"serial": [], "references": []}
    figures = {}
    for name, digests in trained.items():
        figures[name] = run_rung(name, setup, lambda batch, seen=digests: seen.append(digest(batch)), steps=5)
    assert 5 == len(set(trained["serial"])), "the case did not arise: batches are alike"
    assert trained["serial"] == trained["references"]
    passed = figures["references"]
    assert 0 == figures["serial"].puts < passed.puts
    assert 20 * passed.coordinator_bytes < passed.tally.images * 3 * 200 * 200 / 5
    assert [1] == list(passed.workers.values())


def test_a_rung_that_makes_rows_ahead_is_not_told_to(ray_cluster):
    """With one step an epoch each begins cold, and that is what the diagnosis of the rung prefetch says."""
    plain = Plain(4, side=200)
    plan = mmdp.plan(mmdp.measure(plain, plain), mmdp.Budget(64, 2))
    setup = Setup(plain, plain, plan, batch_size=len(plan.epoch(0)), num_workers=1, num_cpus=0.1)
    figures = run_rung("prefetch", setup, simulated(10), steps=16)  # so many that one that was held up is none of them
    assert figures.wait_ratio > 0.1, "the case did not arise"
    said = str(figures.diagnosis)
    assert said.startswith("bound by cold starts (an epoch is 1 step, and each begins cold)"), said
    assert "next: prefetch" not in said
    assert "next: longer epochs" in said
    assert figures.as_dict()["predicted_rung"] is None


def figures_of(name: str, rate: float, lever: str, predicted: float) -> SimpleNamespace:
    """Of a rung, as far as predictions go."""
    diagnosis = SimpleNamespace(rung=lever)
    return SimpleNamespace(rung=RUNGS[name], samples_per_second=rate, diagnosis=diagnosis, predicted=predicted)


def test_a_prediction_is_held_to_the_rung_it_is_of():
    """Not to the next one: where serial says prefetch, that is what is compared, and concurrent is left out."""
    climbed = [
        figures_of("serial", 54.0, "prefetch", 87.0),
        figures_of("concurrent", 60.0, "prefetch", 80.0),
        figures_of("prefetch", 88.0, "", 88.0),
        figures_of("references", 20.0, "", 20.0),
    ]
    said = [forecast(climbed[:place], one.rung.name) for place, one in enumerate(climbed)]
    assert [None, None, ("concurrent", 80.0), None] == said
    assert [pytest.approx(0.1)] == prediction_misses(climbed)
    assert ("serial", 87.0) == forecast(climbed[:1], "prefetch")
    assert [] == prediction_misses(climbed[:2])


def test_the_stage_shows_rungs_as_they_are():
    """Each line of code in its text makes the rung of that heading, in `ladder.py`."""
    text = (ROOT / "06_ray_pipeline.py").read_text()
    shown = re.findall(r"## Rung \d, (\w+)\n(?:#.*\n)*?# `(\w+\(.*?\))`:", text)
    assert ["serial", "concurrent", "prefetch", "references"] == [name for name, _ in shown]
    for name, code in shown:
        assert RUNGS[name] == replace(eval(code, vars(ladder)), name=name), name


def test_epochs_follow_each_other(setup):
    """A rung has no end: the second epoch follows, in its own order, each sample once more."""
    samples, seen = len(setup.source), []
    with open_rung(RUNGS["serial"], setup) as opened:
        for batch in opened.batches:
            seen += [index for row in batch.samples for index in row]
            if len(seen) >= 2 * samples:
                break
    assert list(range(samples)) == sorted(seen[:samples]) == sorted(seen[samples : 2 * samples])
    assert seen[:samples] != seen[samples : 2 * samples]


def test_a_tiny_real_model_trains(setup):
    """`--train tiny`: the loss of a real family goes down, so the step is a real one."""
    train = ladder.tiny(setup.encoder, setup.device)
    (model,) = (cell.cell_contents for cell in train.__closure__ if hasattr(cell.cell_contents, "parameters"))
    with open_rung(RUNGS["serial"], setup) as opened:
        batch = next(iter(opened.batches))
        before = mmdp.loss(model, batch).item()
        for _ in range(5):
            train(batch)
        assert mmdp.loss(model, batch).item() < before


def test_what_cannot_be_climbed(setup):
    """The value, and what there is."""
    with pytest.raises(ValueError, match="no rung 'top': choose of serial, concurrent"):
        run_rung("top", setup, simulated(0))
    with pytest.raises(ValueError, match="4 steps tell no pace"):
        run_rung("serial", setup, simulated(0), steps=4)
    with pytest.raises(ValueError, match="a step of -1 ms"):
        simulated(-1)


def test_an_error_of_the_trainer_ends_the_rung(setup):
    """It comes out as it is, and the next run may record spans again."""

    def train(batch):
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run_rung("serial", setup, train, steps=5)


TWO_NODES = """
import json
from mmdp.ray_start import load_ray

load_ray(starts=True)
from ray.cluster_utils import Cluster
from ray_work import Plain

import mmdp
from mmdp.climb import run_rung
from mmdp.ladder import Setup, simulated

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 100 * 2**20})
try:
    cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
    plain = Plain(24)
    plan = mmdp.plan(mmdp.measure(plain, plain), mmdp.Budget(64, 2))
    setup = Setup(plain, plain, plan, batch_size=2, num_workers=2, address=cluster.address)
    climbed = {name: run_rung(name, setup, simulated(100), steps=5) for name in ("references", "spread", "near")}
    print(json.dumps({name: sorted(figures.workers.values()) for name, figures in climbed.items()}))
finally:
    cluster.shutdown()
"""


@climbs
def test_two_nodes():
    """By default actors crowd on the node of whoever makes them; spread has one on each; near, all beside the rank."""
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES],
        env={**alone, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert 0 == done.returncode, done.stderr
    assert {"references": [2], "spread": [1, 1], "near": [2]} == json.loads(done.stdout.splitlines()[-1])


def started(folder: str, *flags: object) -> subprocess.Popen:
    """The stage, in a process of its own, with a folder of its own for all that is temporary."""
    command = [sys.executable, str(ROOT / "06_ray_pipeline.py"), "--figures", f"{folder}/figures", *map(str, flags)]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        command, env={**alone, "TMPDIR": folder}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left_in(folder: str) -> list[Path]:
    """What is still there of temporary files, figures aside."""
    return [path for path in Path(folder).iterdir() if path.name != "figures"]


@climbs
def test_ctrl_c_ends_all():
    """In the middle of a rung: actors, Ray, store and relay end, no file stays, and no traceback is shown."""
    with tempfile.TemporaryDirectory(prefix="l", dir="/tmp") as folder:
        stage = started(folder, "--rung", "references", *SETTINGS, "--steps", 10_000, "--num-workers", 1)
        end = time.monotonic() + 120
        actors: set[psutil.Process] = set()
        while not actors and time.monotonic() < end and stage.poll() is None:
            actors = {one for one in children(stage.pid) if "RowWorker.work" in name_of(one)}
            time.sleep(0.1)
        assert actors, "the case did not arise: no actor was at work"
        below = children(stage.pid)
        stage.send_signal(signal.SIGINT)
        out, error = stage.communicate(timeout=60)
        assert stage.returncode in (130, -signal.SIGINT), error
        assert "stopped" in error
        assert "Traceback" not in error
        assert [] == still_running(below, 30)
        assert [] == left_in(folder)
        assert "samples |" not in out


def name_of(process: psutil.Process) -> str:
    """Its command line; Ray's workers write what they do into it."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@climbs
def test_it_ends_quietly():
    """Exit code 0, nothing on standard error but a warning, no process and no file left; on one node it says so."""
    with tempfile.TemporaryDirectory(prefix="l", dir="/tmp") as folder:
        stage = started(folder, "--rung", "near", *SETTINGS, "--num-workers", 1)
        below: set[psutil.Process] = set()
        while stage.poll() is None:
            below |= children(stage.pid)
            time.sleep(0.2)
        out, error = stage.communicate(timeout=60)
        assert 0 == stage.returncode, error
        lines = [line for line in error.splitlines() if not re.match(r"warning: .* ignores ranges|near: \d+ of", line)]
        assert [] == lines
        assert "can make no difference" in out
        assert 5 < len(below), "the case did not arise: nothing was started"
        assert [] == still_running(below, 30)
        assert [] == left_in(folder)
