"""Laws of `rows.py` and `row_fields.py`: three forms, one `Sample`, and one `DataError` for everything else."""

import base64
import io
import json
import math
import random
import re

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from mmdp.records import ImageRef, Sample
from mmdp.refusals import DataError, Reason
from mmdp.rows import parse_row

ROOT = "folder"


def parse(row, number=7):
    return parse_row(row, root=ROOT, source="train.jsonl:8", number=number)


def turns(row):
    return [(turn.role, turn.parts) for turn in parse(row).turns]


def names(row):
    return [image.name for image in parse(row).images]


def refusal(row):
    with pytest.raises(DataError) as caught:
        parse(row)
    error = caught.value
    assert error.source == "train.jsonl:8"
    assert error.message.isascii()
    assert "\n" not in error.message
    assert len(error.message) < 400
    return error


def texts(images, *pairs, **more):
    return {"images": images, "texts": [{"user": user, "assistant": answer} for user, answer in pairs], **more}


def talk(*values, **more):
    return {"conversations": [{"from": role, "value": value} for role, value in values], **more}


def chat(*contents, **more):
    return {"messages": [{"role": role, "content": content} for role, content in contents], **more}


TEXT = {"type": "text", "text": "Why?"}
PLACE = {"type": "image"}
ANSWER = ("assistant", "So.")


# The forms


def test_three_forms_give_the_same_sample():
    """One conversation, written in each form, is one and the same `Sample`."""
    wanted = Sample(
        id="a1",
        images=(ImageRef("a.png", ROOT), ImageRef("b.png", ROOT)),
        turns=parse(texts(["a.png", "b.png"], ("Why?", "So."), ("And?", "No."))).turns,
        source="train.jsonl:8",
    )
    assert [("user", (0, 1, "Why?")), ("assistant", ("So.",)), ("user", ("And?",)), ("assistant", ("No.",))] == [
        (turn.role, turn.parts) for turn in wanted.turns
    ]
    pair, more = {"images": ["a.png", "b.png"], "id": "a1"}, [("user", "And?"), ("assistant", "No.")]
    for row in (
        texts(["a.png", "b.png"], ("Why?", "So."), ("And?", "No."), id="a1"),
        talk(("human", "<image>\n<image>\nWhy?"), ("gpt", "So."), *more, **pair),
        talk(("human", "Why?"), ("gpt", "So."), *more, **pair),
        chat(("user", "<image><image>Why?"), ANSWER, *more, **pair),
        chat(("user", "Why?"), ANSWER, *more, **pair),
        chat(("user", [PLACE, PLACE, TEXT]), ("assistant", [{"type": "text", "text": "So."}]), *more, **pair),
        chat(
            ("user", [{"type": "image", "image": "a.png"}, {"type": "image", "path": "b.png"}, TEXT]),
            ANSWER,
            *more,
            id="a1",
        ),
    ):
        assert wanted == parse(row)


@pytest.mark.parametrize(
    "forms", [(), ("texts", "messages"), ("conversations", "messages"), ("texts", "conversations")]
)
def test_a_row_has_one_form(forms):
    """No form and two forms are WRONG_FORM, and the message names them."""
    every = texts([], ("Why?", "So.")) | talk(("user", "Why?"), ANSWER) | chat(("user", "Why?"), ANSWER)
    row = {"images": None, **{form: every[form] for form in forms}}
    error = refusal(row)
    assert error.reason == Reason.WRONG_FORM
    assert all(form in error.message for form in forms or ("texts", "conversations", "messages"))
    assert all(turns({form: every[form]}) for form in forms)


def test_null_is_absent():
    """A key that is null counts as absent, as where rows of two forms share a table."""
    row = texts(None, ("Why?", "So."), image=None, conversations=None, messages=None, id=None)
    assert [("user", ("Why?",)), ("assistant", ("So.",))] == turns(row)


@pytest.mark.parametrize("row", [None, 3, "text", b"bytes", [], [texts([], ("Why?", "So."))], float("nan"), True])
def test_a_row_is_an_object(row):
    """Anything else is INVALID_JSON."""
    assert refusal(row).reason == Reason.INVALID_JSON


def test_unused_keys_are_ignored():
    """Extra keys of any type, in the row and in its turns, change nothing."""
    row = texts(["a.png"], ("Why?", "So."))
    more = json.loads(json.dumps(row))
    more |= {"source": {"a": [1]}, "texts2": 3, "caption": "\ud800"}
    more["texts"][0] |= {"source": "book", "score": None}
    assert parse(row) == parse(more)


