"""Laws of the figures of time: bars are what was measured, on one scale; nothing is cut off; stacks add up."""

import time
import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mmdp import plots
from mmdp.plots.timeline import LANE_COLOURS, LANES
from mmdp.span_table import Lane, Spans, merge
from mmdp.stacks import sampled

MS = 1_000_000
RUNGS = {
    "serial": [(2.0, 0.4), (1.5, 0.4), (2.5, 0.4)],
    "concurrent": [(0.2, 0.4)] * 40,
    "references": [(0.002, 0.4)] * 12,
}
STACKS = {
    ("run.main",): 1.0,
    ("run.main", "run.train"): 19.0,
    ("run.main", "mmdp.encode.Encoder.pixels", "mmdp.store.read"): 50.0,
    ("run.main", "mmdp.encode.Encoder.pixels", "mmdp.images.decode", "PIL.Image.Image.resize"): 30.0,
    ("other.thread",): 0.0,
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _table(name: str, times) -> Spans:
    start, end = np.array(times, dtype=np.int64).reshape(-1, 2).T * MS
    zeros = np.zeros(len(start), dtype=np.int64)
    return Spans((name,), (Lane("host", 1, 1, name, 2),), zeros, zeros, start, end)


def _spans() -> Spans:
    """Ten steps of 100 ms: 30 of waiting, 70 of training; four fetches at a time, and one decode after the other."""
    steps = [100 * step for step in range(10)]
    return merge(
        [
            _table("wait", [(at, at + 30) for at in steps]),
            _table("train", [(at + 30, at + 100) for at in steps]),
            _table("fetch", [(at + 1, at + 21) for at in steps for _ in range(4)]),
            _table("decode", [(at + 20 + 2 * k, at + 22 + 2 * k) for at in steps for k in range(4)]),
            _table("gather", [(at, at + 30) for at in steps]),
        ]
    )


def _words(figure: Figure) -> list[str]:
    (axes,) = figure.axes
    keys = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()]
    return [*(text.get_text() for text in axes.texts), *labels, *keys]


