"""What a data set wastes now, what packing saves, and which budgets suit it: a text to send to a colleague.

Adds: `summary`. Leaves out: counting (`metrics`, `sizes`), drawing (`plots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mmdp.metrics import Tally
    from mmdp.records import Budget
    from mmdp.sizes import Sizes


def summary(name: str, sizes: Sizes, budget: Budget, naive: Tally, packed: Tally) -> str:
    """Some lines of text.

    Args:
        name: of the data set.
        sizes: of all of its samples, complete.
        budget: that it was packed with.
        naive: an epoch padded to the longest of each batch.
        packed: an epoch of packed rows.

    Raises:
        ValueError: one of the epochs has no token.
    """
    if not naive.tokens or not packed.tokens:
        raise ValueError("an epoch without a token has nothing to compare: see the reasons why samples are skipped")
    lengths, images = sizes.tokens[sizes.kept()], sizes.images[sizes.kept()]
    before, after = ((tally.tokens + tally.padded_tokens) / tally.tokens for tally in (naive, packed))
    skipped = sizes.counts(budget)
    left_out = sum(skipped.values())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items(), key=lambda one: -one[1]))
    better = sizes.suggest()
    same = sizes.suggest(budget.tokens)
    per_image = f"an image every {lengths.sum() / images.sum():,.0f} tokens" if images.sum() else "no images"
    lines = [
        f"What {name} asks for",
        f"  samples   {len(sizes):,}: median {np.median(lengths):,.0f}, 99 % up to "
        f"{np.quantile(lengths, 0.99):,.0f}, longest {lengths.max():,} tokens; {per_image}",
        f"  now       padded to the longest of each batch: {naive.padding_share:.0%} of all tokens are padding",
        f"  packed    into rows of {budget.tokens:,} tokens: {packed.padding_share:.1%} are; the same tokens cost the "
        f"model {before / after:.1f} times less",
        f"  skipped   {left_out:,} of {len(sizes):,}" + (f": {reasons}" if reasons else ""),
        f"  budget    --max-tokens {better.tokens} --max-images {better.images} holds 99 % of the samples; with "
        f"{budget.tokens:,} tokens --max-images {same.images}",
        "            Images should follow tokens: with fewer a row is closed by its images, half empty",
    ]
    return "\n".join(lines)
