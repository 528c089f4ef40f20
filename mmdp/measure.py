"""Measures a data set beforehand: `uv run python -m mmdp.measure --data DATA --tokenizer ...`.

Adds: the command. What it does stands in `measuring.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mmdp.cli import READING, parse_flags, print_messages, speak_plainly
from mmdp.encode import Encoder
from mmdp.measuring import measure
from mmdp.records import Budget
from mmdp.refusals import counted
from mmdp.sources import open_source


def main(args: Sequence[str] | None = None) -> None:
    """Measures, and prints what was found: sizes, what is skipped and why, and a budget that fits."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--data")
    if args is None:
        speak_plainly()
    config = parse_flags(
        *("data", "image_folder", "tokenizer", "vision", "chat_template", "samples", "strict"),
        *("max_tokens", "max_images", "report"),
        *READING,
        stage="Measure a data set beforehand: sizes, what is left out and why, and a budget that fits.",
        args=arguments,
        common=(),
    )
    if config.report is not None:
        config.report.parent.mkdir(parents=True, exist_ok=True)
    source = open_source(config.data, config=config)
    encoder = Encoder(config.tokenizer, config.vision, chat_template=config.chat_template)
    budget = Budget(config.max_tokens, config.max_images)
    sizes = measure(source, encoder, budget=budget, samples=config.samples, strict=config.strict)
    kept = sizes.kept()
    tokens = sizes.tokens[kept]
    say = f"{counted(len(sizes), 'sample')} of {source.name}: {len(kept):,} can be used"
    print(f"{say}, left out: {sizes.counts() or 'none'}")
    print(
        f"tokens: {int(tokens.sum()):,} in all, mean {tokens.mean():.0f}, longest {tokens.max()}; "
        f"images: {int(sizes.images[kept].sum()):,}, mean {sizes.images[kept].mean():.2f}"
    )
    print(f"over the budget of {budget.tokens} tokens and {budget.images} images: {len(sizes.refused(budget)):,}")
    suggested = sizes.suggestions()
    for share, better in suggested:
        print(f"a budget that holds {share} of them: --max-tokens {better.tokens} --max-images {better.images}")
    messages = sizes.messages(budget, source)
    print_messages(messages, sizes.skipped | sizes.refused(budget))
    if config.report is not None:
        figures: dict[str, Any] = {
            "samples": len(kept),
            "tokens": int(tokens.sum()),
            "images": int(sizes.images[kept].sum()),
        }
        figures |= {"skipped": sizes.counts(budget), "suggested": [suggested[0][1].tokens, suggested[0][1].images]}
        config.report.write_text(json.dumps({**figures, "messages": messages}, indent=1) + "\n")


class _Command(ModuleType):
    """Importing this file puts it in the place of the function `mmdp.measure`; so it can be called as that."""

    __call__ = staticmethod(measure)


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = _Command
