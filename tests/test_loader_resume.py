"""Law 12 of the loader: a run that is stopped anywhere goes on as if it had not been, by every road to the trainer."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from processes import children, still_running
from runs import Parts, Road, digest, forkserver, rows_of, train, trained
from small import tokenizer, write_data

import mmdp
from mmdp.executors import Processes
from mmdp.loader import Loader
from mmdp.steps import Steps

pytestmark = pytest.mark.timeout(120)

BATCH_SIZE = 2
EPOCHS = 4


class Whole:
    """The uninterrupted run: one rank, no worker, a row a batch."""

    def __init__(self, parts: Parts) -> None:
        self._loader = Loader(*parts, batch_size=1, executor="inline")
        self._epochs: list[list] = []

    def rows(self, epoch: int) -> list[tuple[tuple[int, ...], str]]:
        """Samples and digest of each row, in the order of the plan."""
        while len(self._epochs) <= epoch:
            self._epochs.append([row for batch in self._loader for row in rows_of(batch)])
        return self._epochs[epoch]


class Training(RuleBasedStateMachine):
    """All ranks of a run in step, beside a model of where it stands: an epoch, and a row of its plan."""

    parts: Parts
    whole: Whole
    arose: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loaders: list[Loader] = []
        self.epoch = self.cursor = 0
        self.trained: list[tuple[int, int]] = []  # epoch and row, of all that was trained on and not undone by a kill

    def teardown(self) -> None:
        for loader in self.loaders:
            loader.close()

    shapes = st.fixed_dictionaries(
        {
            "world_size": st.integers(1, 3),
            "batch_size": st.integers(1, 3),
            "drop_last": st.booleans(),
            "executor": st.sampled_from(["inline", "threads"]),
            "num_workers": st.integers(1, 3),
            "depth": st.none() | st.integers(1, 20),
        }
    )

    @initialize(shape=shapes)
    def begin(self, shape) -> None:
        self.start(shape)
        self.saved = self.state(), len(self.trained)

    def start(self, shape) -> None:
        """New loaders, as in a new process."""
        self.teardown()
        self.shape = shape
        ranks = shape["world_size"]
        self.loaders = [Loader(*self.parts, rank=rank, **shape) for rank in range(ranks)]
        self.loops: list | None = None
        self.dropped: dict[int, int] = {}

    def state(self) -> str:
        states = {json.dumps(loader.state_dict()) for loader in self.loaders}
        assert 1 == len(states), "ranks disagree"
        assert len(min(states)) < 200
        return min(states)

    def next_rows(self) -> list:
        """Of the next step; none where the epoch is over."""
        step = self.shape["world_size"] * self.shape["batch_size"]
        rows = self.whole.rows(self.epoch)[self.cursor : self.cursor + step]
        return [] if self.shape["drop_last"] and len(rows) < step else rows

    def steps_left(self) -> int:
        rows = len(self.whole.rows(self.epoch)) - self.cursor
        step = self.shape["world_size"] * self.shape["batch_size"]
        return rows // step if self.shape["drop_last"] else -(-rows // step)

    def end_epoch(self) -> None:
        left = sum(len(samples) for samples, _ in self.whole.rows(self.epoch)[self.cursor :])
        assert self.shape["drop_last"] or left == 0
        if left:
            self.dropped[self.epoch] = left
        self.arose.update({"dropped": left, "epochs": 1})

    @rule(count=st.integers(1, 6))
    def train(self, count) -> None:
        """Steps on all ranks: the next rows of the plan, each once, and filler rows for the rest."""
        for _ in range(count):
            if self.loops is None:
                if not self.next_rows():
                    self.end_epoch()
                    self.epoch, self.cursor = self.epoch + 1, 0
                assert [self.steps_left()] * len(self.loaders) == [len(loader) for loader in self.loaders]
                self.loops = [iter(loader) for loader in self.loaders]
            wanted = self.next_rows()
            batches = [next(loop, None) for loop in self.loops]
            if not wanted:
                self.end_epoch()
                self.loops = None
            assert [self.dropped] * len(batches) == [loader.dropped for loader in self.loaders]
            if not wanted:
                assert [None] * len(batches) == batches, "ranks take the same number of steps"
                return
            order = [samples for samples, _ in wanted]
            seen = sorted((row for batch in batches for row in rows_of(batch)), key=lambda row: order.index(row[0]))
            assert wanted == seen
            step = self.shape["world_size"] * self.shape["batch_size"]
            assert step - len(wanted) == sum(batch.filler_rows for batch in batches)
            self.arose.update({"steps": 1, "filler rows": step - len(wanted)})
            labels = sum(batch.label_tokens for batch in batches)
            assert [labels] * len(batches) == [batch.step_label_tokens for batch in batches]
            self.trained += [(self.epoch, row) for row in range(self.cursor, self.cursor + len(wanted))]
            self.cursor += len(wanted)
            assert [json.loads(self.state())] * len(batches) == [batch.state for batch in batches]

    @rule()
    def checkpoint(self) -> None:
        self.saved = self.state(), len(self.trained)

    @rule(shape=shapes)
    def kill(self, shape) -> None:
        """What was trained on since the last checkpoint is undone; ranks, workers and batches may be others now."""
        self.ranks_before = len(self.loaders)
        self.start(shape)
        state, count = self.saved
        for loader in self.loaders:
            loader.load_state_dict(json.loads(state))
        assert state == self.state()
        self.epoch, self.cursor = json.loads(state)["epoch"], json.loads(state)["cursor"]
        self.arose["undone"] += len(self.trained) - count
        self.arose["another world size in mid-epoch"] += bool(self.cursor) and len(self.loaders) != self.ranks_before
        del self.trained[count:]

    @rule(shape=shapes)
    def resize(self, shape) -> None:
        self.checkpoint()
        self.kill(shape)

    @precondition(lambda self: self.loops is not None)
    @rule(close=st.booleans())
    def leave_the_loop(self, close) -> None:
        """The next loop takes it up, whether the loader is closed in between or not."""
        for loader in self.loaders if close else []:
            loader.close()
        self.loops = None

    @precondition(lambda self: self.epoch < 6)
    @rule()
    def skip(self) -> None:
        """To the start of the next epoch, also out of a loop."""
        self.epoch, self.cursor = self.epoch + 1, 0
        for loader in self.loaders:
            loader.set_epoch(self.epoch)
        self.loops = None

    @invariant()
    def each_row_once_and_in_order(self) -> None:
        """The rows of an epoch are a run without a gap up to the cursor; no sample of it comes twice."""
        rows = [row for epoch, row in self.trained if epoch == self.epoch]
        assert list(range(self.cursor)) == rows
        samples = [sample for row in rows for sample in self.whole.rows(self.epoch)[row][0]]
        assert len(samples) == len(set(samples))


@pytest.mark.timeout(120, method="thread")  # hypothesis would take the error of the other method for one of the test's
def test_any_history_gives_the_uninterrupted_run(parts):
    """Law 12, WRK-06, WRK-07, RES-03, PACK-12: steps, checkpoints, kills, other workers, ranks and batches, skips."""
    Training.parts, Training.whole = parts, Whole(parts)
    limits = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        phases=(Phase.reuse, Phase.generate),  # making a failure shorter takes minutes
        suppress_health_check=list(HealthCheck),
    )
    cases = ("steps", "epochs", "filler rows", "dropped", "undone", "another world size in mid-epoch")
    for _ in range(6):  # chance may leave a case out
        run_state_machine_as_test(Training, settings=limits)
        if all(Training.arose[case] for case in cases):
            break
    else:
        pytest.fail(f"the case did not arise: {Training.arose}")


@pytest.fixture(scope="module")
def wanted(parts) -> list[list[str]]:
    """Digests of the uninterrupted run's batches, of each epoch."""
    loader = Loader(*parts, batch_size=BATCH_SIZE, executor="inline")
    return [[digest(batch) for batch in loader] for _ in range(EPOCHS)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    forkserver()
    with Processes(2, "forkserver") as kept:
        yield kept


ROADS = {
    "inline": Road("inline"),
    "threads": Road("threads", 2),
    "processes": Road("processes"),
    "DataLoader": Road(),
    "DataLoader, 2 workers": Road(None, 2, context="forkserver"),
    "DataLoader, 2 persistent workers": Road(None, 2, persistent=True, context="forkserver"),
}


@pytest.fixture(params=ROADS)
def road(request, processes) -> Road:
    forkserver()
    return ROADS[request.param]._replace(executor=processes) if request.param == "processes" else ROADS[request.param]


def test_a_state_gives_the_rest_and_whole_epochs_after_it(parts, wanted, road):
    """Law 12, RES-02, RES-03, RES-05: from any batch's state, the rest comes bit for bit, then three whole epochs."""
    states: list[dict] = []
    for number, batch in enumerate(
        road.batches(parts, BATCH_SIZE)
    ):  # what is read ahead of a batch is not in its state
        assert wanted[0][number] == digest(batch)
        states.append(json.loads(json.dumps(batch.state)))
    assert len(wanted[0]) == len(states)
    assert all(len(json.dumps(state)) < 200 for state in states)
    for count in (1, 7, len(states)):
        loader = road.batches(parts, BATCH_SIZE, states[count - 1])
        for epoch in range(EPOCHS):
            rest = wanted[epoch][count:] if epoch == 0 else wanted[epoch]
            if rest:
                stated = len(loader)
                assert rest == [digest(batch) for batch in loader]
                assert len(rest) == stated, "PACK-12"


def test_a_loop_that_is_left_early(parts, wanted, road):
    """RES-03: `Loader` takes it up; behind a DataLoader the next epoch comes, however much was read ahead."""
    for count in (1, len(wanted[0]) - 1):
        loader = road.batches(parts, BATCH_SIZE)
        left = [digest(batch) for batch in islice(loader, count)]
        assert wanted[0][:count] == left
        following = wanted[1] if road.executor is None else wanted[0][count:]
        assert following == [digest(batch) for batch in loader]


def test_epochs_differ_and_can_be_chosen(parts, wanted, road):
    """RES-02: `set_epoch` before a loop gives that epoch, also where workers persist."""
    assert EPOCHS == len({str([samples for samples, _ in Whole(parts).rows(epoch)]) for epoch in range(EPOCHS)})
    loader = road.batches(parts, BATCH_SIZE)
    place = loader if road.executor is not None else loader.batch_sampler
    for epoch in (2, 2, 1, 3):
        place.set_epoch(epoch)
        assert wanted[epoch] == [digest(batch) for batch in loader]


@pytest.mark.parametrize("name", ["inline", "DataLoader"])
def test_a_state_loads_only_where_it_belongs(parts, tmp_path, name):
    """Law 12: not after the first loop has begun, not into another plan, and nothing that is no state."""
    batch = next(iter(ROADS[name].batches(parts, BATCH_SIZE)))
    for changed, says in (
        ({"seed": 1}, r"the order \(seed, .*\)"),
        ({"budget": replace(parts.plan.budget, images=99)}, "the budget"),
        ({"seed": 1, "budget": replace(parts.plan.budget, images=99)}, r"the budget, the order \(seed, .*\)"),
    ):
        other = parts.plan.__class__(**{**_fields(parts.plan), **changed})
        with pytest.raises(ValueError, match=f"another plan, which differs in {says}: that must be as in the run"):
            ROADS[name].batches(parts._replace(plan=other), BATCH_SIZE, batch.state)
    sizes = parts.plan.sizes.__class__(**{**_fields(parts.plan.sizes), "fingerprint": "another-one"})
    other = parts.plan.__class__(**{**_fields(parts.plan), "sizes": sizes})
    with pytest.raises(
        ValueError, match=r"which differs in the data \(source, .*\), the encoder \(tokenizer, .*\): that"
    ):
        Steps(other, BATCH_SIZE).check(batch.state)  # no loader is made of sizes that are not its source's
    for state in (
        {},
        {**batch.state, "cursor": -1},
        {**batch.state, "version": 0},
        {**batch.state, "version": "2"},
        "epoch 3",
        {"epoch": 0, "cursor": 0},
    ):
        with pytest.raises(ValueError, match="not a state of version 2 of this loader"):
            ROADS[name].batches(parts, BATCH_SIZE, state)
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"the state is of version {number}, and this mmdp reads"):
            ROADS[name].batches(parts, BATCH_SIZE, {**batch.state, "version": number})
    with pytest.raises(ValueError, match=r"stands before row 1000000 of epoch 0, which has \d+ rows now"):
        ROADS[name].batches(parts, BATCH_SIZE, {**batch.state, "cursor": 10**6})
    loader = ROADS[name].batches(parts, BATCH_SIZE)
    place = loader if name == "inline" else loader.batch_sampler
    next(iter(loader))
    with pytest.raises(RuntimeError, match="before the first loop"):
        place.load_state_dict(batch.state)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_state_is_refused_where_data_came_or_went_before_it(tmp_path, is_lazy):
    """Law 12: an image that is back makes other rows; a state goes on where none of those behind it has changed."""
    path, encoder = write_data(tmp_path / "data", repeat=15), mmdp.Encoder(tokenizer(), "fixed:4:side=8")
    gone = {image: image.read_bytes() for image in sorted(path.parent.glob("*-0.png"))[::12]}

    def loader():
        source = mmdp.open_source(path)
        sizes = mmdp.measure(source, encoder, cache=tmp_path / "cache", lazy=is_lazy)
        return mmdp.Loader(source, encoder, mmdp.plan(sizes, mmdp.Budget(80, 4)), batch_size=1, executor="inline")

    for image in gone:
        image.unlink()
    before = loader()
    states = [before.state_dict(), *(batch.state for batch in before)]
    rows = [row.tolist() for row in before.steps.plan.epoch(0)]
    if is_lazy:
        mmdp.measure(mmdp.open_source(path), encoder, cache=tmp_path / "cache")  # is there anything new?
    for image, data in gone.items():
        image.write_bytes(data)
    mmdp.measure(mmdp.open_source(path), encoder, cache=tmp_path / "cache")  # there is
    now = [row.tolist() for row in loader().steps.plan.epoch(0)]
    accepted = []
    for state in states:
        is_same = rows[: state["cursor"]] == now[: state["cursor"]]
        if is_same:
            accepted.append(state["cursor"])
            loader().load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=r"rows of epoch 0 are not those .* `set_epoch\(1\)`"):
                loader().load_state_dict(state)
    assert 0 < len(accepted) < len(states), "the case arose"


