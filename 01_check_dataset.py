# %% [markdown]
# # 01 Look at the data
#
# **The question:** what will my loader have to carry?
#
# Before a loader is written, look at what it will load. A *sample* is one record of the data set, a line of its file:
# no, one or several images, and turns of question and answer. Its *size* is what it will ask of a batch: how many
# tokens its text and its images become. Sizes differ from sample to sample, and that is where all the trouble starts.
#
# The blog ([Efficient MultiModal Data Pipeline](https://huggingface.co/blog/mmdp), by the authors of
# [nanoVLM](https://github.com/huggingface/nanoVLM)) starts here too, with one sample on the screen. This stage goes one
# step further and measures all of them, since every later decision is made on these numbers. The data set `demo` is
# drawn by the package, in the shape of AI2D in
# [the_cauldron](https://huggingface.co/datasets/HuggingFaceM4/the_cauldron).
#
# In a notebook the defaults of all flags apply. To turn a knob there, name it in the line with `parse_flags`: what is
# `--batch-size 1` for a script is `parse_flags(..., batch_size=1)` in a cell.

# %%
from collections import Counter
from contextlib import suppress
from random import Random

import numpy as np

import mmdp
from mmdp.cli import in_notebook, parse_flags, report, show
from mmdp.plots import histograms, sample_card, sorted_lengths

seed = 0 if in_notebook() else None  # a script shows another card each time, a notebook keeps its picture
config = parse_flags("index", stage="01: one sample as a card, and the sizes of all of them", seed=seed)

# %% [markdown]
# ## New: a source, an encoder, and sizes
#
# An image has a place in the text, and takes tokens there: placeholders, which the model fills with what its *vision
# tower*, the part that looks at pixels, makes of the picture. So images and text fill one and the same sequence.
#
# `open_source` reads rows on demand. `Encoder` knows how text becomes tokens and what an image costs: 64 tokens each
# with `fixed:64`, and a number that follows from height and width with `--vision qwen3_vl` and its like. With `fixed:N`
# each image is resized to one square, 256 x 256, whatever its shape: it is squashed, as the model will see it. The
# other families keep the shape.
#
# `measure` asks the encoder for every sample; it reads text and the headers of the images, and decodes no pixel. A
# sample that can't be used is counted with its reason, and is never dropped in silence.

# %%
source = mmdp.open_source(config.data, config=config)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
sizes = mmdp.measure(source, encoder, samples=config.samples, strict=config.strict)

kept = sizes.kept()
tokens = sizes.tokens[kept]
build = mmdp.RowBuilder(source, encoder, sizes)
choice = Random(config.seed)
index = int(choice.choice(kept)) if config.index is None else config.index
if not 0 <= index < len(source):
    raise SystemExit(f"--index is {index}: the samples are 0 to {len(source) - 1}")
while (row := build([index])).skipped and config.index is None:
    index = int(choice.choice(kept))  # its header was good, its pixels are not: show another one
if row.skipped:
    raise SystemExit(f"sample {index} can't be shown: {row.skipped[index]}")

# %%
figures = {
    "samples": len(kept),
    "rows": None,
    "tokens": int(tokens.sum()),
    "images": int(sizes.images[kept].sum()),
    "padded_tokens": None,
    "filler_rows": None,
    "padding_share": None,
    "skipped": sizes.counts(),
    "seconds": None,
    "samples_per_second": None,
}
median, longest = int(np.median(tokens)), int(tokens.max())
say = f"median {median:,}, longest {longest:,} tokens"
more = {"median_tokens": median, "longest_tokens": longest, "index": index}
report("01 dataset", figures, config, say, sizes.messages(), sizes.skipped, **more)

# %% [markdown]
# ## The figures
#
# One sample as a card (a script shows another one in each run, unless `--seed` or `--index` is given), the spread of
# tokens, answers and image sizes (of the first 2,000 samples), and all lengths in order, with grey up to the longest.

# %%
before = encoder.image_sizes(source[index])
show(sample_card(source[index], row.images, tokens=len(row), sizes=before), "01_card", config)
turns, image_sizes = [], []
for sample in (source[int(index)] for index in kept[:2000]):
    turns.append(Counter(turn.role for turn in sample.turns)["assistant"])
    with suppress(mmdp.DataError):  # an image that was there when it was measured, and is not now
        image_sizes += encoder.image_sizes(sample)
show(histograms(tokens, turns, image_sizes), "01_histograms", config)
show(sorted_lengths(tokens, title=f"{len(tokens):,} samples by length"), "01_lengths", config)

# %% [markdown]
# ## What to see, and what comes next
#
# In the last figure the samples stand in order of length. Most are short, a few are very long: the longest is more
# than five times the median. A tensor is a rectangle, so whoever puts all samples into one pays for all that is grey.
#
# What this stage does not do: it makes no batch. Stage 02 makes the simplest one, and counts what is padded there.

# %% [markdown]
# ## Exercises
#
# 1. Let an image cost half: `uv run 01_check_dataset.py --vision fixed:32`. By how much does the median fall?
# 2. All 500 samples in one tensor, padded to the longest: which share of it is padding?
#
# <details><summary>Answers</summary>
#
# 1. From 172 to 138, about the 32 tokens that the one image of most samples has lost. Text stays what it is: images
#    are only 29 % of the tokens of this set. With many or large images it is the other way round; try your own data.
# 2. 500 rows of 944 tokens hold 472,000, and 112,120 are real: 76 % is padding. Hardly any batch of stage 02 is that
#    bad, because each is as long as *its* longest sample only.
#
# </details>
