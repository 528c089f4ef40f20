# %% [markdown]
# # 06 From 85 % waiting to almost none
#
# **The question:** why is my GPU waiting, and which lever helps?
#
# Up to here the images lay on the local disk. Now they lie in an object store, some 40 ms away, as in the cloud. The
# batches are those of stage 05, and each row is built by the same function. What changes is when, where, and how a
# row gets to the trainer: a ladder of six rungs, each one idea more than the last.
#
# It is the ladder of the talk *From 15% to 90% GPU utilization: fix the data pipeline, not the model*, whose serial
# baseline waits for 85 % of the time. The measure is the **wait ratio**: the share of its time that the trainer spends
# waiting for a batch, where the rest is training. Utilisation is one minus it. It is taken from the second step on, and
# so are samples/s: the first batch waits for actors to start, which is paid once a run; it stands apart.
#
# [Ray](https://docs.ray.io) runs Python functions in many processes, on one machine or on a cluster of them, its
# *nodes*. An *actor* is such a process that stays and keeps what it has loaded: here the *workers*, which make rows,
# and the *coordinator*, which hands them out. What a process gives back lies in *Ray's shared memory*, where every
# process of the node can read it without a copy; the trainer that reads it is a *rank*, one for each GPU.

# %%
import atexit
import sys
import warnings
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

import mmdp
from mmdp import ladder
from mmdp.cli import parse_flags, report, show
from mmdp.climb import fastest_step, run_rung
from mmdp.local_store import from_afar
from mmdp.machine import tell_load
from mmdp.plots import drawn_rows, flame, row_map, saw_tooth, timeline
from mmdp.ray_start import Session
from mmdp.rung_figures import forecast, ladder_table, prediction_misses
from mmdp.stacks import sampled
from mmdp.trace_file import write_trace

config = parse_flags(
    "rung",
    "steps",
    "trainer",
    "train_ms",
    "latency_ms",
    "batch_size",
    "max_tokens",
    "max_images",
    "num_workers",
    "depth",
    "trace",
    stage="06: the same batches, from an object store, made in six ways with Ray",
)
started = ExitStack()
_ = atexit.register(started.close)  # whatever happens, Ctrl-C too
tell_load()

# %% [markdown]
# ## An object store
#
# What lies on this machine is served by a real S3 server, in a process of its own, behind a relay that holds each
# request back: 40 ms in the median, more than twice as long now and then. `--data s3://bucket/train.jsonl` is read
# where it is.

# %%
served = started.enter_context(from_afar(config))
is_served = served is not config
if is_served:  # our own server does so, and here that is no news
    warnings.filterwarnings("ignore", ".* ignores ranges")
print(f"data: {served.data}" + (f", served with {config.latency_ms:g} ms to an answer" if is_served else ""))
cache = Path(started.enter_context(TemporaryDirectory(prefix="mmdp-06-"))) if is_served else None  # no such store again

# %% [markdown]
# ## The pipeline so far, and a trainer
#
# The trainer is *simulated*: busy for `--train-ms`, which is chosen so that the first rung waits for 80 to 90 % of
# the time. It stands for a GPU, and needs no processor. `--train tiny` trains a small real model instead.

# %%
source = mmdp.open_source(served.data, config=replace(served, cache_dir=cache))
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
budget = mmdp.Budget(config.max_tokens, config.max_images)
sizes = mmdp.measure(source, encoder, budget=budget, samples=config.samples, strict=config.strict, cache=cache)
plan = mmdp.plan(sizes, budget, seed=config.seed or 0)
is_tiny = config.trainer == "tiny"
device = (torch.accelerator.current_accelerator(check_available=True) if is_tiny else None) or torch.device("cpu")
train = ladder.tiny(encoder, device, config.seed or 0) if is_tiny else ladder.simulated(config.train_ms)
setup = ladder.Setup(
    source,
    encoder,
    plan,
    batch_size=config.batch_size,
    num_workers=config.num_workers or None,
    depth=config.depth,
    device=device,
    strict=config.strict,
)
floor = fastest_step(setup, train)
print(f"a step with its batch at hand takes {1000 * floor:,.0f} ms: with a perfect loader, all do")