@pytest.mark.parametrize(("id", "wanted"), [("x", "x"), (5, "5"), (1.5, "1.5"), (True, "True"), (0, "0")])
def test_an_id_becomes_text(id, wanted):
    """A text or a number is the row's id, as text."""
    assert wanted == parse(texts([], ("Why?", "So."), id=id)).id


@pytest.mark.parametrize("id", [None, "", [], {"$oid": "1"}])
def test_a_row_without_an_id_is_called_by_its_number(id):
    """The number stands in, and an error claims no id."""
    assert parse(texts([], ("Why?", "So."), id=id)).id == "7"
    assert refusal(texts([], ("Why?", ""), id=id)).id == ""
    assert refusal(texts([], ("Why?", ""), id="mine")).id == "mine"


# Images


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("a.png", ["a.png"]),
        (["a.png"], ["a.png"]),
        (["a.png", "a.png"], ["a.png", "a.png"]),
        ({"path": "a.png"}, ["a.png"]),
        ([{"path": "a.png", "bytes": None}, "b.png"], ["a.png", "b.png"]),
        (None, []),
        ([], []),
    ],
)
@pytest.mark.parametrize("key", ["images", "image"])
@pytest.mark.parametrize(
    "form", [texts([], ("Why?", "So.")), talk(("user", "Why?"), ANSWER), chat(("user", "Why?"), ANSWER)]
)
def test_forms_of_the_images_field(value, wanted, key, form):
    """One or a list, a name or an object, under either key, in every form; null and nothing are text alone."""
    row = {form_key: turns for form_key, turns in form.items() if form_key != "images"} | {key: value}
    assert wanted == names(row)
    assert tuple(range(len(wanted))) == tuple(part for part in parse(row).turns[0].parts if part != "Why?")


def test_bytes_stay_with_the_row():
    """An object with bytes is a reference with data; its path is a label."""
    row = texts([{"bytes": b"123", "path": None}, {"bytes": b"", "path": "x.png"}], ("Why?", "So."))
    assert (ImageRef("", ROOT, b"123"), ImageRef("x.png", ROOT, b"")) == parse(row).images


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ([""], "images[0]"),
        ("", "images"),
        (["a.png", None], "images[1]"),
        ([7], "images[0]"),
        (7, "images"),
        (True, "images"),
        ([["a.png"]], "images[0]"),
        ([{}], "images[0].path"),
        ([{"url": "a.png"}], "images[0].path"),
        ([{"path": 3}], "images[0].path"),
        ([{"path": ""}], "images[0].path"),
        ([{"bytes": None, "path": None}], "images[0].path"),
        ([{"bytes": "aGk=", "path": "a.png"}], "images[0].bytes"),
        ([{"bytes": b"1", "path": 3}], "images[0].path"),
    ],
)
def test_what_is_no_image_is_refused_by_field(images, field):
    """WRONG_FORM, with the field that is wrong."""
    error = refusal(texts(images, ("Why?", "So.")))
    assert (Reason.WRONG_FORM, field) == (error.reason, error.field)


def test_images_under_two_keys_are_refused():
    """`image` and `images` both: which is meant is not guessed."""
    assert refusal(texts(["a.png"], ("Why?", "So."), image="b.png")).reason == Reason.WRONG_FORM


# Places


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("<image>\nWhy?", (0, "Why?")),
        ("<image>Why?", (0, "Why?")),
        ("<image>\n\nWhy?", (0, "\nWhy?")),
        ("<image> Why?", (0, " Why?")),
        ("Why?\n<image>", ("Why?", 0)),
        ("Why?\n\n<image>", ("Why?\n", 0)),
        ("Why?<image>", ("Why?", 0)),
        ("a\n<image>\nb", ("a\n", 0, "b")),
        ("a <image> b", ("a ", 0, " b")),
        ("<image>", (0,)),
        ("<image>\n", (0,)),
        ("\n<image>", (0,)),
        ("<image>\n<image>\nWhy?", (0, 1, "Why?")),
        ("Why?\n<image>\n<image>", ("Why?", 0, 1)),
        ("Why?\n<image><image>\n", ("Why?", 0, 1)),
        ("a<image>b<image>c", ("a", 0, "b", 1, "c")),
        ("Why?\n<image>\n", ("Why?", 0)),
        ("<image>\r\nWhy?", (0, "\r\nWhy?")),
        ("<<image>>", ("<", 0, ">")),
        ("<Image>< image><image", ("<Image>< image><image",)),
    ],
)
@pytest.mark.parametrize("form", [talk, chat])
def test_a_mark_takes_the_newline_that_joins_it(value, parts, form):
    """One newline after a mark, and one before marks that end the value, is theirs; all else stays in place."""
    num_places = sum(isinstance(part, int) for part in parts)
    row = form(("user", value), ANSWER, images=["a.png"] * max(1, num_places))
    wanted = parts if num_places else (0, *parts)
    assert wanted == parse(row).turns[0].parts


