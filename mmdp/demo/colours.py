"""The colours of the demo drawings, and the palette that all pictures share.

Adds: `COLOURS`, `SERIES`, `INK`, `TRACK`; `tint`; `palette`, a Pillow image that holds every colour a drawing uses.
Leaves out: where they go (`*_drawing`).
"""

from __future__ import annotations

from functools import cache

from PIL import Image

COLOURS = {  # Okabe and Ito, "Color Universal Design" (2008), and three neutrals
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "green": "#009e73",
    "yellow": "#f0e442",
    "blue": "#0072b2",
    "red": "#d55e00",
    "pink": "#cc79a7",
    "brown": "#8c6239",
    "grey": "#9a9a9a",
    "white": "#ffffff",
}
SERIES = ("blue", "orange", "green", "pink", "sky", "red")
INK = "#222222"
TRACK = "#c9ced6"


def tint(colour: str, strength: float) -> tuple[int, int, int]:
    """A colour mixed with white: strength 1 is the colour itself."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return (
        round(255 - (255 - red) * strength),
        round(255 - (255 - green) * strength),
        round(255 - (255 - blue) * strength),
    )


@cache
def palette() -> Image.Image:
    """The colours of all drawings: each one, its tints, its shades, and greys."""
    colours = [[step * 255 // 31] * 3 for step in range(32)]
    for colour in COLOURS.values():
        colours += [list(tint(colour, strength)) for strength in (1, 0.8, 0.6, 0.4, 0.2, 0.1)]
        colours += [[round(v * share) for v in tint(colour, 1)] for share in (0.75, 0.5, 0.25)]
    image = Image.new("P", (1, 1))
    image.putpalette([value for colour in colours for value in colour])
    return image
