"""The pictures of the demo set: food webs, cycles, bar charts and labelled parts, drawn from facts.

Adds: `draw(facts)` -> the picture and where each thing stands in it.
Leaves out: making up facts (`facts`), and asking about them (`*_questions`).

A drawing is a pure function of its facts: the same facts give the same pixels.
"""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from mmdp.demo.canvas import Canvas
from mmdp.demo.chart_drawing import draw_chart
from mmdp.demo.cycle_drawing import draw_cycle
from mmdp.demo.layout import Box
from mmdp.demo.parts_drawing import draw_parts
from mmdp.demo.records import Facts
from mmdp.demo.web_drawing import draw_web


def draw(facts: Facts) -> tuple[Image.Image, dict[str, list[int]]]:
    """Draws what the facts say.

    Args:
        facts: `family`, `width`, `height`, `title` and what the family needs; made by `facts`.

    Returns:
        The picture (mode P), and the box [left, top, right, bottom], in pixels, of each living thing, stage, bar or
        letter.
    """
    # Bars have no slanted edge to smooth.
    canvas = Canvas(facts["width"], facts["height"], smooth=1 if facts["family"] == "bar_chart" else 2)
    painters: dict[str, Callable[[Canvas, Facts, Box], None]] = {
        "food_web": draw_web,
        "cycle": draw_cycle,
        "bar_chart": draw_chart,
        "labelled_parts": draw_parts,
    }
    painters[facts["family"]](canvas, facts, canvas.title(facts["title"]))
    return canvas.finish(), canvas.places
