# %% [markdown]
# # 02 Naive padding
#
# The first loader everybody writes: take the next samples, and pad each to the longest of its batch. It is right, and
# it is wasteful: the GPU computes the padding as if it were text.

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
source = mmdp.open_source(config.data)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
sizes = mmdp.measure(source, encoder, samples=config.samples, strict=config.strict)

# %% [markdown]
# ## New: rows, a collate function, a DataLoader
#
# A *row* is what a batch is made of; here it holds one sample. `mmdp.batch` stacks rows to (B, L), where L is the
# longest row of the batch, and pads on the right. Labels are -100 on questions, images and padding: only answers are
# learnt.

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
report("02 naive padding", tally, config, messages=sizes.messages(), **more)

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
# One long sample sets the length of its whole batch. And each batch has another shape, which compiled models dislike.
# Stage 03 gives all batches one length, and has to decide what happens to samples that are longer.
