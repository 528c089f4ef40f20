# %% [markdown]
# # 05 The multimodal knapsack
#
# **The question:** what does it take to put packed rows in front of a real training run?
#
# A row has two budgets: tokens, and images. Images cost the vision tower time and memory that no token count shows,
# and a GPU that gets many of them keeps all others waiting. So rows are packed with both budgets in view, planned
# from sizes alone, and only then built, in parallel, a few steps ahead of the training loop.

# %%
import tempfile
import time
from collections import Counter
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

import mmdp
from mmdp import knapsack
from mmdp.cli import keep, parse_flags, report, show
from mmdp.metrics import Tally, padding_share
from mmdp.plots import drawn_rows, fill_curves, padding_strip, row_map, sight
from mmdp.replay import perfect
from mmdp.summary import summary
from mmdp.tiny_model import tiny_vlm
from mmdp.wait_meter import WaitMeter

config = parse_flags(
    "batch_size",
    "max_tokens",
    "max_images",
    "executor",
    "num_workers",
    "depth",
    "train",
    "perfect",
    stage="05: packed rows with a token and an image budget, built in parallel",
)

# %% [markdown]
# ## The pipeline so far

# %%
source = mmdp.open_source(config.data, config=config)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
budget = mmdp.Budget(config.max_tokens, config.max_images)
sizes = mmdp.measure(source, encoder, budget=budget, samples=config.samples, strict=config.strict)

# %% [markdown]
# ## 05a Two budgets: why ordering by tokens alone fails
#
# A tight image budget follows the token budget: about as many images as come with so many tokens on average. Then both
# bind; `sizes.suggest` finds the least that costs at most 2 % more rows than a budget of any number of images would.
# First-fit decreasing puts the longest samples first, and is left with short ones: their rows run out of images while
# half of their tokens are free. The knapsack keeps tokens in reserve for images that are still to come. If the samples
# that wait bring 222 tokens for each image, and a row may take 3 images more, it keeps 666 tokens free for them, and
# fills the rest. *Vary by* below is the standard deviation of the images a row, over their mean.

# %%
both = sizes.suggest(config.max_tokens)
kept = sizes.kept(both)
order = np.random.default_rng(config.seed).permutation(kept)
tokens, images = sizes.tokens[order], sizes.images[order]
bound = knapsack.lower_bound(tokens, images, both)
fills = {}
print(f"rows of {both.tokens:,} tokens and {both.images} images (fewer would close rows early); at least {bound} rows")
for name, strategy in (("first-fit decreasing", "ffd"), ("knapsack", "knapsack")):
    rows = knapsack.pack(tokens, images, both, strategy=strategy)
    per_row = np.array([images[row].sum() for row in rows])
    fills[strategy] = [tokens[row].sum() / both.tokens for row in rows]
    spread = per_row.std() / max(per_row.mean(), 1e-9)
    over = len(rows) / bound - 1
    print(f"{name:>24}: {len(rows):4d} rows, {over:.1%} over the bound, images a row vary by {spread:.0%}")
title = f"budget of {both.tokens} tokens and {both.images} images"
show(fill_curves(fills, title=title, bound=bound), "05_two_budgets", config)

# %% [markdown]
# ## 05b New: a plan, and a loader that follows it
#
# `plan` gives the rows of every epoch: packed, of like cost where they meet in a step, the same for any number of
# ranks and workers. It packs a stream of its own, so it may need a row more or less than 05a, or than stage 04; of some
# 110 rows one is 1 %. `Loader` builds them ahead. Its whole state is a row number, so a run that was killed goes on
# with the very next batch.
#
# Which image budget? The tight one of 05a costs a row or two more, and in return no row has many images: what the
# vision tower (the part of the model that looks at pixels) needs for a step is bounded more closely, and ranks wait
# less for each other. A wide one, such as the default of 9, leaves the packing to the tokens. Both are planned here;
# the rows that are built are those of `--max-images`.
#
# The blog packs what is already decoded: its buffer holds float images, and that is where its gigabytes and its long
# wait for the first batch come from. Here the buffer holds sizes; a pixel is decoded when its row is due, and goes to
# the batch as uint8, a quarter of the bytes.

# %%
for each in dict.fromkeys((both, budget)):
    planned = mmdp.plan(sizes, each, seed=config.seed or 0).epoch(0)
    per_row = np.array([sizes.images[list(row)].sum() for row in planned])
    spread = per_row.std() / max(per_row.mean(), 1e-9)
    mean, most = per_row.mean(), per_row.max()
    print(f"{f'{each.images} images allowed':>24}: {len(planned):4d} rows, {mean:.1f} images in the mean, ", end="")
    print(f"{most} at most, vary by {spread:.0%}")
plan = mmdp.plan(sizes, budget, seed=config.seed or 0)
loader = mmdp.Loader(
    source,
    encoder,
    plan,
    batch_size=config.batch_size,
    executor=config.executor,
    num_workers=config.num_workers or None,
    depth=config.depth,
    strict=config.strict,
)

