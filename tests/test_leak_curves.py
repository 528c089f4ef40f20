"""The leak figure: lines are averaged losses, bars the losses alone, both on one scale; bad data is refused."""

import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mmdp.plots.leak import TrainedWay, leak_bars, leak_curves

RIGHT = TrainedWay("right", [float(loss) for loss in range(50, 20, -1)], {"seen": 30.0, "new": 35.0})
WRONG = TrainedWay("wrong", [loss - 5 for loss in RIGHT.losses], {"seen": 45.0, "new": 50.0})


def test_what_is_drawn_is_what_was_given():
    """A line a way, its points the mean of the last steps; a bar for each way and group, as high as its loss."""
    figure = leak_curves([RIGHT, WRONG], title="t", window=10)
    left, right = figure.axes
    drawn = {line.get_gid(): line.get_xydata() for line in left.lines}
    for way in (RIGHT, WRONG):
        wanted = [(step, np.mean(way.losses[step - 10 : step])) for step in range(10, 31)]
        np.testing.assert_allclose(wanted, drawn[way.name])
        bars = [bar for bar in right.patches if bar.get_gid() == f"{way.name}, alone"]
        assert list(way.alone.values()) == [bar.get_height() for bar in bars]
    assert left.get_ylim() == right.get_ylim()
    assert 0 == left.get_ylim()[0]
    assert 50 < left.get_ylim()[1]


def test_it_says_what_it_shows():
    """Ways in the legend, groups below the bars, values above them, units on the axes; nothing is warned about."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = leak_curves([RIGHT, WRONG], title="what was done", window=10)
        FigureCanvasAgg(figure).draw()
    left, right = figure.axes
    assert ["right", "wrong"] == [text.get_text() for text in figure.legends[0].get_texts()]
    assert ["seen", "new"] == [label.get_text() for label in right.get_xticklabels()]
    assert {"30.00", "35.00", "45.00", "50.00"} == {text.get_text() for text in right.texts}
    assert "loss, nats a label token" == left.get_ylabel()
    assert "steps" in left.get_xlabel()


@pytest.mark.parametrize(
    "ways",
    [[], [TrainedWay("short", [1.0] * 9, {"seen": 1.0})], [RIGHT, TrainedWay("other", RIGHT.losses, {"old": 1.0})]],
)
def test_bad_data_is_refused(ways):
    """No ways, too few steps, ways that were judged on other groups."""
    with pytest.raises(ValueError, match="at least 10 steps and the same groups"):
        leak_curves(ways, title="t", window=10)


def test_bars_and_lines_of_a_model_that_is_not_trained():
    """A bar for each way, and a line over the places in a row, from 0 on, all as high as given."""
    ways = {"alone": (3.0, [3.0, 3.1, 2.9]), "right": (3.0, [3.0, 3.1, 2.9]), "wrong": (2.0, [3.0, 2.0, 1.5])}
    left, right = leak_bars(ways, title="t").axes
    assert {name: loss for name, (loss, _) in ways.items()} == {b.get_gid(): b.get_height() for b in left.patches}
    drawn = {line.get_gid(): line.get_xydata().tolist() for line in right.lines}
    assert {name: [[1, a], [2, b], [3, c]] for name, (_, (a, b, c)) in ways.items()} == drawn
    assert ["3.00", "3.00", "2.00"] == [text.get_text() for text in left.texts]
    assert 0 == left.get_ylim()[0] == right.get_ylim()[0]