def _fields(plan):
    return {name: getattr(plan, name) for name in plan.__slots__}


# Real restarts


LIVES = {
    "threads": [Road("threads", 2), Road("threads", 1), Road("inline")],
    "processes": [Road(Processes(2, "fork")), Road(Processes(1, "fork"))],
    "DataLoader": [Road(None, 2, context="fork"), Road(None, 0), Road(None, 1, context="fork")],
}


@pytest.mark.parametrize("name", LIVES)
def test_a_trainer_that_is_killed_goes_on_in_a_new_process(parts, wanted, tmp_path, name):
    """Law 12: `kill -9` at any time, another number of workers in the next life; all batches come, once, in order."""
    expected = [batch for epoch in wanted[:3] for batch in epoch]
    out = tmp_path / "trained.jsonl"
    out.touch()
    chance = random.Random(name)
    context = forkserver()
    kills = []
    workers = 0
    while len(trained(out)) < len(expected):
        before = len(trained(out))
        road = LIVES[name][len(kills) % len(LIVES[name])]
        child = context.Process(target=train, args=(road, parts, BATCH_SIZE, len(expected), out, 0.02))
        child.start()
        while child.is_alive() and len(trained(out)) < before + 3:  # a life that does nothing would never end the test
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        family = children(child.pid)
        workers += len(family)
        child.kill()
        child.join()
        kills.append(len(trained(out)))
        assert name == "DataLoader" or [] == still_running(family), "orphans"
    assert expected == [entry["batch"] for entry in trained(out)]
    assert len([count for count in kills if count < len(expected)]) >= 3, "the case did not arise: no kill in midway"
    assert name == "threads" or workers > 0