def test_no_character_but_marks_and_their_newlines_is_lost():
    """Over random values: marks are gone, one newline after each, one before those that end the value, nothing else."""
    roll = random.Random(0)
    num_marks = 0
    for _ in range(2000):
        value = "".join(roll.choice(["<image>", "\n", "a", " ", "<"]) for _ in range(roll.randrange(12)))
        marks = value.count("<image>")
        num_marks += marks
        sample = parse(talk(("user", value), ("gpt", "So."), images=["a.png"] * marks))
        text = value.replace("<image>", "")
        assert text.replace("\n", "") == sample.turns[0].text.replace("\n", "")
        assert 0 <= text.count("\n") - sample.turns[0].text.count("\n") <= (marks and marks + 1)
        assert marks == sum(isinstance(part, int) for part in sample.turns[0].parts)
        assert "" not in sample.turns[0].parts
    assert num_marks > 1000


def test_places_are_numbered_through_all_turns():
    """Every image is in the turns once, in rising order, wherever the marks stand."""
    row = talk(
        ("system", "<image>"),
        ("human", "a<image>"),
        ("gpt", "b<image>"),
        ("human", "c"),
        ("gpt", "d\n<image>"),
        images=["1", "2", "3", "4"],
    )
    assert [(0,), ("a", 1), ("b", 2), ("c",), ("d", 3)] == [turn.parts for turn in parse(row).turns]


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        (talk(("human", "<image>Why?"), ("gpt", "So."), image=[]), "0 images and 1 place "),
        (talk(("human", "<image><image>Why?"), ("gpt", "So."), image="a.png"), "1 image and 2 places"),
        (talk(("human", "<image>Why?"), ("gpt", "So."), image=["a.png", "b.png"]), "2 images and 1 place "),
        (chat(("user", [PLACE, TEXT]), ANSWER, images=[]), "0 images and 1 place "),
        (chat(("user", [PLACE, TEXT]), ANSWER, images=["a.png", "b.png"]), "2 images and 1 place "),
        (chat(("user", "<image><image>"), ANSWER, images=["a.png"]), "1 image and 2 places"),
        (chat(("user", [PLACE, {"type": "image", "image": "a.png"}]), ANSWER), "1 image and 2 places"),
        (chat(("assistant", "So."), images=["a.png"]), "1 image, 0 places"),
    ],
)
def test_images_and_places_must_agree(row, counts):
    """IMAGE_PLACES, and the message has both counts."""
    error = refusal(row)
    assert error.reason == Reason.IMAGE_PLACES
    assert counts in error.message


def test_images_under_another_name_are_told_apart_from_none():
    """Marks, and neither images nor image: the message names the keys that are there."""
    row = talk(("human", "<image>Why?"), ("gpt", "So.")) | {"picture": "a.png"}
    message = refusal(row).message
    assert "1 place for images, and the row has neither images nor image" in message
    assert "conversations, picture" in message


def test_bytes_are_an_image_as_they_are():
    """A column of bytes in a table, alone or in a list, is as good as objects that hold them."""
    wanted = parse(texts([{"bytes": b"GIF", "path": None}], ("Why?", "So."))).images
    assert b"GIF" == wanted[0].data
    assert wanted == parse(texts([b"GIF"], ("Why?", "So."))).images
    assert wanted == parse(texts(None, ("Why?", "So."), image=b"GIF")).images


# Pictures that were decoded on the way


