# %% [markdown]
# # 01 Look at the data
#
# Before a loader is written, look at what it will load. A *sample* is one row of the data set: no, one or several
# images, and turns of question and answer. Its *size* is what it will ask of a batch: how many tokens its text and its
# images become. Sizes differ from sample to sample, and that is where all the trouble starts.

# %%
from collections import Counter
from random import Random

import numpy as np

import mmdp
from mmdp.cli import parse_flags, report, show
from mmdp.plots import histograms, sample_card, sorted_lengths

config = parse_flags("index", stage="01: one sample as a card, and the sizes of all of them", seed=None)

# %% [markdown]
# ## New: a source, an encoder, and sizes
#
# `open_source` reads rows on demand. `Encoder` knows how text becomes tokens and what an image costs. `measure` asks it
# for every sample; it reads text and the headers of the images, and decodes no pixel. A sample that can't be used is
# counted with its reason.

# %%
source = mmdp.open_source(config.data)
encoder = mmdp.Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
sizes = mmdp.measure(source, encoder, samples=config.samples, strict=config.strict)

kept = sizes.kept()
tokens = sizes.tokens[kept]
index = config.index if config.index is not None else int(Random(config.seed).choice(kept))
sample = source[index]
encoded = encoder.encode(sample)

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
report("01 dataset", figures, config, say, median_tokens=median, longest_tokens=longest, index=index)

# %% [markdown]
# ## The figures
#
# One sample as a card (another one in each run, unless `--seed` or `--index` is given), the spread of tokens, turns and
# image sizes, and all lengths in order, with grey up to the longest.

# %%
show(sample_card(sample, encoder.pixels(sample, encoded), tokens=len(encoded.ids)), "01_card", config)
samples = [source[int(index)] for index in kept[:2000]]
turns = [Counter(turn.role for turn in one.turns)["assistant"] for one in samples]
image_sizes = [size for one in samples for size in encoder.image_sizes(one)]
show(histograms(tokens, turns, image_sizes), "01_histograms", config)
show(sorted_lengths(tokens, title=f"{len(tokens):,} samples by length"), "01_lengths", config)

# %% [markdown]
# ## What to see, and what comes next
#
# Most samples are short, a few are very long. A tensor is a rectangle: put all samples in one, and all that is grey is
# padding. Stage 02 makes batches of a few samples each, and counts what is padded there.