# %% [markdown]
# ## How to read the diagnosis
#
# Each rung ends with four lines like these:
#
# ```
# bound by the order of work (feeding and training take turns): the trainer waits 39% of the time, 252 ms of a step of
#     653 ms, over the 10 steps looked at
# a step has fetch 1.65 s (up to 49 at a time), decode 288 ms + join 6.03 ms (up to 2 at a time), train 401 ms, 0 of at
#     most 8 rows ahead when it trains
# twice as much or as fast would give: trainer x1.44, CPU x1.14, I/O x1.06, transport x1.00, memory x1.00 steps a second
# next: prefetch: make rows while the trainer works; predicted: waits 7%, 1.52 times as fast
# ```
#
# - **bound by**: what the trainer waits for: I/O (fetching), CPU (decoding and the like), transport (passing rows on,
#   *transfer* in the figures), memory (too few rows may be ahead), the trainer itself, or the *order of work*: feeding
#   and training take turns, so that no part of the feeding alone would help much. The first steps are slow for other
#   reasons and are left out; so are the last ones where the rows were ready before. That is why it looks at fewer
#   steps than were trained, and its share differs a little from the one of the whole rung, printed above it.
# - **a step has**: the work in one step, measured in *spans*: begin and end of each fetch, decode and so on, from all
#   processes on one clock. It is a sum over all who work: 1.65 s of fetching, up to 49 at a time, pass within 252 ms.
#   Of the rows that may lie ready, none did when the step began to train. *Join* makes rows of samples,
#   and batches of rows; *transfer* passes a row on, from process to process or to the device.
# - **twice as much or as fast**: what a store twice as fast, twice the processors and so on would give, each alone.
#   `x1.14` is 1.14 times as many steps a second, `x1.00` is nothing.
# - **next**: the lever to pull, and what it should give: the least that brings nearly all of it. So it may say "fetch 8
#   images at a time", while the next rung has all of a step in the air: that is hardly faster. The rung that is this
#   lever shows whether the prediction was true. Where the lever is no rung, nothing was predicted of the next one, and
#   it says so. Of a `Loader` of your own it may name more workers than there are processors: its threads and processes
#   fetch for one row at a time, and wait.

# %%
climbed = {}
stacks = {}
failures = []
sessions = []