def _table(feature, value):
    """A data set of `datasets` of one row, its picture in a column of this type."""
    turns = [[{"user": "Why?", "assistant": "So."}]]
    key = "image" if isinstance(feature, datasets.Image) else "images"
    return key, datasets.Dataset.from_dict({key: [value], "texts": turns}).cast_column(key, feature)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_decoded_column_says_how_to_keep_the_files(is_list, is_streamed):
    """`datasets` gives pictures of Pillow; the column type that the message names gives the very file again."""
    file = _png()
    one = {"bytes": file, "path": None}
    key, rows = _table(*((datasets.List(datasets.Image()), [one]) if is_list else (datasets.Image(), one)))
    rows = rows.to_iterable_dataset() if is_streamed else rows
    row = next(iter(rows))
    assert isinstance(row[key][0] if is_list else row[key], Image.Image)
    error = refusal(row)
    assert (Reason.WRONG_FORM, f"{key}[0]" if is_list else key) == (error.reason, error.field)
    assert "found pixels (a PngImageFile)" in error.message
    (column, feature) = re.search(r'`dataset\.cast_column\("(\w+)", (.+)\)`', error.message).groups()
    again = next(iter(rows.cast_column(column, eval(feature, {"datasets": datasets}))))
    assert [file] == [image.data for image in parse(again).images]


def test_a_decoded_picture_of_a_message_says_how_to_keep_the_files():
    """Deep in a row no column can be named, so the whole stream is told not to decode."""
    content = [{"type": "image", "image": Image.new("RGB", (4, 4))}]
    message = refusal(chat(("user", content), ("assistant", "So."))).message
    assert "dataset.decode(False)" in message
    assert "dataset.to_parquet" in message


@pytest.mark.parametrize("pixels", [np.zeros((9, 9, 3), np.uint8), torch.zeros(3, 9, 9)])
def test_arrays_are_pixels_too(pixels):
    """As `with_format("numpy")` and `with_format("torch")` give them; a number of NumPy is just no name."""
    assert "found pixels (a " in refusal(texts([pixels], ("Why?", "So."))).message
    assert "wanted the name of an image file" in refusal(texts([np.float32(3)], ("Why?", "So."))).message


def _png():
    file = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(file, "PNG")
    return file.getvalue()


def test_images_without_places_stand_before_the_first_user_turn():
    """Also where another turn comes first."""
    row = chat(("system", "Be brief."), ("user", ""), ANSWER, images=["a.png", "b.png"])
    assert [("system", ("Be brief.",)), ("user", (0, 1)), ("assistant", ("So.",))] == turns(row)


@pytest.mark.parametrize(
    "row",
    [
        texts(["a.png"], ("the <image> mark", "<image>")),
        texts([], ("the <image> mark", "<image>")),
        chat(("user", "the <image> mark"), ("assistant", "<image>")),
        chat(
            ("user", [{"type": "text", "text": "the <image> mark"}]),
            ("assistant", [{"type": "text", "text": "<image>"}]),
        ),
        chat(
            ("user", [PLACE, {"type": "text", "text": "the <image> mark"}]), ("assistant", "<image>"), images=["a.png"]
        ),
    ],
)
def test_a_mark_spelled_in_text_stays_text(row):
    """TXT-04: in `texts`, in typed parts, without images, and beside typed places."""
    sample = parse(row)
    assert ["the <image> mark", "<image>"] == [turn.text for turn in sample.turns]
    assert len(sample.images) == sum(isinstance(part, int) for turn in sample.turns for part in turn.parts)


# Chat messages


def test_parts_are_joined_and_empty_ones_dropped():
    """Texts beside each other are one; an empty one between images is none."""
    text = [{"type": "text", "text": text} for text in ("a", "", "b")]
    row = chat(("user", [*text, PLACE, text[1], PLACE, *text, text[1]]), ANSWER, images=["1", "2"])
    assert ("ab", 0, 1, "ab") == parse(row).turns[0].parts
    assert () == parse(chat(("user", []), ANSWER)).turns[0].parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "image": {"path": "a.png", "bytes": None}, "text": None, "url": None},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image_url", "url": "a.png"},
    ],
)
def test_a_part_may_carry_its_image(part):
    """In a row without images of its own; beside such images it is refused, since one of the two is too many."""
    sample = parse(chat(("user", [TEXT, part]), ANSWER, images=None))
    assert ((ImageRef("a.png", ROOT),), ("Why?", 0)) == (sample.images, sample.turns[0].parts)
    assert refusal(chat(("user", [TEXT, part]), ANSWER, images=["a.png"])).reason == Reason.WRONG_FORM


