# %% [markdown]
# # 03 Constrained padding
#
# **The question:** can a fixed length bound the waste, and what does it cost?
#
# Give every batch the same length. A sample that is longer is left out, and counted: cutting it could split the
# tokens of an image, or leave a question without its answer. A fixed length bounds memory, and suits compiled models.

# %%
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader

import mmdp
from mmdp.cli import parse_flags, report, show
from mmdp.metrics import Tally, padding_share
from mmdp.plots import drawn_rows, row_map

config = parse_flags(
    "batch_size", "max_tokens", "num_workers", stage="03: one fixed length for all batches", max_tokens=320
)

# %% [markdown]
# ## The pipeline so far

# %%
source = mmdp.open_source(config.data, config=config)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
sizes = mmdp.measure(source, encoder, samples=config.samples, strict=config.strict)
build = mmdp.RowBuilder(source, encoder, sizes, strict=config.strict)


def batches_of(indices: np.ndarray, collate: Callable) -> DataLoader:
    """Batches in an order that the seed decides."""
    return DataLoader(
        mmdp.Rows(build, indices[:, None]),
        batch_size=config.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(config.seed or 0),
        collate_fn=collate,
        num_workers=config.num_workers,
        multiprocessing_context="fork" if config.num_workers else None,  # spawn would run this script again
    )


# %% [markdown]
# ## First try: drop while batching
#
# The collate function drops what is too long; so does the one in the blog. Now batches have fewer rows than asked for:
# those that are gone are ghosts in the figure. On several GPUs that is worse than a waste. Each GPU is fed by a process
# of its own, a *rank*, all of them step together, and one may be left with no row at all.

# %%
budget = mmdp.Budget(tokens=config.max_tokens)
collate = partial(mmdp.batch, pad_id=encoder.pad_id, length=budget.tokens)
every = sizes.kept()
for rows in batches_of(every, list):
    ghosts = [len(row) for row in rows if len(row) > budget.tokens]
    if 0 < len(ghosts) < len(rows):
        lost = collate(rows)
        title = f"dropped while batching: {len(lost.samples)} of {len(rows)} rows are left"
        drawn = drawn_rows(lost, encoder.image_id)
        show(row_map(drawn, length=budget.tokens, title=title, dropped=ghosts), "03_lost_sample", config)
        break

# %% [markdown]
# ## New: drop before batching
#
# Sizes are known before a pixel is read. So leave the long samples out first, and every batch keeps its rows. This is
# the thought that all later stages grow from: **decide on integers, before there are pixels**.

# %%
fitting = sizes.kept(budget)
if not len(fitting):
    enough = np.quantile(sizes.tokens[every], 0.99, method="inverted_cdf")
    raise SystemExit(f"no sample fits {budget.tokens} tokens: `--max-tokens {enough}` holds 99 %")
loader = batches_of(fitting, collate)

# %%
tally = Tally(skipped=Counter(sizes.counts(budget)))
batches = tally.over(loader)
first = next(batches)
for _ in batches:
    pass

# %%
dropped = len(every) - len(fitting)
at_1024 = padding_share(1024 * len(every) - int(sizes.tokens[every].sum()), int(sizes.tokens[every].sum()))
say = f"dropped {dropped / len(every):.1%} as longer than {config.max_tokens}"
more = {"length": config.max_tokens, "batch_size": config.batch_size, "dropped": dropped}
more |= {"padding_share_at_1024": at_1024}
messages, reasons = sizes.messages() | build.messages(tally.failed), sizes.skipped | tally.failed
report("03 constrained padding", tally, config, say, messages, reasons, **more)

# %% [markdown]
# ## The figure
#
# All rows are there, all of one length. What was dropped stands below as ghosts, bars that run past the line: eight of
# them, from the shortest to the longest.

# %%
title = f"padded to {config.max_tokens}: {first.padded_tokens / first.segments.numel():.0%} of this batch is padding"
ghosts = [int(sizes.tokens[index]) for index in sizes.refused(budget)]
drawn = drawn_rows(first, encoder.image_id)
show(row_map(drawn, length=config.max_tokens, title=title, dropped=ghosts), "03_row_map", config)

# %% [markdown]
# ## What to see, and what comes next
#
# The padding share fell by a few points, but at a price. A fifth of the samples is gone, and not any fifth: long
# samples are those of many turns, so nearly half of all answer tokens went with them. And the length is a guess: at
# 1024 tokens nothing is dropped, but the typical row is then mostly padding, 78 % of it, more than in stage 02.
#
# A row wastes little only if it is filled with several samples: that is packing, and stage 04.

# %% [markdown]
# ## Exercises
#
# 1. `uv run 03_constrained_pad.py --max-tokens 200`, then `1024`. Is there a length that neither drops nor pads much?
# 2. Which samples does the default leave out? `sizes.kept(budget)` has the indices of those kept, and
#    `list(sizes.refused(budget))` of those dropped. Compare the mean of `sizes.label_tokens[indices]` of the two.
#
# <details><summary>Answers</summary>
#
# 1. No. 200 tokens: 32 % padding, but 43 % of the samples, and two thirds of all tokens, are dropped. 1024: none are
#    dropped, and 78 % is padding. One length can't suit samples that differ so much.
# 2. Of those kept a sample has about 8 answer tokens, of those dropped about 29: seven questions about a picture where
#    others have two. A model trained on what is left has seen few long talks, and no report said which.
#
# </details>