FIGURES = {
    "saw tooth": lambda: plots.saw_tooth(RUNGS, title="three rungs"),
    "six rungs": lambda: plots.saw_tooth({f"rung number {k}": [(0.1 * k, 1.0)] * 24 for k in range(6)}, title="six"),
    "one step": lambda: plots.saw_tooth({"serial": [(0.0, 0.0)]}, title="one step of no time"),
    "timeline": lambda: plots.timeline(_spans(), title="four steps"),
    "from the start": lambda: plots.timeline(_spans(), title="all", first=0, steps=10),
    "flame": lambda: plots.flame(STACKS, title="where the time goes"),
    "deep flame": lambda: plots.flame({tuple(f"m.f{k}" for k in range(40)): 1.0}, title="a long title " * 10),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_warned_about(name, tmp_path):
    """Law: all of it lies inside a figure 900 pixels wide; the same data gives the same bytes."""
    figure = FIGURES[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    assert 900 == pixels.shape[1]
    assert 255 == np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).min()
    tight = figure.get_tightbbox(canvas.get_renderer())
    wide, high = figure.get_size_inches()
    assert min(tight.x0, tight.y0) >= 0
    assert tight.x1 <= wide
    assert tight.y1 <= high
    paths = [plots.save(FIGURES[name](), tmp_path / f"{number}.png") for number in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_saw_tooth_stacks_wait_on_train():
    """Law: a bar a step, as high as the step is long, all rungs on one scale; the share is that of all steps."""
    (axes,) = (figure := plots.saw_tooth(RUNGS, title="three rungs")).axes
    bars = {gid: [bar for bar in axes.patches if bar.get_gid() == gid] for gid in ("train", "wait")}
    drawn = [step for steps in RUNGS.values() for step in steps[:24]]
    assert [train for _, train in drawn] == pytest.approx([bar.get_height() for bar in bars["train"]])
    assert [wait for wait, _ in drawn] == pytest.approx([bar.get_height() for bar in bars["wait"]])
    assert [bar.get_height() for bar in bars["train"]] == pytest.approx([bar.get_y() for bar in bars["wait"]])
    assert axes.get_ylim()[1] >= 2.9
    words = _words(figure)
    assert {"waits 83%", "waits 33%", "waits 0.5%", *RUNGS} <= set(words)
    assert "seconds a step" == axes.get_ylabel()


def test_a_rung_without_a_step_is_refused():
    """Law: an error that names the rungs."""
    with pytest.raises(ValueError, match="rungs \\['serial'\\]"):
        plots.saw_tooth({"serial": []}, title="none")
    with pytest.raises(ValueError, match="at least one"):
        plots.saw_tooth({}, title="none")


def test_the_timeline_draws_each_span_in_its_lane():
    """Law: as many bars as spans, as long as these, clipped to the steps shown; as many high as there are at a time."""
    (axes,) = (figure := plots.timeline(_spans(), title="four steps", first=2, steps=4)).axes
    lanes = {drawn.get_gid(): [path.get_extents() for path in drawn.get_paths()] for drawn in axes.collections}
    assert {"wait": 4, "train": 4, "fetch": 16, "decode": 16} == {lane: len(bars) for lane, bars in lanes.items()}
    assert [20.0] * 16 == pytest.approx([bar.width for bar in lanes["fetch"]])
    assert [0.0, 100.0, 200.0, 300.0] == pytest.approx([bar.x0 for bar in lanes["wait"]])
    assert (0.2, 0.8) == pytest.approx((lanes["fetch"][0].height, lanes["decode"][0].height))
    there = [lane for lane in LANES if lane in lanes]
    assert there == [label.get_text() for label in axes.get_yticklabels()]  # no lane for work that was not there
    for place, lane in enumerate(there):
        assert all(place - 0.41 < bar.y0 < bar.y1 < place + 0.41 for bar in lanes.get(lane, []))
    words = _words(figure)
    assert {"4 at a time", "30% of the time", "70% of the time", "step 2", "step 5", *there} <= set(words)
    assert len(set(LANE_COLOURS.values())) == len(LANES)
    assert "milliseconds from the end of step 1" == axes.get_xlabel()


@pytest.mark.parametrize(("first", "steps"), [(8, 4), (-1, 2), (0, 0)])
def test_steps_that_were_not_recorded_are_refused(first, steps):
    """Law: an error that says how many there are."""
    with pytest.raises(ValueError, match="of 10: choose steps"):
        plots.timeline(_spans(), title="none", first=first, steps=steps)


def test_steps_count_from_the_end_too():
    """Law: below 0 a step is counted as in a list."""
    figures = [plots.timeline(_spans(), title="the last three", first=first, steps=3) for first in (7, -3)]
    assert _words(figures[0]) == _words(figures[1])


def test_a_narrow_frame_is_named_beside_itself():
    """Law: where the name finds no room in the frame, it stands in the free room at its side."""
    for side, caller in (("left", "m.at_the_left"), ("right", "m.z_at_the_right")):
        stacks = {("run.main", "m.wide"): 97.0, ("run.main", caller, "m.narrow"): 3.0}
        (axes,) = plots.flame(stacks, title="where").axes
        (box,) = [box for box in axes.patches if isinstance(box, Rectangle) and box.get_gid() == "m.narrow"]
        (name,) = [text for text in axes.texts if text.get_text() == "narrow"]
        assert side == name.get_ha()
        left, right, at = box.get_x(), box.get_x() + box.get_width(), name.get_position()[0]
        assert at >= right if side == "left" else at <= left
        assert caller.removeprefix("m.") not in {text.get_text() for text in axes.texts}  # a wide one is in its way


def test_the_flame_is_as_wide_as_the_time():
    """Law: a frame is as wide as its share, lies below its caller, and has the colour of its part."""
    (axes,) = (figure := plots.flame(STACKS, title="where")).axes
    boxes = {box.get_gid(): box for box in axes.patches if isinstance(box, Rectangle)}
    assert {"run.main": 1.0, "run.train": 0.19, "mmdp.store.read": 0.5, "PIL.Image.Image.resize": 0.3} == {
        name: pytest.approx(boxes[name].get_width())
        for name in ("run.main", "run.train", "mmdp.store.read", "PIL.Image.Image.resize")
    }
    reading, above = boxes["mmdp.store.read"], boxes["mmdp.encode.Encoder.pixels"]
    assert above.get_y() + 1 == reading.get_y()
    assert above.get_x() <= reading.get_x()
    assert reading.get_x() + reading.get_width() <= above.get_x() + above.get_width() + 1e-9
    assert {"fetch: 50%", "decode: 30%", "other: 20%"} <= set(_words(figure))
    named = plots.flame(STACKS, title="where", parts={"run.train": "train"}, start="pixels")
    assert {"other: 100%"} <= set(_words(named))
    with pytest.raises(ValueError, match="none with time in nowhere"):
        plots.flame(STACKS, title="where", start="nowhere")


def _busy(seconds: float) -> None:
    time.sleep(seconds)


def test_stacks_add_up_to_the_time_that_passed():
    """Law: time lies with the function it was spent in, below the one that watches; the watcher ends with the block."""
    start = time.perf_counter()
    with sampled(0.002) as stacks:
        _busy(0.3)
    passed = time.perf_counter() - start
    assert passed * 1e6 == pytest.approx(sum(stacks.values()), rel=0.3)
    name = f"{__name__}.test_stacks_add_up_to_the_time_that_passed"
    assert {name} == {stack[0] for stack in stacks}
    assert sum(stacks.values()) * 0.5 < stacks[name, f"{__name__}._busy"]
    total = sum(stacks.values())
    time.sleep(0.01)
    assert total == sum(stacks.values())
    with pytest.raises(ValueError, match="interval of 0 s"), sampled(0):
        pass
