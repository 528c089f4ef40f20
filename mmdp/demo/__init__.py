"""The demo data set, made by seed on first use, and a tokenizer trained on its text.

Adds: `demo_jsonl` (a JSONL file with images beside it), `demo_tokenizer` (a folder that transformers loads offline) and
`make_row` (one row, before its pictures are drawn). Leaves out: reading the file (`mmdp.sources`).

The shape follows AI2D as the_cauldron holds it: one picture, a few multiple-choice turns (1 + geometric), answers of
one letter. What a picture shows is made up first, as facts; picture and answers both come from the facts, so every
answer can be checked against them. Each row has a random stream of its own: row 7 is the same in a set of 10 or of 500.

In reading order, each importing only from those above it:

    words                           what can be named
    records                         `Facts`, `Question`
    colours, lettering, layout      what a picture is made of
    canvas, shapes                  a picture being drawn; the objects that have parts
    *_drawing, drawings             a family of pictures: how much one can hold, and its drawing
    facts                           what a picture shows, made up so that it fits
    questions, *_questions          all that can be asked about the facts
    rows, files, tokenizer          one row; the set on disk; the tokenizer, trained on the rows
"""

from __future__ import annotations

from mmdp.demo.files import demo_jsonl
from mmdp.demo.rows import VERSION, make_row
from mmdp.demo.tokenizer import demo_tokenizer

__all__ = ["VERSION", "demo_jsonl", "demo_tokenizer", "make_row"]
