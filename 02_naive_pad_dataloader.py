# %% [markdown]
# # 02 Naive padding
#
# **The question:** what does the simplest loader waste?
#
# The first loader everybody writes: take the next samples, and pad each to the longest of its batch. It is right, and
# it is wasteful: the GPU computes the padding as if it were text. The number to watch from here on is the **padding
# share**, padding tokens of all tokens of a batch.

# %%
from collections import Counter
from functools import partial

import torch
from torch.utils.data import DataLoader

import mmdp
from mmdp.cli import parse_flags, report, show
from mmdp.metrics import Tally
from mmdp.plots import drawn_rows, row_map

config = parse_flags("batch_size", "num_workers", stage="02: pad every batch to its longest sample")

# %% [markdown]
# ## The pipeline so far

# %%
source = mmdp.open_source(config.data, config=config)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
sizes = mmdp.measure(source, encoder, samples=config.samples, strict=config.strict)

# %% [markdown]
# ## New: rows, a collate function, a DataLoader
#
# A *row* is what a batch is made of; here it holds one sample. `mmdp.batch` stacks rows to (B, L), where L is the
# longest row of the batch, and pads on the right. Labels are -100 on questions, images and padding: only answers are
# learnt. They are not shifted: the model compares the token at place t with the label at t + 1 by itself, and who
# shifts them once more trains it to skip a token, without an error.

# %%
build = mmdp.RowBuilder(source, encoder, sizes, strict=config.strict)
rows = mmdp.Rows(build, sizes.kept()[:, None])
loader = DataLoader(
    rows,
    batch_size=config.batch_size,
    shuffle=True,
    generator=torch.Generator().manual_seed(config.seed or 0),
    collate_fn=partial(mmdp.batch, pad_id=encoder.pad_id),
    num_workers=config.num_workers,
    multiprocessing_context="fork" if config.num_workers else None,  # spawn would run this script again
)

# %%
tally = Tally(skipped=Counter(sizes.counts()))
batches = tally.over(loader)
first = next(batches)
for _ in batches:
    pass

# %%
more = {"length": first.input_ids.shape[1], "batch_size": config.batch_size}
messages, reasons = sizes.messages() | build.messages(tally.failed), sizes.skipped | tally.failed
report("02 naive padding", tally, config, "", messages, reasons, **more)

# %% [markdown]
# ## The figure: the row map
#
# Rows go down, tokens go across, each sample has a colour, image tokens are hatched. Grey is padding.

# %%
title = f"padded to the longest: {first.padded_tokens / first.segments.numel():.0%} of this batch is padding"
show(row_map(drawn_rows(first, encoder.image_id), title=title), "02_row_map", config)

# %% [markdown]
# ## What to see, and what comes next
#
# One long sample sets the length of its whole batch, and most of the other seven are grey behind it. On the demo set
# half of all tokens are padding; stage 05 says at its end how much it is on your own. And each batch has another
# shape, which compiled models dislike, and a memory need that nobody can tell beforehand.
#
# What this stage does not do: bound anything. Stage 03 gives all batches one length, and has to decide what happens
# to samples that are longer.

# %% [markdown]
# ## Exercises
#
# 1. `uv run 02_naive_pad_dataloader.py --batch-size 1`, then `64`. Which way does the padding share go, and why?
# 2. Samples sorted by length would hardly pad at all. Put these lines in place of `rows = ...`, say `shuffle=False` in
#    the DataLoader, and run it again. Why doesn't everybody?
#
#    ```python
#    import numpy as np
#
#    kept = sizes.kept()
#    kept = kept[np.argsort(sizes.tokens[kept])]
#    rows = mmdp.Rows(build, kept[:, None])
#    ```
#
# <details><summary>Answers</summary>
#
# 1. 0 % and 68 %: the more samples a batch draws, the longer its longest is, while the typical one stays as it is. So
#    the waste grows just where a GPU gets more to do.
# 2. The share falls from 51 to 3 %. But the order of training is then short samples first and long ones last, each
#    batch all of one kind. Gradients of such batches pull to one side, and the last steps take longest.
#    Shuffling whole batches mends half of it. Packing, from stage 04 on, has both: nothing wasted, and samples in
#    random company.
#
# </details>