def test_a_part_may_name_an_image_by_index():
    """The images come in reading order, and the places are numbered anew."""
    places = [{"type": "image", "index": index, "text": None} for index in (2, 0, 1)]
    row = chat(("user", [places[0], TEXT, places[1]]), ANSWER, ("user", [places[2]]), images=["a", "b", "c"])
    assert ["c", "a", "b"] == names(row)
    assert [(0, "Why?", 1), ("So.",), (2,)] == [turn.parts for turn in parse(row).turns]


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (-1, 0), (0, None)])
def test_indices_name_each_image_once(indices):
    """Twice, out of range, or only now and then: IMAGE_PLACES."""
    row = chat(("user", [{"type": "image", "index": index} for index in indices]), ANSWER, images=["a", "b"])
    assert refusal(row).reason == Reason.IMAGE_PLACES


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (None, ""),
        (3, ""),
        ({"type": "text", "text": "x"}, ""),
        (["Why?"], "[0]"),
        ([TEXT, None], "[1]"),
        ([{"text": "x"}], "[0].type"),
        ([{"type": "video", "video": "x.mp4"}], "[0].type"),
        ([{"type": ["text"]}], "[0].type"),
        ([{"type": "text"}], "[0].text"),
        ([{"type": "text", "text": 3}], "[0].text"),
        ([{"type": "image", "image": 3}], "[0].image"),
        ([{"type": "image", "image": ""}], "[0].image"),
        ([{"type": "image", "image": "a", "path": "b"}], "[0]"),
        ([{"type": "image", "index": "0"}], "[0].index"),
        ([{"type": "image", "index": True}], "[0].index"),
        ([{"type": "image_url", "image_url": {}}], "[0].image_url.url"),
    ],
)
def test_a_wrong_content_is_refused_by_field(content, field):
    """WRONG_FORM, down to the part and its key."""
    error = refusal(chat(("user", content), ANSWER))
    assert (Reason.WRONG_FORM, f"messages[0].content{field}") == (error.reason, error.field)


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_calls_of_tools_are_refused_by_name(key):
    """They are an answer that text does not hold; an empty one is none."""
    row = chat(("user", "Why?"), ("assistant", None), ANSWER)
    row["messages"][1][key] = [{"name": "look"}]
    error = refusal(row)
    assert (Reason.WRONG_FORM, f"messages[1].{key}") == (error.reason, error.field)
    row = chat(("user", "Why?"), ANSWER)
    row["messages"][1][key] = None
    assert parse(row)


# Roles


@pytest.mark.parametrize(
    ("role", "wanted"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("system", "system")],
)
def test_roles_of_conversations(role, wanted):
    """ShareGPT's names and the plain ones."""
    assert wanted == parse(talk((role, "x"), ("gpt", "So."))).turns[0].role


@pytest.mark.parametrize("role", ["human", "gpt", "USER", "Assistant", " user", "tool", "function", "", 3, ["user"]])
def test_messages_take_three_roles(role):
    """TXT-13: any other is UNKNOWN_ROLE, named in the message."""
    error = refusal(chat(("user", "Why?"), (role, "So."), ANSWER))
    assert (Reason.UNKNOWN_ROLE, "messages[1].role") == (error.reason, error.field)
    assert "system, user, assistant" in error.message


@pytest.mark.parametrize("role", ["model", "bot", "GPT", "observation", "tool"])
def test_other_roles_of_conversations_are_refused(role):
    """No alias is guessed."""
    error = refusal(talk(("human", "Why?"), (role, "So.")))
    assert (Reason.UNKNOWN_ROLE, "conversations[1].from") == (error.reason, error.field)


@pytest.mark.parametrize(
    "roles", ["ua", "sua", "aua", "uua", "uaa", "uau", "a", "asu", "uaua"], ids=lambda roles: f"order-{roles}"
)
def test_any_order_of_roles_is_read_as_written(roles):
    """TXT-13: whether a template takes the order is the template's to say."""
    order = [{"s": "system", "u": "user", "a": "assistant"}[letter] for letter in roles]
    row = chat(*((role, f"{index}") for index, role in enumerate(order)))
    assert [(role, (f"{index}",)) for index, role in enumerate(order)] == turns(row)


# Text and answers


@pytest.mark.parametrize(
    "text", ["\n\nnone", "none\n", "  two", "two  ", "\tx", "a\u2028b", "<|im_end|>", "\0", "\U0001f600"]
)
@pytest.mark.parametrize("form", [talk, chat])
def test_text_is_kept_character_by_character(text, form):
    """TXT-02: no blank is stripped, no mark of a template is touched."""
    assert [("user", (text,)), ("assistant", (text,))] == turns(form(("user", text), ("assistant", text)))
    assert [("user", (text,)), ("assistant", (text,))] == turns(texts(None, (text, text)))


