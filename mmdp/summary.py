"""What a data set wastes now, what packing saves, and which budgets suit it: a text to send to a colleague.

Adds: `summary`. Leaves out: counting (`metrics`, `sizes`), drawing (`plots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmdp.refusals import Reason, counted
from mmdp.sizes import ALARM_SHARE

if TYPE_CHECKING:
    from mmdp.metrics import Tally
    from mmdp.records import Budget
    from mmdp.sizes import Sizes


_FEW_ROWS = 20
"""With fewer, a last row that is not full, and a lower bound that is rounded up, weigh much."""


def summary(name: str, sizes: Sizes, budget: Budget, naive: Tally, packed: Tally) -> str:
    """Some lines of text.

    Args:
        name: of the data set.
        sizes: of all of its samples, complete.
        budget: that it was packed with.
        naive: an epoch padded to the longest of each batch.
        packed: an epoch of packed rows; what it skipped is all that was left out, while measuring, planning and
            building.

    Raises:
        ValueError: one of the epochs has no token.
    """
    if not naive.tokens or not packed.tokens:
        raise ValueError("an epoch without a token has nothing to compare: see the reasons why samples are skipped")
    usable = sizes.kept()
    lengths, images = sizes.tokens[usable], sizes.images[usable]
    before, after = ((tally.tokens + tally.padded_tokens) / tally.tokens for tally in (naive, packed))
    left_out = packed.skipped.total()
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in packed.skipped.most_common())
    per_image = f"an image every {lengths.sum() / images.sum():,.0f} tokens" if images.sum() else "no images"
    lost = 1 - packed.tokens / lengths.sum()
    lost_too = f"; {lost:.0%} of the tokens that were measured" if left_out and lost > 0 else ""
    usual, nearly_all = np.quantile(lengths, (0.95, 0.99), method="inverted_cdf")
    lines = [
        f"What {name} asks for",
        f"  samples   {len(sizes):,}, of which {len(usable):,} could be measured; {per_image}",
        f"  lengths   median {np.median(lengths):,.0f}, 95 % up to {usual:,.0f}, "
        f"99 % up to {nearly_all:,.0f}, longest {lengths.max():,} tokens",
        f"  now       all of them, padded to the longest of each batch: {naive.padding_share:.0%} of all tokens are "
        "padding",
        f"  packed    into rows of {budget.tokens:,} tokens: {packed.padding_share:.1%} are; the model computes "
        f"{after:.2f} positions for each real token, not {before:.2f}",
        f"  skipped   {left_out:,} of {len(sizes):,}" + (f": {reasons}" if reasons else "") + lost_too,
    ]
    if packed.filler_rows:
        computed = (packed.tokens + packed.padded_tokens + packed.filler_rows * budget.tokens) / packed.tokens
        lines.insert(
            -1,
            f"            {packed.filler_rows:,} of {packed.rows + packed.filler_rows:,} rows complete the last "
            f"batch as filler: with them {computed:.2f}",
        )
    if left_out > ALARM_SHARE * len(sizes):
        most, count = packed.skipped.most_common(1)[0]
        for_it = f"all for {most}" if count == left_out else f"{count:,} of them for {most}"
        way = "raise the budget" if most in (Reason.TOO_LONG, Reason.TOO_MANY_IMAGES) else "mend that first"
        if 2 * count <= left_out:
            for_it, way = f"for {len(packed.skipped)} reasons", "mend those first"
        found = f"{left_out:,} of {len(sizes):,} samples are left out, {for_it}: {way}."
        lines.insert(1, f"  ATTENTION {found} What follows")
        lines.insert(2, "            is of the few that are left")
        return "\n".join(lines)
    (share, better), *shorter = sizes.suggestions()
    lines.append(
        f"  budget    --max-tokens {better.tokens} --max-images {better.images} holds {share} of the samples, "
        "in rows long enough to be packed full"
    )
    for less, fewer in shorter:
        flags = f"--max-tokens {fewer.tokens} --max-images {fewer.images}"
        lines.append(f"            {flags} holds {less}: only the few longest ask for more")
    same = sizes.suggest(budget.tokens)
    spare = budget.images is not None and budget.images > (same.images or 0)
    more = f" is enough; {budget.images} as here may let rows differ more" if spare and images.any() else ""
    lines.append(f"            with {budget.tokens:,} tokens as here: --max-images {same.images}{more}")
    if images.any():
        lines.append("            Images should follow tokens: with fewer images than this, rows are closed early")
    if packed.rows < _FEW_ROWS:
        of = f"{counted(packed.rows, 'row')} of {budget.tokens:,} tokens"
        few = f"  note      {of} say little of packing: one that is not full weighs much in what"
        lines[1:1] = [few, "            follows. Try the budget below, or more samples"]
    return "\n".join(lines)
