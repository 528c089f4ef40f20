# %% [markdown]
# # 06 From 85 % waiting to almost none
#
# Up to here the images lay on the local disk. Now they lie in an object store, some 40 ms away, as in the cloud. The
# batches are those of stage 05, and each row is built by the same function. What changes is when, where, and how a row
# gets to the trainer: a ladder of six rungs, each one idea more than the last.

# %%
import atexit
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

import mmdp
from mmdp import ladder
from mmdp.cli import parse_flags, report, show
from mmdp.climb import fastest_step, ladder_table, run_rung
from mmdp.local_store import from_afar
from mmdp.plots import drawn_rows, flame, row_map, saw_tooth, timeline
from mmdp.ray_start import Session
from mmdp.span_table import merge
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
    "trace",
    stage="06: the same batches, from an object store, made in six ways with Ray",
)
started = ExitStack()
atexit.register(started.close)  # whatever happens, Ctrl-C too

# %% [markdown]
# ## An object store
#
# What lies on this machine is served by a real S3 server, in a process of its own, behind a relay that holds each
# request back: 40 ms in the median, more than twice as long now and then. `--data s3://bucket/train.jsonl` is read
# where it is.

# %%
uri = started.enter_context(from_afar(config.data, latency_ms=config.latency_ms, config=config))
is_served = uri != config.data
print(f"data: {uri}" + (f", served with {config.latency_ms:g} ms to an answer" if is_served else ""))
cache = Path(started.enter_context(TemporaryDirectory(prefix="mmdp-06-"))) if is_served else None  # no such store again

# %% [markdown]
# ## The pipeline so far, and a trainer
#
# The trainer is *simulated*: busy for `--train-ms`, which is chosen so that the first rung waits for 80 to 90 % of the
# time. It stands for a GPU, and needs no processor. `--train tiny` trains a small real model instead.

# %%
source = mmdp.open_source(uri, config=replace(config, cache_dir=cache))
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
    device=device,
    strict=config.strict,
)
floor = fastest_step(setup, train)
print(f"a step with its batch at hand takes {1000 * floor:,.0f} ms: no loader can make it shorter")

# %%
climbed = {}
stacks = {}


def climb(name: str) -> None:
    if config.rung not in ("all", name):
        return
    with sampled() if name == "serial" else nullcontext(stacks) as seen:
        figures = run_rung(name, setup, train, steps=config.steps, step_floor=floor)
    stacks.update(seen)
    print(f"{name}: waits {figures.wait_ratio:.1%}, {figures.samples_per_second:,.1f} samples/s")
    if climbed:
        print(f"    predicted by the rung before: {list(climbed.values())[-1].predicted:,.1f} samples/s")
    print("    " + str(figures.diagnosis).replace("\n", "\n    "))
    climbed[name] = figures


# %% [markdown]
# ## Rung 1, serial
#
# `Rung("serial")`: when the trainer asks, it fetches one image after the other, and decodes one after the other.

# %%
climb("serial")

# %% [markdown]
# ## Rung 2, concurrent
#
# `replace(serial, has_actors=True)`: all rows of a step at once. Ray actors fetch on their event loops, many in the
# air, and decode in processes of their own. The trainer still waits until the step is there.

# %%
if config.rung != "serial":
    started.enter_context(closing(Session(num_cpus=config.num_workers or None)))
climb("concurrent")

# %% [markdown]
# ## Rung 3, prefetch
#
# `replace(concurrent, is_ahead=True)`: a coordinator has rows built while the trainer works, as far ahead as a number
# of rows and of bytes allow. It sends them by value: every pixel goes through its process.

# %%
climb("prefetch")

# %% [markdown]
# ## Rung 4, references
#
# `replace(prefetch, by_reference=True)`: a row stays in the object store, and the coordinator deals references. The
# rank reads the store's own memory, and copies it once, into the batch.

# %%
climb("references")

# %% [markdown]
# ## Rungs 5 and 6, spread and near
#
# `placement="spread"`: actors on all nodes, so that no network card carries everything. `placement="near"`: on the
# nodes of the ranks that read, so that only compressed images cross the network. On one node neither can matter.

# %%
climb("spread")
climb("near")
places = {node for figures in climbed.values() for node in figures.workers}
if len(places) == 1 and climbed.keys() & {"spread", "near"}:
    print("spread and near: there is one node, so where actors are can make no difference here")

# %% [markdown]
# ## The ladder

# %%
console = Console()
console.width = max(console.width, 110)
console.print(ladder_table(list(climbed.values())))
rungs = list(climbed.values())
misses = [abs(rung.samples_per_second / before.predicted - 1) for before, rung in pairwise(rungs)]
if misses:
    print(f"what the rung before predicted is off by {median(misses):.0%} in the median, {max(misses):.0%} at most")
if config.trace is not None:
    print(f"    trace: {write_trace(merge([rung.spans for rung in rungs]), config.trace)}")
last = rungs[-1]
ends = [rungs[0], last] if len(rungs) > 1 else rungs
report(
    "06 ray pipeline",
    last.tally,
    config,
    ", ".join(f"waits {rung.wait_ratio:.1%} on {rung.rung.name}" for rung in ends),
    sizes.messages(),
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
# The saw-tooth: how long each step waits and trains, rung by rung. Then what goes on in a few steps of each, where the
# serial trainer spends its time, and a batch as its rank received it.

# %%
steps = {name: list(zip(figures.waits, figures.trains, strict=True)) for name, figures in climbed.items()}
show(saw_tooth(steps, title="wait and train time of each step"), "06_saw_tooth", config)
for name, figures in climbed.items():
    show(timeline(figures.spans, title=f"{name}: what goes on in three steps", first=1, steps=3), f"06_{name}", config)
if stacks:
    show(flame(stacks, title="serial: where the trainer's time goes", start="_Run.over"), "06_flame", config)
title = f"a batch as its rank received it, on {last.rung.name}"
show(row_map(drawn_rows(last.first, encoder.image_id), length=budget.tokens, title=title), "06_row_map", config)

# %% [markdown]
# ## What to see
#
# Fetching side by side takes most of the wait away, working ahead the rest. References change nothing in the wait here:
# they take the rows out of the coordinator, through which else all of them go, for all ranks. One process and its
# network card are what runs out first when rows grow and ranks are many; where actors are matters then too.