@pytest.mark.parametrize("answer", ["", " ", "\n\t", "\u3000", None])
def test_an_answer_of_nothing_is_refused(answer):
    """TXT-08: NO_ANSWER, in every form, naming the turn; also where other turns have an answer."""
    for row, field in (
        (texts([], ("Why?", "So."), ("Why?", answer)), "texts[1].assistant"),
        (talk(("human", "Why?"), ("gpt", answer)), "conversations[1].value"),
        (chat(("user", "Why?"), ("assistant", answer)), "messages[1].content"),
    ):
        error = refusal(row)
        assert (Reason.NO_ANSWER, field) == (error.reason, error.field)


def test_an_answer_of_pictures_alone_is_refused():
    """A place is not text to learn."""
    assert refusal(talk(("human", "Why?"), ("gpt", "<image>"), image="a.png")).reason == Reason.NO_ANSWER


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"texts": []}, Reason.NO_ANSWER, "texts"),
        ({"conversations": []}, Reason.NO_ANSWER, "conversations"),
        ({"messages": []}, Reason.NO_ANSWER, "messages"),
        ({"texts": "0 1"}, Reason.WRONG_FORM, "texts"),
        ({"texts": {"user": "0", "assistant": "1"}}, Reason.WRONG_FORM, "texts"),
        ({"texts": [["0", "1"]]}, Reason.WRONG_FORM, "texts[0]"),
        ({"texts": [None]}, Reason.WRONG_FORM, "texts[0]"),
        ({"texts": [{"user": "0"}]}, Reason.NO_ANSWER, "texts[0].assistant"),
        ({"texts": [{"assistant": "1"}]}, Reason.WRONG_FORM, "texts[0].user"),
        ({"texts": [{"user": None, "assistant": "1"}]}, Reason.WRONG_FORM, "texts[0].user"),
        ({"texts": [{"user": "0", "assistant": 1}]}, Reason.WRONG_FORM, "texts[0].assistant"),
        ({"texts": [{"user": ["0"], "assistant": "1"}]}, Reason.WRONG_FORM, "texts[0].user"),
        ({"conversations": [{"role": "user", "content": "x"}]}, Reason.WRONG_FORM, "conversations[0].from"),
        ({"conversations": [{"from": "human"}]}, Reason.WRONG_FORM, "conversations[0].value"),
        ({"messages": [{"content": "x"}]}, Reason.WRONG_FORM, "messages[0].role"),
        (chat(("user", "Why?")), Reason.NO_ANSWER, ""),
        (chat(("system", "x"), ("user", "Why?")), Reason.NO_ANSWER, ""),
    ],
)
def test_degenerate_turns_are_refused_by_field(row, reason, field):
    """TXT-08: no turns, no answer, wrong types."""
    error = refusal(row)
    assert (reason, field) == (error.reason, error.field)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (texts([], ("a\ud800b", "So.")), "texts[0].user"),
        (texts([], ("Why?", "\udfff")), "texts[0].assistant"),
        (texts(["\udcff.png"], ("Why?", "So.")), "images[0]"),
        (talk(("system", "\ud800"), ("gpt", "So.")), "conversations[0].value"),
        (chat(("user", [{"type": "text", "text": "\ud800"}]), ANSWER), "messages[0].content[0].text"),
        (texts([], ("Why?", "So."), id="\ud800"), "id"),
    ],
)
def test_a_lone_surrogate_is_refused(row, field):
    """INVALID_TEXT: no tokenizer and no file takes it."""
    error = refusal(row)
    assert (Reason.INVALID_TEXT, field) == (error.reason, error.field)
    str(error).encode()


def test_a_message_says_where_and_what():
    """File and line, id, field, what was found, what was wanted; long values are cut."""
    error = refusal(texts(["a.png"], ("Why?", "So."), ("Why?", {"x": "y" * 10_000}), id="r5"))
    assert str(error) == (
        "train.jsonl:8 (id 'r5'), field texts[1].assistant: wrong_form: "
        'found an object of 1, wanted a string (an empty one is ""): correct the row'
    )


# The handed rows, and rows that nobody wrote


@pytest.mark.parametrize("name", ["labels", "inject", "counts", "forms", "nothing", "long", "roles", "mixed_types"])
def test_handed_rows(case_script, tmp_path, name):
    """TXT-01 to TXT-13, as far as reading decides: verdict, number of images, and the answers to learn."""
    case_script("make_rows").main(str(tmp_path))
    expected = json.loads((tmp_path / "expected.json").read_text())[f"{name}.jsonl"]
    lines = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(expected) == len(lines) > 0
    later = {("forms", 5), ("forms", 8), ("long", 1), ("long", 2), ("long", 3)}  # the store's and the budget's verdicts
    for number, (wanted, line) in enumerate(zip(expected, lines, strict=True)):
        if wanted["verdict"] == "reject" and (name, number) not in later:
            refusal(json.loads(line))
            continue
        sample = parse(json.loads(line))
        if wanted["verdict"] == "keep":
            assert wanted["images"] == len(sample.images)
            if wanted["supervised"]:
                assert wanted["supervised"] == [turn.text for turn in sample.turns if turn.role == "assistant"]