# %%
start = time.perf_counter()
tally = Tally(skipped=Counter(sizes.counts(budget)))
batches = tally.over(loader)
first = next(batches)
warm = time.perf_counter() - start
for _ in batches:
    pass

# %% [markdown]
# A cold start, with nothing measured: the plan asks for sizes as it goes, so the first batch waits for a few hundred.

# %%
with tempfile.TemporaryDirectory() as nothing:
    start = time.perf_counter()
    lazy = mmdp.measure(source, encoder, samples=config.samples, lazy=True, cache=Path(nothing))
    cold_loader = mmdp.Loader(source, encoder, mmdp.plan(lazy, budget), batch_size=config.batch_size)
    next(iter(cold_loader))
    cold = time.perf_counter() - start
    cold_loader.close()

# %% [markdown]
# The same samples as in stages 02 and 03 (03 at the 320 tokens it has by itself, so longer ones are missing there), on
# one scale. Padding is counted there too, so pixels are left out.

# %%
build = mmdp.RowBuilder(source, encoder, sizes, pixels=False)
kept, short = (np.setdiff1d(each, [*loader.failed]) for each in (sizes.kept(), sizes.kept(mmdp.Budget(320))))
tallies = {}
for stage, length, indices in (("02 naive", None, kept), ("03 constrained", 320, short)):
    tallies[stage] = Tally()
    rows = DataLoader(
        mmdp.Rows(build, indices[:, None]),
        batch_size=config.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(config.seed or 0),
        collate_fn=partial(mmdp.batch, pad_id=encoder.pad_id, length=length),
    )
    for batch in rows:
        tallies[stage].add(batch)
tallies["05 packed"] = tally
for stage, one in tallies.items():
    length = " of at most 320 tokens" if stage == "03 constrained" else ""
    print(f"{stage:>14}: padding {one.padding_share:5.1%}, {one.samples:,} samples{length} delivered")
every = int(sizes.tokens[kept].sum())
strip = {stage: (one.tokens, one.padded_tokens, every - one.tokens) for stage, one in tallies.items()}
show(padding_strip(strip, title=f"what {len(kept):,} samples become, stage by stage"), "05_padding_strip", config)

# %% [markdown]
# ## 05c New: fed to the device, and trained on
#
# What keeps the samples of a row apart? In attention each token sees all tokens before it in its row, those of the
# sample in front of its own too. Models of transformers cut the row where its `position_ids` do not go up by one:
# since positions restart with each sample, one block a sample is left, as in the left half of the figure.
#
# They look for such places only where nothing else says what is to be seen. A mask (B, L), even all ones, says "look at
# everything that is marked"; a cache says "these tokens go on from earlier ones". Each switches the search off, without
# a word, and the row is one long sample: the right half. So `adapt`, inside `loss`, gives positions that restart, no
# mask, and `use_cache=False`. Padding needs no mask either: it is a block of its own, and has no labels.

# %%
build = mmdp.RowBuilder(source, encoder, sizes)
row = next((row for row in map(build, plan.epoch(0)) if len(row.samples) > 1), None)  # a damaged image leaves its row
if row is not None:
    packed = mmdp.batch([row], pad_id=encoder.pad_id)
    positions, segments = packed.position_ids[0].numpy(), packed.segments[0].numpy()
    show(sight(positions, segments, title=f"who sees whom: one row of {len(row.samples)} samples"), "05_sight", config)

# %% [markdown]
# `feed` keeps one batch ready on the device while the model trains on the one before. `WaitMeter` measures how long the
# loop is blocked on the next batch. The model is of the family that `--vision` names (SmolVLM for `fixed:N`), but tiny
# and fresh: its loss starts near ln(vocabulary), a blind guess, and falls.

# %%
training, model = {}, None
if config.train:
    try:
        model = tiny_vlm(encoder, seed=config.seed or 0)
        vocabulary = model.get_input_embeddings().num_embeddings
        print(f"    a blind guess among the {vocabulary:,} tokens of the vocabulary costs {np.log(vocabulary):.2f}")
    except ValueError as error:
        print(f"    no training: {error}")

