"""How wide a text comes out in the font of the figures, and what of it that font can draw.

Adds: `FONT`; `inches`, `wrap`, `cut`; `printable`, which puts a box for what the font lacks.
Leaves out: placing the text (`card`).
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from matplotlib.font_manager import FontProperties, findfont, get_font

FONT = FontProperties(family="DejaVu Sans")  # ships with matplotlib, so a figure is the same everywhere
BOX = "\u25a1"  # stands for a character that the font lacks


@cache
def _advance(character: str) -> float:
    """How far a character moves the pen, in inches at one point of size."""
    font = get_font(findfont(FONT))
    font.set_size(72, 72)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 72 / 72


def inches(text: str, size: float) -> float:
    """How wide a text comes out."""
    return sum(map(_advance, printable(text)[0])) * size


def wrap(text: str, width: float, size: float, max_lines: int) -> list[str]:
    """Lines at most `width` inches wide; a word that is wider is broken. Stops one line after `max_lines`."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, used = "", 0.0
        for word in re.split("( )", paragraph):
            wide = inches(word, size)
            if used + wide > width and line:
                lines.append(line)
                line, used = "", 0.0
                if word == " ":
                    continue
            if wide > width:
                for character in word:
                    step = inches(character, size)
                    if used + step > width:
                        lines.append(line)
                        line, used = "", 0.0
                        if len(lines) > max_lines:
                            return lines
                    line, used = line + character, used + step
            else:
                line, used = line + word, used + wide
        lines.append(line)
        if len(lines) > max_lines:
            return lines
    return lines


def cut(text: str, width: float, size: float) -> str:
    """The text, its end cut off where it is wider than `width` inches."""
    if inches(text, size) <= width:
        return text
    while text and inches(f"{text}...", size) > width:
        text = text[:-1]
    return f"{text}..."


@cache
def _known() -> frozenset[int]:
    """The characters the font can draw."""
    return frozenset(get_font(findfont(FONT)).get_charmap())


def printable(text: str) -> tuple[str, int]:
    """The text with a box for each character that the font lacks, and how many these are."""
    drawn, missing = [], 0
    for character in text:
        if ord(character) in _known():
            drawn.append(character)
        elif unicodedata.category(character) in ("Cc", "Cf", "Mn", "Zs"):
            drawn.append(" " if character.isspace() else "")
        else:
            drawn.append(BOX)
            missing += 1
    return "".join(drawn), missing