def mutated(value, roll):
    """The value with one thing in it exchanged, removed or repeated."""
    junk = [
        None,
        True,
        0,
        -1,
        1e300,
        float("nan"),
        "",
        "<image>",
        "\ud800",
        "user",
        b"x",
        [],
        {},
        [[]],
        {"type": "image"},
    ]
    if isinstance(value, dict) and value and roll.random() < 0.8:
        key = roll.choice(list(value))
        copy = dict(value)
        if roll.random() < 0.15:
            del copy[key]
        elif roll.random() < 0.15:
            copy[roll.choice(["texts", "messages", "conversations", "image", "images", "index", "from", "bytes"])] = (
                copy[key]
            )
        else:
            copy[key] = mutated(value[key], roll)
        return copy
    if isinstance(value, list) and value and roll.random() < 0.8:
        index = roll.randrange(len(value))
        return [*value[:index], mutated(value[index], roll), *value[index + roll.randrange(2) :]]
    return roll.choice(junk)


def test_any_row_is_a_sample_or_a_data_error():
    """Rows mutated by seed: nothing but a `Sample` that keeps the laws, or a `DataError`."""
    roll = random.Random(0)
    seeds = [
        texts(["a.png"], ("Why?", "So."), ("And?", "No."), id=3),
        talk(("human", "<image>\nWhy?"), ("gpt", "So."), image="a.png"),
        chat(("user", [PLACE, TEXT]), ANSWER, images=[{"path": "a.png", "bytes": None}]),
        chat(("user", [{"type": "image_url", "image_url": {"url": "a"}}, TEXT]), ANSWER),
        chat(("user", [{"type": "image", "index": 0}, TEXT]), ANSWER, images=["a"]),
    ]
    kept, reasons = 0, set()
    for _ in range(20_000):
        row = roll.choice(seeds)
        for _ in range(roll.randrange(1, 4)):
            row = mutated(row, roll)
        try:
            sample = parse(row)
        except DataError as error:
            reasons.add(error.reason)
            str(error).encode()
            continue
        kept += 1
        places = [part for turn in sample.turns for part in turn.parts if not isinstance(part, str)]
        assert list(range(len(sample.images))) == places
        assert all(type(place) is int for place in places)
        assert {"system", "user", "assistant"} >= {turn.role for turn in sample.turns}
        assert any(turn.role == "assistant" for turn in sample.turns)
        assert all(turn.text.strip() for turn in sample.turns if turn.role == "assistant")
    assert kept > 1000
    assert reasons >= {
        Reason.WRONG_FORM,
        Reason.INVALID_JSON,
        Reason.NO_ANSWER,
        Reason.IMAGE_PLACES,
        Reason.UNKNOWN_ROLE,
    }


def test_a_hostile_row_takes_no_hostile_time():
    """A row of a million marks, parts or empty lines costs linear time: the test's time limit is the watchdog."""
    many = 100_000
    assert many == len(parse(talk(("user", "\n<image>" * many), ("gpt", "So."), images=["a"] * many)).images)
    row = chat(("user", [{"type": "text", "text": "a"}] * many), ANSWER)
    assert ("a" * many,) == parse(row).turns[0].parts
    assert refusal(talk(("user", "<image>\n" * many + "x"), ("gpt", "So."))).reason == Reason.IMAGE_PLACES


# What would be lost, or learnt against the row's own word


@pytest.mark.parametrize(
    "row",
    [
        texts([], ("Why?", "So."), system="Be brief."),
        talk(("human", "Why?"), ("gpt", "So."), system="Be brief."),
        chat(("user", "Why?"), ANSWER, system="Be brief."),
        chat(("system", "Be brief."), ("user", "Why?"), ANSWER, system=None),
        chat(("system", "Be brief."), ("user", "Why?"), ANSWER, system=""),
    ],
)
def test_a_system_text_beside_the_turns_is_the_first_turn(row):
    """As ShareGPT has it: in each form it is the sample that a system turn gives."""
    assert [("system", ("Be brief.",)), ("user", ("Why?",)), ("assistant", ("So.",))] == turns(row)


