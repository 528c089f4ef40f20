"""Figures: what is drawn equals what was given, nothing is cut off, nothing is warned about, same data same bytes."""

import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mmdp import plots
from mmdp.plots import DrawnRow, DrawnSegment, fill_curves, padding_strip, planned_rows
from mmdp.plots.lettering import inches, wrap
from mmdp.records import Batch, ImageBuffer, Sample, Turn

IMAGE, PAD = 3, 0


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _rows(num_rows: int, length: int, *, seed: int = 0, images: bool = True) -> list[DrawnRow]:
    """Rows of a few samples each, most with a run of image tokens."""
    random = np.random.default_rng(seed)
    rows, sample = [], 0
    for _ in range(num_rows):
        segments, used = [], 0
        while used < 0.7 * length:
            tokens = int(random.integers(length // 8, length // 4))
            span = ((2, 2 + tokens // 2),) if images and sample % 4 else ()
            segments.append(DrawnSegment(tokens, span, sample))
            used, sample = used + tokens, sample + 1
        rows.append(DrawnRow(tuple(segments), length))
    return rows


def _batch() -> Batch:
    """Two rows: two samples with images and one without; padding of 3 and 0."""
    input_ids = torch.tensor(
        [
            [5, 3, 3, 6, 7, 5, 3, 3, 6, 3, 3, 3, PAD, PAD, PAD],
            [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6],
        ]
    )
    segments = torch.tensor([[1] * 5 + [2] * 7 + [0] * 3, [1] * 15], dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    images = ImageBuffer(none.to(torch.uint8), torch.zeros(1, dtype=torch.int64), none, none, none, none)
    return Batch(input_ids, input_ids, input_ids, segments, images, ((40, 7), (12,)), label_tokens=0)


def _areas(figure: Figure) -> dict[str, float]:
    """Area of the bars of each kind, in tokens times rows."""
    areas: dict[str, float] = {}
    for drawn in figure.axes[0].collections:
        for path in drawn.get_paths():
            wide, high = np.ptp(path.vertices, axis=0)
            areas[drawn.get_gid()] = areas.get(drawn.get_gid(), 0) + wide * high
    return areas


def _pixels(figure: Figure, *, inside: bool = True) -> np.ndarray:
    """(H, W, 3), of the axes alone or of all the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    if not inside:
        return pixels
    box = figure.axes[0].get_window_extent()
    return pixels[round(pixels.shape[0] - box.y1) : round(pixels.shape[0] - box.y0), round(box.x0) : round(box.x1)]


def _count(pixels: np.ndarray, colour: str) -> int:
    return int((pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).sum())


def _words(figure: Figure) -> str:
    texts = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        texts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
    for legend in figure.legends:
        texts += [text.get_text() for text in legend.get_texts()]
    return "\n".join(texts)


def _sample(num_turns: int = 1, text: str = "Question: why?\nChoices:\nA. so\nB. not", id: str = "s-1") -> Sample:
    turns = [turn for _ in range(num_turns) for turn in (Turn("user", (text,)), Turn("assistant", ("Answer: A",)))]
    return Sample(id, (), tuple(turns), "train.jsonl:1")


def _image(height: int, width: int) -> np.ndarray:
    return np.full((3, height, width), 90, dtype=np.uint8)


FIGURES = {
    "rows": lambda: plots.row_map(_rows(8, 1024), title="packed", length=1024, dropped=[1500, 2000]),
    "many rows": lambda: plots.row_map(_rows(70, 16384), title="packed", length=16384, dropped=range(20000, 20012)),
    "short rows": lambda: plots.row_map(_rows(16, 100), title="a long title " * 12),
    "no rows": lambda: plots.row_map([], title="none", budget=5),
    "only padding": lambda: plots.row_map([DrawnRow((), 8)], title="a filler row"),
    "lengths": lambda: plots.sorted_lengths(np.arange(1, 400), title="399 samples by length"),
    "lengths and budget": lambda: plots.sorted_lengths([5, 90, 300, 2, 944], title="five samples", budget=100),
    "one length": lambda: plots.sorted_lengths([7], title="one sample"),
    "no length": lambda: plots.sorted_lengths([], title="none"),
    "histograms": lambda: plots.histograms(np.arange(50, 900), [1, 2, 3, 15] * 9, [(1500, 2000), (180, 95)] * 50),
    "empty histograms": lambda: plots.histograms([], [], [], title="nothing was read"),
    "one of each": lambda: plots.histograms([3], [1], [(20, 10)]),
    "filler rows": lambda: plots.row_map([*_rows(2, 1024), DrawnRow((), 1024, is_filler=True)], title="a last step"),
    "sight": lambda: plots.sight(np.arange(24) % 7, np.arange(24) // 7, title="a row of three samples"),
    "sight of one": lambda: plots.sight(np.arange(9), np.ones(9), title="a row of one sample"),
    "card": lambda: plots.sample_card(_sample(15), [_image(256, 256)], tokens=944),
    "card of seven images": lambda: plots.sample_card(
        _sample(2), [_image(40 + 90 * k, 600 - 80 * k) for k in range(7)]
    ),
    "card without images": lambda: plots.sample_card(_sample(), []),
    "card of other scripts": lambda: plots.sample_card(
        _sample(
            1,
            "\u4e2d\u6587 $\\nonsense{$ \u0645\u0631\u062d\u0628\u0627 \x00\t\U0001f600 " + "W" * 900,
            "$\\nonsense{$\u4e2d" * 30,
        ),
        [_image(9, 9)],
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_warned_about(name):
    """Law: every text and bar label lies inside a figure 900 pixels wide; matplotlib has nothing to warn about."""
    figure = FIGURES[name]()
    pixels = _pixels(figure, inside=False)
    assert 900 == pixels.shape[1]
    tight = figure.get_tightbbox(figure.canvas.get_renderer())
    wide, high = figure.get_size_inches()
    assert tight.x0 >= 0
    assert tight.y0 >= 0
    assert tight.x1 <= wide
    assert tight.y1 <= high
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert border.min() == 255


@pytest.mark.parametrize("name", ["rows", "lengths and budget", "histograms", "card"])
def test_same_data_gives_the_same_bytes(name, tmp_path):
    """Law: a figure made and saved again, in another thread too, has the same bytes; its folder is made."""
    first = plots.save(FIGURES[name](), tmp_path / "a" / "b" / "one.png")
    again = tmp_path / "two.png"
    thread = threading.Thread(target=lambda: plots.save(FIGURES[name](), again))
    thread.start()
    thread.join()
    assert tmp_path / "a" / "b" / "one.png" == first
    assert first.read_bytes() == again.read_bytes()
    assert b"\x89PNG" == first.read_bytes()[:4]
    assert b"tEXt" not in first.read_bytes()


def test_no_global_state_is_touched(tmp_path):
    """Law: neither pyplot, nor a screen, nor the backend a user asks for is needed; `import mmdp` leaves it all out."""
    code = (
        "import sys, mmdp; assert 'matplotlib' not in sys.modules; from mmdp import plots;"
        "plots.save(plots.sorted_lengths([1, 2], title='two'), __import__('pathlib').Path(sys.argv[1]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {**os.environ, "MPLBACKEND": "qtagg"}
    environment.pop("DISPLAY", None)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], check=True, timeout=60, env=environment)
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("name", [name for name in FIGURES if "card" not in name and "sight" not in name])
def test_every_axis_says_what_it_counts(name):
    """Law: no axis without a name and a unit, no figure without a title."""
    figure = FIGURES[name]()
    for axes in figure.axes:
        assert axes.get_title()
        assert any(unit in axes.get_xlabel() for unit in ("tokens", "answers", "pixels"))
        assert any(unit in axes.get_ylabel() for unit in ("row", "samples", "pixels"))


# The row map.


def test_drawn_rows_say_what_the_batch_holds():
    """Law: segments, image spans, samples and padding of the drawing are those of the batch."""
    batch = _batch()
    rows = plots.drawn_rows(batch, IMAGE)
    assert [(5, ((1, 3),), 40), (7, ((1, 3), (4, 7)), 7)] == [
        (s.tokens, s.image_spans, s.sample) for s in rows[0].segments
    ]
    assert [(15, (), 12)] == [(s.tokens, s.image_spans, s.sample) for s in rows[1].segments]
    assert batch.num_tokens == sum(row.num_tokens for row in rows)
    assert batch.padded_tokens == sum(row.length - row.num_tokens for row in rows)
    assert int((batch.input_ids == IMAGE).sum()) == sum(
        b - a for row in rows for s in row.segments for a, b in s.image_spans
    )


def test_areas_are_the_tokens():
    """Law: the area of grey, colour and hatch is that of padding, samples and image tokens; the share is written."""
    batch = _batch()
    figure = plots.row_map(plots.drawn_rows(batch, IMAGE), title="two rows")
    areas = _areas(figure)
    thick = areas["sample"] / batch.num_tokens
    assert pytest.approx(batch.padded_tokens * thick) == areas["padding"]
    assert pytest.approx(int((batch.input_ids == IMAGE).sum()) * thick) == areas["image"]
    assert "padding: 10.0% of 30 tokens" in _words(figure)
    hatched = [drawn for drawn in figure.axes[0].collections if drawn.get_hatch()]
    assert {"image"} == {drawn.get_gid() for drawn in hatched}


@pytest.mark.parametrize("num_rows", [8, 64])
def test_grey_pixels_are_the_padding_share(num_rows):
    """Law: counted in the picture, grey over all bars equals padding over all tokens."""
    rows = _rows(num_rows, 1024, images=False)
    pixels = _pixels(plots.row_map(rows, title="packed", budget=2000))
    grey = _count(pixels, plots.PADDING)
    colours = sum(_count(pixels, colour) for colour in plots.SAMPLE_COLOURS)
    share = 1 - sum(row.num_tokens for row in rows) / sum(row.length for row in rows)
    assert 0.05 < share < 0.4
    assert pytest.approx(share, abs=0.01) == grey / (grey + colours)


@pytest.mark.parametrize("left", [False, True])
def test_padding_stands_where_it_is(left):
    """Law: grey is at the right end, or at the left one where the batch is padded there."""
    rows = [DrawnRow((DrawnSegment(30, ((0, 10),), 0),), 100)]
    figure = plots.row_map(rows, title="one row", padding_left=left)
    spans = {d.get_gid(): d.get_paths()[0].get_extents().intervalx.tolist() for d in figure.axes[0].collections}
    assert spans["padding"] == ([0, 70] if left else [30, 100])
    assert spans["sample"] == ([70, 100] if left else [0, 30])
    assert spans["image"] == ([70, 80] if left else [0, 10])


def test_neighbours_differ_in_colour():
    """Law: two samples side by side never share a colour."""
    rows = _rows(6, 1024, images=False)
    figure = plots.row_map(rows, title="packed")
    bars = sorted(
        (round(extent.y0), extent.x0, tuple(drawn.get_facecolor()[0]))
        for drawn in figure.axes[0].collections
        if drawn.get_gid() == "sample"
        for extent in (path.get_extents() for path in drawn.get_paths())
    )
    assert sum(len(row.segments) for row in rows) == len(bars)
    for (row, _, colour), (below, _, other) in pairwise(bars):
        assert row != below or colour != other


def test_dropped_samples_are_ghosts_past_the_line():
    """Law: one outline without a filling for each dropped sample, past the line, with its length in words."""
    dropped = [333, 700, 5000]
    figure = plots.row_map(_rows(8, 320), title="padded to 320", length=320, dropped=dropped)
    axes = figure.axes[0]
    ghosts = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_gid() == "ghost"]
    assert dropped == [round(ghost.get_width()) for ghost in ghosts]
    assert not any(ghost.get_fill() for ghost in ghosts)
    assert {"--"} == {ghost.get_linestyle() for ghost in ghosts}
    assert all(ghost.get_y() > 7.5 - 0.5 for ghost in ghosts)  # below the rows
    (line,) = [line for line in axes.lines if line.get_gid() == "budget"]
    assert 320 == line.get_xdata()[0]
    assert axes.get_xlim()[1] > 333
    words = _words(figure)
    for text in ("333 tokens", "5,000 tokens", "dropped: 3", "budget: 320 tokens"):
        assert text in words


def test_more_rows_than_fit_are_counted_not_drawn():
    """Law: the share is that of all rows, and the figure says how many it shows; the same for ghosts."""
    rows = [DrawnRow((DrawnSegment(10, (), k),), 10) for k in range(64)] + [DrawnRow((), 10)] * 64
    figure = plots.row_map(rows, title="many", dropped=range(20, 40))
    words = _words(figure)
    assert "first 64 of 128 rows" in words
    assert "padding: 50.0% of 1,280 tokens" in words
    assert "dropped: 20 (8 shown)" in words
    assert "padding" not in _areas(figure)


def test_filler_rows_are_drawn_paler_and_not_counted():
    """Law: a row that only completes a step is no padding, in the picture and in the share; one that lost all is."""
    batch = _batch()
    empty = torch.zeros((2, batch.input_ids.shape[1]), dtype=torch.int32)
    tensors = {name: torch.cat([getattr(batch, name), empty]) for name in ("input_ids", "labels", "position_ids")}
    more = {"segments": torch.cat([batch.segments, empty]), "samples": (*batch.samples, (), ())}
    lost = replace(batch, **tensors, **more, filler_rows=1)
    rows = plots.drawn_rows(lost, IMAGE)
    assert [False, False, False, True] == [row.is_filler for row in rows]
    figure = plots.row_map(rows, title="four rows")
    areas = _areas(figure)
    thick = areas["sample"] / lost.num_tokens
    assert pytest.approx(lost.padded_tokens * thick) == areas["padding"]
    assert pytest.approx(15 * thick) == areas["filler"]
    words = _words(figure)
    assert f"padding: {lost.padded_tokens / 45:.1%} of 45 tokens" in words
    assert "filler: 1 of 4 rows, not counted" in words
    assert 1 == words.count("filler: completes the step")


def test_ghosts_go_from_the_shortest_to_the_longest():
    """Law: of many dropped samples the longest is among those drawn, and its end is seen up to three rows' length."""
    figure = plots.row_map(_rows(8, 320), title="padded", length=320, dropped=range(330, 931, 20))
    ghosts = [patch.get_width() for patch in figure.axes[0].patches if patch.get_gid() == "ghost"]
    assert (8, 330, 930) == (len(ghosts), ghosts[0], ghosts[-1])
    assert figure.axes[0].get_xlim()[1] > 930
    assert "beyond the picture" not in _words(figure)
    assert "5,000 tokens, ends beyond the picture" in _words(plots.row_map(_rows(1, 320), title="x", dropped=[5000]))


def test_the_legend_names_what_is_there():
    """Law: no image tokens, no word about them."""
    for images in (False, True):
        assert images == ("image tokens" in _words(plots.row_map(_rows(6, 1024, images=images), title="packed")))


# The other figures.


def test_sorted_lengths_shows_the_waste_of_one_rectangle():
    """Law: grey is what padding all samples to the longest adds; with a budget, to the budget, of what is kept."""
    figure = plots.sorted_lengths([100, 25, 75], title="three")
    areas = _pixels(figure)
    grey, blue = _count(areas, plots.PADDING), _count(areas, plots.SAMPLE_COLOURS[0])
    assert pytest.approx(1 / 3, abs=0.02) == grey / (grey + blue)
    assert "33.3%" in _words(figure)
    assert "median: 75" in _words(figure)
    assert "longest: 100" in _words(figure)
    figure = plots.sorted_lengths([100, 25, 75], title="three", budget=80)
    assert "padding to 80 each: 37.5%" in _words(figure)
    assert "dropped: 1" in _words(figure)
    (ghost,) = [drawn for drawn in figure.axes[0].collections if drawn.get_gid() == "ghost"]
    assert 100 == ghost.get_paths()[0].get_extents().x1


def test_histograms_count_each_sample_once():
    """Law: the bars add up to the samples; medians and means are written."""
    tokens, turns = [10, 20, 20, 400], [1, 1, 2, 15]
    figure = plots.histograms(tokens, turns, [(300, 200), (100, 400), (500, 600)])
    left, middle, right = figure.axes
    assert len(tokens) == sum(patch.get_height() for patch in left.patches)
    assert len(turns) == sum(patch.get_height() for patch in middle.patches)
    assert [[300, 200], [100, 400], [500, 600]] == right.collections[0].get_offsets().tolist()
    for text in ("tokens: median 20, longest 400", "answers: mean 4.75, most 15", "3 images, median 300 x 400"):
        assert text in _words(figure)


def test_card_shows_each_image_and_turn():
    """Law: images in order with their size; the words of each turn; answers in a colour of their own."""
    figure = plots.sample_card(_sample(2), [_image(30, 20), _image(10, 40)], tokens=321)
    words = _words(figure)
    assert ["image", "image"] == [axes.get_gid() for axes in figure.axes]
    for text in ("image 1: 20 x 30 pixels", "image 2: 40 x 10 pixels", "user: Question: why?", "B. not", "321 tokens"):
        assert text in words
    assert 2 == words.count("assistant: Answer: A")
    assert "more turns" not in words


def test_card_says_what_was_resized():
    """Law: where an image had another size before, both are written."""
    words = _words(plots.sample_card(_sample(), [_image(256, 256), _image(9, 8)], sizes=[(334, 402), (8, 9)]))
    assert "334 x 402,\nresized to 256 x 256 pixels" in words
    assert "image 2: 8 x 9 pixels" in words
    alone = _words(plots.sample_card(_sample(), [_image(256, 256)], sizes=[(334, 402)]))
    assert "image 1: 334 x 402, resized to 256 x 256 pixels" in alone


@pytest.mark.parametrize("num_images", range(8))
def test_card_takes_any_number_of_images(num_images):
    """Law: six images at most are drawn, and what is missing is said."""
    figure = plots.sample_card(_sample(), [_image(64, 64)] * num_images)
    assert min(6, num_images) == len(figure.axes)
    assert ("1 more" in _words(figure)) == (num_images == 7)


def test_card_says_what_it_leaves_out():
    """Law: shown and left-out turns add up; so do those after a turn that is cut itself."""
    figure = plots.sample_card(_sample(15), [_image(8, 8)])
    words = _words(figure)
    (said,) = [line for line in words.split("\n") if line.endswith("more turns")]
    shown = words.count("user: ") + words.count("assistant: ")
    assert 30 == shown + int(said.split()[1])
    figure = plots.sample_card(_sample(1, "word " * 3000), [])
    assert "... the rest of this turn, and 1 more" in _words(figure)


def test_card_shows_foreign_text_as_far_as_the_font_goes():
    """Law: what the font lacks becomes a box and is counted; nothing is read as mathematics."""
    figure = plots.sample_card(_sample(1, "\u4e2d\u6587 and \u017c\u00f3\u0142w $x^2$"), [])
    words = _words(figure)
    assert "\u25a1\u25a1 and \u017c\u00f3\u0142w $x^2$" in words
    assert "2 characters" in words


def test_card_wraps_by_width():
    """Law: no line is wider than its column, and no word is lost."""
    text = "W" * 200 + " " + "i" * 300 + " a few words more " * 20
    lines = wrap(text, 5.0, 9.5, 44)
    assert all(inches(line, 9.5) <= 5.0 for line in lines)
    assert text.replace(" ", "") == "".join(lines).replace(" ", "")
    assert len(lines) > 5


def test_planned_rows_are_drawn_as_packed():
    """Each sample index becomes a segment of its length, in the order of the row."""
    rows = planned_rows([np.array([2, 0]), [1]], np.array([5, 7, 9]), 16)
    assert [(14, [(2, 9), (0, 5)]), (7, [(1, 7)])] == [
        (row.num_tokens, [(segment.sample, segment.tokens) for segment in row.segments]) for row in rows
    ]


def test_fill_curves_fall_from_full_to_empty():
    """One line a packer, its rows fullest first and named with their number; the bound is a line."""
    figure = fill_curves({"greedy": [0.5, 1.0, 0.75], "knapsack": [1.0, 1.0]}, title="t", bound=2)
    (axes,) = figure.axes
    greedy, _, bound = axes.get_lines()
    assert [1.0, 0.75, 0.5, 0.0] == list(greedy.get_ydata())
    assert [2, 2] == list(bound.get_xdata())
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ["greedy: 3 rows", "knapsack: 2 rows", "lower bound: 2 rows"] == texts


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])
SEGMENTS = np.array([1] * 5 + [2] * 3 + [0] * 2)


def _seen(figure: Figure, panel: int) -> np.ndarray:
    """(L, L): 1 where a triangle of a sample or of padding says that a token is seen, 2 where only a leak does."""
    seen = np.zeros((len(SEGMENTS), len(SEGMENTS)), dtype=int)
    for triangle in figure.axes[panel].patches:
        (left, top), (_, bottom) = triangle.get_xy()[:2]
        for token in range(round(top), round(bottom)):
            seen[token, round(left) : token + 1] = 2 if triangle.get_gid() == "leak" else 1
    return seen


@pytest.mark.parametrize(("panel", "mistake"), [(2, None), (3, "mask"), (3, "cache")])
def test_sight_is_the_mask_that_the_library_makes(panel, mistake):
    """Law: left what transformers makes of positions, without mask and cache; right what it makes with one of them."""
    from transformers import DynamicCache, LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(num_hidden_layers=1, attn_implementation="eager")
    mask = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, len(SEGMENTS), 4),
        attention_mask=torch.ones_like(POSITIONS) if mistake == "mask" else None,
        cache=DynamicCache(config=config) if mistake == "cache" else None,
        position_ids=POSITIONS,
    )
    figure = plots.sight(POSITIONS[0].numpy(), SEGMENTS, title="a row")
    seen = _seen(figure, panel)
    assert ((mask[0, 0] == 0).numpy() == (seen > 0)).all()
    assert (mistake is not None) == (2 in seen)
    assert {"token that is seen"} == {axes.get_xlabel() for axes in figure.axes[2:]}
    assert f"{(_seen(figure, 3) == 2).sum() / 55:.0%} of what is seen belongs to others" in _words(figure)


def test_sight_of_nothing_is_refused():
    """Law: an error with the two numbers."""
    with pytest.raises(ValueError, match="2 positions and 3 segments"):
        plots.sight(np.arange(2), np.ones(3), title="x")


def test_a_strip_is_as_long_as_its_tokens():
    """Real tokens, padding and dropped ones stand behind one another, all stages on one scale."""
    epochs = {"02 naive": (500, 500, 0), "03 fixed": (300, 280, 200), "05 packed": (500, 7, 0)}
    axes = padding_strip(epochs, title="three stages").axes[0]
    bars = [(bar.get_y(), bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)]
    drawn = [(x, width) for _, x, width in sorted(bars)]
    wanted = [(0, 500), (500, 500), (0, 300), (300, 280), (580, 200), (0, 500), (500, 7)]
    assert wanted == drawn
    assert list(epochs) == [label.get_text() for label in axes.get_yticklabels()]
    texts = [text.get_text() for text in axes.texts]
    assert ["padding 50.0%", "padding 48.3%, 40% of all tokens dropped", "padding 1.4%"] == [t.strip() for t in texts]
    assert axes.get_xlim()[1] > 1000
