"""How much an executor has in flight at a time: told by its items, and by the times at which it worked on them."""

import itertools


class Watched:
    """Items whose taking is counted against what the consumer has."""

    def __init__(self, items, weight=lambda item: 1):
        self.items, self.weight = items, weight
        self.in_flight, self.most = 0, 0

    def __iter__(self):
        for item in self.items:
            self.in_flight += self.weight(item)
            self.most = max(self.most, self.in_flight)
            yield item

    def received(self, item):
        self.in_flight -= self.weight(item)


def most_at_once(begun: list[float], received: list[float]) -> int:
    """How many were begun and not yet received, at most."""
    steps = sorted([(time, 1) for time in begun] + [(time, -1) for time in received])
    return max(itertools.accumulate(step for _, step in steps))