def test_a_system_text_is_there_once_and_is_a_text():
    """Two of them are refused, and so is what is none; images go in front of the user's turn all the same."""
    twice = refusal(chat(("system", "Be brief."), ("user", "Why?"), ANSWER, system="Be long."))
    assert (Reason.WRONG_FORM, "system") == (twice.reason, twice.field)
    assert Reason.WRONG_FORM == refusal(chat(("user", "Why?"), ANSWER, system=["Be brief."])).reason
    assert ("user", (0, "Why?")) == turns(texts(["a.png"], ("Why?", "So."), system="Be brief."))[1]


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
@pytest.mark.parametrize(
    ("value", "learnt"),
    [(0, False), (0.0, False), (False, False), (1, True), (True, True), (None, True), (math.nan, True)],
)
def test_an_answer_says_whether_it_is_learnt(key, value, learnt):
    """`weight` is OpenAI's, `loss` and `train` those of other trainers; in each form."""
    for form, number, row in [
        ("texts", 0, texts([], ("Why?", "So."))),
        ("conversations", 1, talk(("human", "Why?"), ("gpt", "So."))),
        ("messages", 1, chat(("user", "Why?"), ANSWER)),
    ]:
        row[form][number][key] = value
        assert learnt == parse(row).turns[1].learnt
        assert parse(row).turns[0].learnt


def test_a_weight_is_all_or_nothing_and_of_an_answer():
    """Anything between, and the wish to learn a question, can't be had: refused, with the field."""
    half, question = (chat(("user", "Why?"), ANSWER) for _ in range(2))
    half["messages"][1]["weight"] = 0.5
    question["messages"][0] |= {"weight": 1, "train": True}
    assert (Reason.WRONG_FORM, "messages[1].weight") == (refusal(half).reason, refusal(half).field)
    assert (Reason.WRONG_FORM, "messages[0].train") == (refusal(question).reason, refusal(question).field)
    question["messages"][0]["train"] = False
    assert parse(chat(("user", "Why?"), ANSWER)).turns[1] == parse(question).turns[1]


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"])
def test_an_answer_beside_the_text_is_refused(key):
    """Law: what an answer has besides its text would be lost without a word. Empty and null are nothing."""
    for form, row in (
        ("conversations", talk(("human", "Why?"), ("gpt", "So."))),
        ("messages", chat(("user", "Why?"), ANSWER)),
    ):
        for nothing in (None, "", []):
            row[form][1][key] = nothing
            parse(row)
        row[form][1][key] = "first this, then that"
        assert (Reason.WRONG_FORM, f"{form}[1].{key}") == (refusal(row).reason, refusal(row).field)


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_declared_tools_are_refused(key):
    """They would be missing from the prompt; none, also as the text `[]`, is none."""
    row = chat(("user", "Why?"), ANSWER)
    assert [parse(row)] * 3 == [parse(row | {key: nothing}) for nothing in (None, [], "[]")]
    assert (Reason.WRONG_FORM, key) == ((error := refusal(row | {key: [{"name": "look"}]})).reason, error.field)


# Bytes in JSON


PIXEL = base64.b64encode(b"a picture, say").decode()


@pytest.mark.parametrize(
    "row",
    [
        texts([f"data:image/png;base64,{PIXEL}"], ("Why?", "So.")),
        texts([], ("Why?", "So."), image=f"DATA:image/jpeg;charset=x;BASE64,{PIXEL}") | {"images": None},
        chat(("user", [{"type": "image_url", "image_url": {"url": f"data:;base64,{PIXEL}"}}, TEXT]), ANSWER),
        chat(("user", [{"type": "image", "url": f"data:image/webp;base64,{PIXEL}"}, TEXT]), ANSWER),
    ],
)
def test_a_data_url_is_the_file_itself(row):
    """As OpenAI's rows have images: nothing is fetched, and the name stays empty."""
    assert (ImageRef("", ROOT, b"a picture, say"),) == parse(row).images
    assert [("user", (0, "Why?")), ("assistant", ("So.",))] == turns(row)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,####", "data:image/png;base64,QQ", "data:image/png,QQ==", "data:"]
)
def test_a_data_url_that_is_none_is_told(url):
    """Short or of a megabyte: one reason, with the field, and never the whole text."""
    for one in (url, url + "#" * 1_000_000):
        error = refusal(texts([one], ("Why?", "So.")))
        assert (Reason.WRONG_FORM, "images[0]") == (error.reason, error.field)
        assert "name a file" in error.message