def climb(name: str) -> None:
    if config.rung not in ("all", name) or failures:
        return
    try:
        if name != "serial" and not sessions:
            sessions.append(started.enter_context(closing(Session(num_cpus=config.num_workers or None))))
        with sampled() if name == "serial" else nullcontext(stacks) as seen:
            figures = run_rung(name, setup, train, steps=config.steps, step_floor=floor)
    except Exception as error:
        if not climbed:
            raise
        failures.append(error)  # what was climbed is shown before it is raised
        print(f"{name}: failed, and so the ladder ends here; the reason comes last", file=sys.stderr)
        return
    stacks.update(seen)
    print(f"{name}: waits {figures.wait_ratio:.1%}, {figures.samples_per_second:,.1f} samples/s")
    below = list(climbed.values())
    if said := forecast(below, name):
        print(f"    predicted by {said[0]}: {said[1]:,.1f} samples/s")
    elif below:
        lever = below[-1].diagnosis.rung or "no rung"
        print(f"    nothing was predicted of it: the next lever on {below[-1].rung.name} is {lever}")
    print("    " + str(figures.diagnosis).replace("\n", "\n    "))
    climbed[name] = figures
    first = max(1, figures.steps // 2 - 2)  # behind the start, in which the window fills, and before the end
    title = f"{name}: what goes on in three steps"
    show(timeline(figures.spans, title=title, first=first, steps=3), f"06_{name}", config)


# %% [markdown]
# ## Rung 1, serial
#
# What a rung is stands in `mmdp/ladder.py`: `RUNGS` has them all, each made of the one before, and `open_rung` is what
# they do. Below, each rung begins with its line there.
#
# `Rung("serial")`: when the trainer asks, it fetches one image after the other, and decodes one after the other. With
# 40 ms for each, some 36 images take a second and a half, in which nothing is done at all.
#
# The figures: three steps from its middle, from the store at the top to the trainer at the bottom, work of all
# processes together, as each rung has them below; and where its time goes.

# %%
climb("serial")
if stacks:
    show(flame(stacks, title="serial: where the trainer's time goes", start="_Run.over"), "06_flame", config)

# %% [markdown]
# ## Rung 2, concurrent
#
# `replace(_SERIAL, has_actors=True)`: all rows of a step at once. What runs beside what? The table has how many times
# faster two threads, two processes and so on do the same work than one does it alone, on two processors
# (`uv run benchmarks/interpreter_lock.py`, medians):
#
# | work | 2 threads | 2 processes | 32 threads | event loop, 32 at once |
# |---|---|---|---|---|
# | wait for a store | 2.0 | 1.9 | 25 | 30 |
# | decode and resize a JPEG | 1.9 | 2.2 | | |
# | tokenise a sample | 0.9 | 2.0 | | |
# | read a row of JSONL | 1.0 | 1.8 | | |
# | join a batch | 0.7 | 1.8 | | |
#
# Waiting needs no processor, so one event loop (asyncio) waits for hundreds of images at once. Decoding needs
# processors, but not the interpreter's lock: there threads do. What is Python's own code holds the lock: a second
# thread only gets in the way, and processes help.
#
# So an actor is a process, with an event loop for fetching and a pool of threads for decoding. The trainer still
# waits until the step is there.

# %%
climb("concurrent")

# %% [markdown]
# ## Rung 3, prefetch
#
# `replace(_CONCURRENT, is_ahead=True)`: a coordinator has rows built while the trainer works, as far ahead as a number
# of rows and of bytes allow. These bounds are *back-pressure*: a pipeline that may run ahead without end fills the
# memory whenever the trainer is slower. The first batch is a *cold start* still, since nothing can be ahead of it.
#
# The coordinator sends rows by value: every pixel goes through its process. In the figure, work comes in bursts: the
# window is full, and only when the trainer takes a batch do the next rows begin.

# %%
climb("prefetch")

# %% [markdown]
# ## Rung 4, references
#
# `replace(_PREFETCH, by_reference=True)`: a row stays in Ray's shared memory, and the coordinator deals references, of
# some bytes each. The rank reads that memory itself (*zero-copy*: the array it sees is that memory, read-only) and
# copies it once, into the batch. Each reference is a message and a lookup, so one stands for a packed row, never for a
# sample.
#
# On one node the trainer saves nothing by it: Ray hands a large answer over in shared memory as well, and now the rank
# looks up each row by itself, so its processor time may even grow a little. What is saved is the coordinator's: compare
# its memory, and *by value, one process*, in the table below.

# %%
climb("references")

# %% [markdown]
# ## Rungs 5 and 6, spread and near
#
# `placement="spread"`: actors on all nodes, so that no network card carries everything. `placement="near"`: on the
# nodes of the ranks that read, so that only compressed images cross the network: one step past the talk. On one node
# neither can matter.
#
# On several, the talk found "the same knob, opposite verdict": on a small cluster neither references nor spreading
# helped, on a large one both together gave 50 %, and each alone nothing.

# %%
climb("spread")
climb("near")
places = {node for figures in climbed.values() for node in figures.workers}
if len(places) == 1 and climbed.keys() & {"spread", "near"}:
    print("spread and near: there is one node, so where actors are can make no difference here")

# %% [markdown]
# ## The ladder
#
# Some lines of the table need a word. *A perfect loader* is one whose batches are there already. *Puts* are rows that
# were put into Ray's shared memory, a step's answer by value with them; a row of less than 100 kB travels with its
# answer instead. *By value, one process* is what passes through whoever gathers the rows: on concurrent the trainer,
# on prefetch the coordinator, and from references on nobody. *Coordinator memory* is the most that the coordinator's
# process had; *Ray's shared memory* the most that lay there, on all nodes. *First batch after* is longest where actors
# start, and a coordinator before them: some seconds of imports, for each rung anew, and once in a run of yours.

# %%
console = Console()
console.width = max(console.width, 110)
console.print(ladder_table(list(climbed.values())))
rungs = list(climbed.values())
misses = prediction_misses(rungs)
if misses:
    off = f"off by {median(misses):.0%} of the prediction in the median, {max(misses):.0%} at most"
    print(f"rungs that were predicted: {len(misses)} of {len(rungs) - 1}; {off}")
if config.trace is not None:
    print(f"    trace: {write_trace({name: rung.spans for name, rung in climbed.items()}, config.trace)}")
last = rungs[-1]
ends = [rungs[0], last] if len(rungs) > 1 else rungs
report(
    "06 ray pipeline",
    {**last.tally.as_dict(), "seconds": None, "samples_per_second": None},  # the table has that of each rung
    config,
    ", ".join(f"waits {rung.wait_ratio:.1%} on {rung.rung.name}" for rung in ends),
    sizes.messages(budget, source),
    sizes.skipped | sizes.refused(budget),
    step_floor=floor,
    latency_ms=config.latency_ms if is_served else None,
    trainer=config.trainer,
    nodes=max(1, len(places)),
    prediction_misses=misses,
    rungs={name: figures.as_dict() for name, figures in climbed.items()},
)
started.close()

# %% [markdown]
# ## The figures
#
# The saw-tooth: how long each step but the first waits and trains, rung by rung. And a batch as its rank received it:
# from every rung the same.

# %%
steps = {name: list(zip(figures.waits, figures.trains, strict=True)) for name, figures in climbed.items()}
show(saw_tooth(steps, title="wait and train time of each step but the first"), "06_saw_tooth", config)
title = f"a batch as its rank received it, on {last.rung.name}"
show(row_map(drawn_rows(last.first, encoder.image_id), length=budget.tokens, title=title), "06_row_map", config)
if failures:
    raise failures[0]

# %% [markdown]
# ## What to see, and what comes next
#
# Fetching side by side takes most of the wait away, working ahead the rest. References change nothing in the wait
# here: they take the rows out of the coordinator, through which else all of them go, for all ranks. One process and
# its network card are what runs out first when rows grow and ranks are many; where actors are matters then too.
#
# Where our numbers differ from the talk's: its trainer is a real GPU, and ours is asleep; its +50 % needs a cluster.
# What is the same is the order of the rungs, and why.
#
# On a machine that others use, each rung from prefetch on may wait up to a fifth of its time, and another one in each
# run: 14 steps are few. Nothing but a quiet machine helps, or more `--steps`.
#
# What this stage does not do: train your model. That comes next. `docs/own_data.md` has your own data in five minutes,
# "In your training" in the README the loop around a real model, alone, over many GPUs and on Ray, and
# `docs/troubleshooting.md` what to do when the GPU waits there.

# %% [markdown]
# ## Exercises
#
# 1. Move the store: `uv run 06_ray_pipeline.py --latency-ms 0`, then `100`. Which rungs change, and which don't? Each
#    takes two to four minutes on two processors, the second most of it on serial.
# 2. Take a faster GPU: `uv run 06_ray_pipeline.py --train-ms 100 --rung references`. What does the diagnosis say now?
#
# <details><summary>Answers</summary>
#
# 1. Serial changes most: it pays the distance for each image, one by one. Concurrent pays it once or twice a step.
#    From prefetch on it is paid while the trainer works, and hardly shows but in the first batch, as long as enough
#    rows are in flight. Far away, or on a busy machine, three batches may be too few, and the diagnosis says so: then
#    `--depth 48`.
# 2. It waits again: for a quarter to two thirds of the time in our runs on two processors. CPU, I/O and memory, which
#    is the rows in flight, are now worth nearly the same, so from run to run another one is named. Decoding alone
#    takes longer than such a trainer: more actors help while there are processors, here or on other nodes; after that
#    only less work for each sample does, such as smaller images. With many processors, or a nearer store, it may not
#    wait at all: take `--train-ms 10`.
#
# </details>