# %%
if model is not None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=3e-3)
    feed = mmdp.feed(perfect(loader) if config.perfect else loader, device)
    meter = WaitMeter(device)
    epochs = (batch for _ in count() for batch in feed)
    losses, samples = [], []
    for batch in islice(meter.over(epochs), config.train):
        loss = mmdp.loss(model, batch, labelled_only=True)  # logits of a large vocabulary would fill the memory
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        samples.append(sum(map(len, batch.samples)))
        if len(losses) % -(-config.train // 10) == 0 or len(losses) == 1:
            print(f"    step {len(losses):3d} | loss {losses[-1]:.3f} | {batch.label_tokens:,} label tokens")
    epochs.close()
    training = {"losses": losses, **meter.as_dict(), "perfect": config.perfect, "device": device.type}
    if meter.wait_ratio is not None:
        pace = sum(samples[1:]) / (training["wait_seconds"] + training["train_seconds"])
        training["trained_samples_per_second"] = pace
        fed = "the same batches over and over" if config.perfect else "the loader"
        print(f"    wait ratio {meter.wait_ratio:.1%} on {device.type}, fed by {fed}; {pace:.1f} samples/s trained")

# %% [markdown]
# Do the samples of a row really not see each other? Nothing warns where they do, and the loss need not tell. A trained
# model may look better for it, where positions run on and the answer of one sample helps with the next; or far worse,
# where positions restart below a mask of ones, so that two samples lie on the same places ("Is it right?" in the
# README has both, measured). In a fresh one like this, all are alike. So each sample is run alone and in its row, by
# the inputs just trained with. And a check that can't fail is worth nothing: so once more, with that mask of ones.

# %%
if model is not None and row is not None:
    isolation = mmdp.check_isolation(model, packed)
    mistaken = mmdp.check_isolation(model, packed, layout="positions_and_mask")
    print(f"{isolation}\n    with positions that restart below a mask of ones it would be {mistaken.error:.2g}")
    training |= {"isolation_error": isolation.error, "mistaken_error": mistaken.error}
elif model is not None:
    print("    no row holds two samples: there is nothing to keep apart")
loader.close()

# %%
say = f"first batch after {warm:.2f} s, cold {cold:.2f} s"
report(
    "05 multimodal knapsack",
    tally,
    config,
    say,
    sizes.messages(budget, source) | loader.messages(),
    sizes.skipped | sizes.refused(budget) | loader.failed,
    lower_bound=knapsack.lower_bound(sizes.tokens[sizes.kept(budget)], sizes.images[sizes.kept(budget)], budget),
    images_per_row=tally.images / tally.rows,
    first_batch_seconds=warm,
    cold_first_batch_seconds=cold,
    padding_shares={stage: one.padding_share for stage, one in tallies.items()},
    training=training,
)
letter = summary(source.name, sizes, budget, tallies["02 naive"], tally)
keep(letter, "05_report", config)

# %% [markdown]
# ## The figure
#
# Every row holds several samples, each in its colour, images hatched. Of the grey, next to nothing is left. With few
# samples there are fewer rows than a batch wants: *filler rows* complete it, so that all ranks take the same steps.
# They are drawn paler, and are not counted as padding.

# %%
title = f"packed: {padding_share(first.padded_tokens, first.num_tokens):.1%} of this batch is padding"
if first.filler_rows:
    print(f"    {first.filler_rows} of {len(first.samples)} rows of this batch are filler")
show(row_map(drawn_rows(first, encoder.image_id), length=budget.tokens, title=title), "05_row_map", config)

# %% [markdown]
# ## What to see, and what comes next
#
# Rows are full to the brim, no sample was cut, and none was lost: half as many tokens go through the model as in
# stage 02, for the same samples. Packed and alone, each sample has the same logits, so the model learns from a row
# what it would learn from its samples. The wait ratio says whether the data keep up: on a laptop the model is the
# slow part.
#
# What this stage does not do: fetch. On a GPU the model is fast, and in a cluster the images lie in an object store.
# That is stage 06.

# %% [markdown]
# ## Exercises
#
# 1. Give rows too few images: `uv run 05_multimodal_knapsack.py --max-images 3`. What happens to the padding, and what
#    would `sizes.suggest(1024)` say?
# 2. Train longer on the loader, `uv run 05_multimodal_knapsack.py --train 20`, then on batches that are there already:
#    the same with `--perfect`. What does the difference tell you, and what would you do where it is large?
# 3. Kill and resume. Take three batches of a loop over the loader, keep `state = batch.state` of the third, make a
#    new `Loader` with another `batch_size`, and call `load_state_dict(state)` before the loop. Which samples come?
#
# <details><summary>Answers</summary>
#
# 1. Padding rises from 1.4 to 36 %: rows are closed by their third image, with a third of their tokens empty. The
#    suggestion is 5 images for 1024 tokens: **images should follow tokens**. A larger number costs no rows, since
#    tokens then bind alone; rows differ more in images.
# 2. Look at the wait ratio first: below 5 % the data keep up, and work on the loader gains nothing. The second run is
#    the ceiling: no loader can beat batches that are there already. On a GPU the difference is what there is to gain,
#    and the diagnosis of stage 06 says how. On a CPU the model and the threads that decode share the processors, so
#    the model itself is slower beside a loader; and runs of seconds differ, on a busy machine even several times over,
#    so repeat them. The error of the mask of ones shrinks as the model trains: it has learnt by then which tokens are
#    frequent, and little that depends on what it sees. A model that has learnt more loses more, as the README shows.
# 3. The rows behind the third batch, none left out and none twice, in steps of the new size. The state counts rows of
#    the plan, and the plan knows no batch size.
#
# </details>
