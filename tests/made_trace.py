"""The spans of a run of one actor and one rank, made from numbers that are known."""

import numpy as np

from mmdp.span_table import NO_NUMBER, Lane, Spans

PASS = 0.001  # seconds in which the actor of `trace` passes a row on


def trace(
    *,
    steps: int = 12,
    latency: float = 0.05,
    decode: float = 0.02,
    join: float = 0.004,
    deal: float = 0.01,
    launch: float = 0.012,
    dispatch: float = 0.003,
    epoch: int | None = None,
) -> Spans:
    """A run of one actor and one rank: two rows a step, of two images and three samples each; nothing is ahead.

    After `epoch` steps the reader is told that one is over.
    """
    noted: list[tuple[str, int, float, float, dict[str, int]]] = []
    for step in range(steps):
        at = step * 1.0
        thread = at
        if step == epoch:
            noted.append(("gather", 0, at - 0.1, at - 0.09, {}))
        for row in range(2):
            begin = at + launch + dispatch * (row + 1)
            noted += [("fetch", 1, begin, begin + latency, {"num_bytes": 9000})] * 2
            begin = max(thread + PASS, begin + latency)
            for _ in range(2):
                noted.append(("decode", 2, begin, begin + decode, {}))
                begin += decode
            noted.append(("join", 2, begin, begin + join, {}))
            thread = begin + join
        numbers = {"rows": 2, "samples": 6, "workers": 1, "depth": 4, "ahead": 0}
        end = thread + PASS + deal
        noted.append(("gather", 0, at, end, numbers))
        noted.append(("transfer", 0, end, end + 0.002, {"num_bytes": 80000}))
        noted.append(("join", 0, end + 0.002, end + 0.008, {}))
        noted.append(("wait", 3, at, end + 0.008, {}))
        noted.append(("train", 3, end + 0.008, end + 0.208, {}))
    noted.sort(key=lambda one: one[2])
    lanes = (
        *(Lane("host", 1, 10, "reader", 2), Lane("host", 2, 20, "fetcher", 2)),
        *(Lane("host", 2, 21, "assemble", 2), Lane("host", 1, 11, "main", 2)),
    )
    names = list(dict.fromkeys(one[0] for one in noted))
    keys = dict.fromkeys(key for one in noted for key in one[4])
    return Spans(
        names=tuple(names),
        lanes=lanes,
        name=np.array([names.index(one[0]) for one in noted]),
        lane=np.array([one[1] for one in noted]),
        start=np.array([round(one[2] * 1e9) for one in noted]),
        end=np.array([round(one[3] * 1e9) for one in noted]),
        numbers={key: np.array([one[4].get(key, NO_NUMBER) for one in noted]) for key in keys},
    )
