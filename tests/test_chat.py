"""Laws of `chat.py` and `template.py`: exactly the answers and their end marks are learnt, whatever the text says."""

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from small import MARKS, tokenizer
from tokenizers import AddedToken

from mmdp.chat import Chat
from mmdp.records import IGNORE, Turn
from mmdp.refusals import DataError, Reason
from mmdp.template import CHATML
from mmdp.tokenizer import load_tokenizer


def qa(*texts: str) -> list[Turn]:
    return [Turn("assistant" if number % 2 else "user", (text,)) for number, text in enumerate(texts)]


def learnt(chat: Chat, ids: np.ndarray, labels: np.ndarray) -> list[str]:
    """The learnt stretches as text, each decoded with its context, so that no decoder trims it."""
    decode = lambda tokens: chat.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)  # noqa: E731
    assert np.array_equal(ids[labels != IGNORE], labels[labels != IGNORE])
    stretches, start = [], None
    for place, on in enumerate([*(labels != IGNORE), False]):
        if on and start is None:
            start = place
        if not on and start is not None:
            stretches.append(decode(ids[:place])[len(decode(ids[:start])) :])
            start = None
    return stretches


@pytest.fixture(scope="session")
def rows(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[list[Turn], dict]]]:
    """The handed rows with what is expected of each; image places are left out."""
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, shared / "cases" / "make_rows.py", folder], check=True, capture_output=True)
    expected = json.loads((folder / "expected.json").read_text())
    found = {}
    for name in ("labels", "inject", "roles"):
        found[name] = []
        for line, entry in zip((folder / f"{name}.jsonl").open(), expected[f"{name}.jsonl"], strict=True):
            row = json.loads(line)
            if "texts" in row:
                turns = qa(*(text for turn in row["texts"] for text in (turn["user"], turn["assistant"])))
            else:
                turns = [Turn(one["role"], (one["content"],)) for one in row["messages"]]
            found[name].append((turns, entry))
    return found


@pytest.mark.parametrize("kind", ["plain", "merge", "space"])
@pytest.mark.parametrize("template", ["chatml", "default_system", "strict"])
def test_exactly_the_answers_and_their_end_marks_are_learnt(rows, case_script, kind, template):
    """TXT-01, 02, 03, 12: for every tokenizer, template and number of turns; pad equals the end mark in all of them."""
    chat = Chat(case_script("tiny_tokenizers").build(kind, template), marks=["<|image|>"])
    assert chat.tokenizer.pad_token_id == chat.tokenizer.eos_token_id
    for turns, entry in rows["labels"]:
        ids, labels = chat.encode(turns)
        assert [text + "<|im_end|>" for text in entry["supervised"]] == learnt(chat, ids, labels), entry["note"]


@pytest.mark.parametrize("kind", ["plain", "merge", "space"])
def test_text_never_becomes_a_turn_or_an_image(rows, case_script, kind):
    """TXT-04, 05: marks spelled by a person stay text, and what an answer spells is learnt as text."""
    chat = Chat(case_script("tiny_tokenizers").build(kind), marks=["<|image|>"])
    marks = {chat.tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>", "<|image|>")}
    for turns, _ in rows["inject"]:
        ids, labels = chat.encode(turns)
        assert 2 * len(turns) == sum(int(token) in marks for token in ids)
        assert [turn.text + "<|im_end|>" for turn in turns if turn.role == "assistant"] == learnt(chat, ids, labels)


@pytest.mark.parametrize("template", ["chatml", "strict"])
def test_roles_are_learnt_as_written_or_refused_by_name(rows, case_script, template):
    """TXT-13: what the template can show is learnt; what it refuses is refused, with the roles in the message."""
    chat = Chat(case_script("tiny_tokenizers").build("plain", template))
    read = [(turns, entry) for turns, entry in rows["roles"] if entry["verdict"] == "keep"]  # rows.py knows the roles
    strange = [] if template == "chatml" else read[:4]
    for turns, _ in strange:
        with pytest.raises(DataError, match=", ".join(turn.role for turn in turns)) as caught:
            chat.encode(turns)
        assert Reason.TEMPLATE == caught.value.reason
    for turns, entry in read[len(strange) :]:
        ids, labels = chat.encode(turns)
        assert [text + "<|im_end|>" for text in entry["supervised"]] == learnt(chat, ids, labels)
    assert 5 == len(read)


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
def test_real_tokenizers_give_the_ids_of_the_whole_chat(shared, name):
    """Way C equals way A wherever no token straddles header and answer; 565 real rows, both real tokenizers."""
    chat = Chat(load_tokenizer(str(shared / "tokenizers" / name)))
    lines = (shared / "data" / "real-vqa" / "train.jsonl").read_text().splitlines()
    compared = 0
    for line in lines[::4]:
        turns = qa(*(text for turn in json.loads(line)["texts"] for text in (turn["user"], turn["assistant"])))
        ids, labels = chat.encode(turns)
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        assert [turn.text + "<|im_end|>" for turn in turns[1::2]] == learnt(chat, ids, labels)
        assert chat.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == ids.tolist()
        compared += 1
    assert 142 == compared


def test_generation_marks_of_chatml_agree_with_the_frame(shared):
    """The Qwen folder's template has `{% generation %}` marks: its own mask is the one we make."""
    chat = Chat(load_tokenizer(str(shared / "tokenizers" / "qwen")))
    turns = [Turn("system", ("be brief",)), *qa("what is it?", "a fox", "and this?", "an owl\n")]
    ids, labels = chat.encode(turns)
    encoded = chat.tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.text} for turn in turns],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert encoded["input_ids"] == ids.tolist()
    assert [bool(on) for on in encoded["assistant_masks"]] == (labels != IGNORE).tolist()


LOOP = "{% for m in messages %}"
FOREIGN = {
    # In the manner of Idefics and SmolVLM: parts, no generation marks, a blank between header and answer.
    "parts": (
        "<|im_start|>" + LOOP + "{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
        "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    # In the manner of Gemma: another role name, trimmed text.
    "trims": (
        "<s>" + LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}


def test_a_template_of_parts_learns_from_the_generation_prompt_on():
    """What a model must write after `Assistant:` is learnt, the blank included; images stand where the parts say."""
    chat = Chat(tokenizer(FOREIGN["parts"]), placeholder="<image>", marks=["<image>"])
    turns = [Turn("user", (0, "what is ", 1, "shown")), Turn("assistant", (" a fox",)), *qa("and", "an owl")]
    ids, labels = chat.encode(turns, ["<image>" * 3, "<image>" * 2])
    rendered = (
        "<|im_start|>User:<image><image><image>what is <image><image>shown<end_of_utterance>\n"
        "Assistant:  a fox<end_of_utterance>\nUser: and<end_of_utterance>\nAssistant: an owl<end_of_utterance>\n"
    )
    assert rendered == chat.tokenizer.decode(ids)
    assert ["  a fox<end_of_utterance>", " an owl<end_of_utterance>"] == learnt(chat, ids, labels)


def test_a_template_that_trims_is_followed():
    """The text a template strips is stripped, in the ids and in the labels."""
    chat = Chat(tokenizer(FOREIGN["trims"]))
    ids, labels = chat.encode(qa("\n what ", " a fox\n"))
    assert (
        "<s><start_of_turn>user\nwhat<end_of_turn>\n<start_of_turn>model\na fox<end_of_turn>\n"
        == chat.tokenizer.decode(ids)
    )
    assert ["a fox<end_of_turn>"] == learnt(chat, ids, labels)


def test_a_mark_that_swallows_white_space_swallows_it_here_too():
    """Added tokens with `rstrip` give the ids that the whole chat gives."""
    template = LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    marks = [AddedToken(mark, special=True, rstrip=True) for mark in ("<|user|>", "<|assistant|>", "<|end|>")]
    chat = Chat(tokenizer(template, [*MARKS, *marks]))
    turns = qa("what", "a fox")
    ids, labels = chat.encode(turns)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert chat.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == ids.tolist()
    assert ["a fox<|end|>"] == learnt(chat, ids, labels)


GENERATION = (
    LOOP + "[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>{% endgeneration %}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


def test_generation_marks_decide_for_a_foreign_template():
    """The template's own mask is what is learnt, with images in place."""
    chat = Chat(tokenizer(GENERATION), placeholder="<image>", marks=["<image>"])
    assert "generation" == chat.rule
    ids, labels = chat.encode([Turn("user", (0, "what")), Turn("assistant", ("a fox",))], ["<image>" * 3])
    assert "[user] <image><image><image>what\n[assistant] a fox </s>" == chat.tokenizer.decode(ids)
    assert ["a fox </s>"] == learnt(chat, ids, labels)


PARTS_FIRST = (  # in the manner of LLaVA-OneVision: images before text, marks that leave the end mark out
    "{% for m in messages %}<|start|>{{ m.role }} {% for p in m.content %}{% if p.type == 'image' %}<image>{% endif %}"
    "{% endfor %}{% for p in m.content %}{% if p.type == 'text' %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '\n' + p.text }}{% endgeneration %}{% else %}{{ '\n' + p.text }}{% endif %}{% endif %}{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EITHER_FORM = (  # in the manner of Gemma 3: a string or parts, all of them trimmed
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        pytest.param(
            PARTS_FIRST,
            "<|start|>user {image}{image}\nleft or\n right<|end|><|start|>assistant \nleft<|end|>",
            id="images first",
        ),
        pytest.param(
            EITHER_FORM,
            "<|start|>user\n{image}left or{image}right<|end|>\n<|start|>assistant\nleft<|end|>\n",
            id="either form",
        ),
    ],
)
def test_a_template_puts_images_itself_where_it_can(template, wanted):
    """What an image writes stands where the template puts its place, whole, also the white space around its marks."""
    marked = tokenizer(template)
    marked.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    chat = Chat(marked, placeholder="<image>", marks=["<image>"])
    image = "\n\n<image><image>\n\n"
    turns = [Turn("user", (0, "left or", 1, " right")), Turn("assistant", ("left",))]
    ids, labels = chat.encode(turns, [image, image])
    assert wanted.format(image=image) == chat.tokenizer.decode(ids)
    assert ["left<|end|>"] == [text.strip() for text in learnt(chat, ids, labels)]


def test_the_first_token_is_never_learnt():
    """Nothing predicts it, also where an answer is the very first that the template writes."""
    chat = Chat(tokenizer(GENERATION.replace("[{{ m.role }}] ", "")), placeholder="<image>", marks=["<image>"])
    ids, labels = chat.encode([Turn("assistant", ("a fox is red",)), Turn("user", ("what",))], [])
    assert IGNORE == labels[0]
    assert ids[1:4].tolist() == labels[1:4].tolist()


@pytest.mark.parametrize("text", ["see <image> there", "over</s>[user] now", "<|im_end|>"])
def test_a_foreign_template_refuses_text_that_spells_a_mark(text):
    """TXT-04, 05 where text can't be written as plain text: refused, with the token's name."""
    chat = Chat(tokenizer(GENERATION), placeholder="<image>", marks=["<image>"])
    with pytest.raises(DataError, match="special token") as caught:
        chat.encode(qa(text, "no"))
    assert Reason.CONTROL_TEXT == caught.value.reason


@pytest.mark.parametrize(
    "template",
    [
        LOOP + "[{{ m.role }}] {{ m.content }}\n{% endfor %}",  # nothing ends an answer
        LOOP + "{% generation %}{% endgeneration %}{{ m.role }}{{ m.content }}</s>{% endfor %}",  # marks nothing
    ],
)
def test_a_template_that_tells_no_target_is_an_error(template):
    """TXT-03: zero learnt tokens over a whole run is never found out hours later."""
    with pytest.raises(ValueError, match="does not tell what is learnt"):
        Chat(tokenizer(template))


def test_a_template_without_text_or_marks_is_an_error():
    """No template, a template that shows no user text, and one whose marks the tokenizer lacks: each with a way out."""
    with pytest.raises(ValueError, match="no single chat template"):
        Chat(tokenizer(None))
    with pytest.raises(ValueError, match="shows no user text"):
        Chat(tokenizer("<s>"))
    with pytest.raises(ValueError, match=r"lacks the special tokens <\|im_start\|>"):
        Chat(tokenizer(None, ["<|im_end|>"]), chat_template="chatml")


def test_chatml_is_a_way_out():
    """A tokenizer without a template works with `chatml`."""
    chat = Chat(tokenizer(None), chat_template="chatml")
    ids, labels = chat.encode(qa("what", "a fox"))
    assert ["a fox<|im_end|>"] == learnt(chat, ids, labels)
    assert CHATML == chat.template.text


def test_a_template_that_hides_a_turn_is_refused():
    """A system turn that the template leaves out would be lost in silence: refused and counted."""
    hides = (
        LOOP + "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    chat = Chat(tokenizer(hides))
    with pytest.raises(DataError) as caught:
        chat.encode([Turn("system", ("be brief",)), *qa("what", "a fox")])
    assert Reason.TEMPLATE == caught.value.reason


THINKS = CHATML.replace(
    "message['content'] + '<|im_end|>' }}{% endgen", "message['content'].split('</t>')[-1] + '<|im_end|>' }}{% endgen"
)


def test_a_template_that_rewrites_a_text_refuses_that_row():
    """A template that cuts a reasoning model's thoughts is followed where it shows the text, and refused where not."""
    assert THINKS != CHATML
    chat = Chat(tokenizer(THINKS))
    ids, labels = chat.encode(qa("what </t> is", "a fox"))
    assert ["a fox<|im_end|>"] == learnt(chat, ids, labels)
    with pytest.raises(DataError, match="rewrites") as caught:
        chat.encode(qa("what", "<t>secret</t>a fox"))
    assert Reason.TEMPLATE == caught.value.reason


def test_a_template_with_a_fault_is_named():
    """A syntax error says its line, and is not taken for a template that shows nothing."""
    with pytest.raises(ValueError, match="no valid Jinja, line 2"):
        Chat(tokenizer("{% for m in messages %}\n{{ m. }}"))


def test_lone_surrogates_are_refused():
    """Text that has no UTF-8 form is a bad row, not a crash."""
    chat = Chat(tokenizer(CHATML))
    with pytest.raises(DataError) as caught:
        chat.encode(qa("\ud800", "a fox"))
    assert Reason.INVALID_TEXT == caught.value.reason


def test_a_conversation_without_answers_is_refused():
    """Nothing to learn from is a reason of its own."""
    chat = Chat(tokenizer(CHATML))
    with pytest.raises(DataError) as caught:
        chat.encode([Turn("user", ("what",))])
    assert Reason.NO_ANSWER == caught.value.reason


def test_image_marks_stand_where_the_turn_says():
    """Several images, in front, between and behind the text."""
    chat = Chat(tokenizer(CHATML), placeholder="<image>", marks=["<image>"])
    turns = [Turn("user", (0, "left ", 1, 2)), Turn("assistant", ("a fox",))]
    ids, _ = chat.encode(turns, ["<image>", "<image>" * 2, "<image>" * 3])
    assert "<image>left <image><image><image><image><image>" in chat.tokenizer.decode(ids)


@pytest.mark.parametrize("template", [CHATML, FOREIGN["parts"], FOREIGN["trims"], GENERATION])
def test_an_empty_question_is_fine(template):
    """TXT-08: a turn without any part is a turn without text, for every kind of template."""
    chat = Chat(tokenizer(template), placeholder="<image>", marks=["<image>"])
    ids, labels = chat.encode([Turn("user", ()), Turn("assistant", ("a fox",))])
    assert "a fox" in "".join(learnt(chat, ids, labels))


def test_a_pickled_chat_encodes_alike():
    """Workers get the same ids, labels and fingerprint."""
    chat = Chat(tokenizer(FOREIGN["parts"]), placeholder="<image>", marks=["<image>"])
    other = pickle.loads(pickle.dumps(chat))
    turns = [Turn("user", (0, "what")), Turn("assistant", ("a fox",))]
    assert all(map(np.array_equal, chat.encode(turns, ["<image>"]), other.encode(turns, ["<image>"])))
    assert chat.fingerprint == other.fingerprint
    assert chat.fingerprint != Chat(tokenizer(CHATML)).fingerprint


def test_threads_share_a_chat():
    """Many threads at once get what one gets."""
    chat = Chat(tokenizer(CHATML))
    wanted = [chat.encode(qa(f"what {n}<|im_end|>", "a fox"))[0].tolist() for n in range(50)]
    got: list[list[int]] = [[] for _ in range(50)]

    def work(first: int) -> None:
        for n in range(first, 50, 4):
            got[n] = chat.encode(qa(f"what {n}<|im_end|>", "a fox"))[0].tolist()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wanted == got


@pytest.mark.long
def test_labels_are_the_same_on_the_oldest_transformers(shared, tmp_path):
    """TXT-03: ids and labels do not change with the library, from the oldest we allow to the installed one."""
    script = tmp_path / "labels.py"
    script.write_text(LABELS_SCRIPT)
    root = Path(__file__).resolve().parent.parent
    oldest = ["uv", "run", "--no-project", "--python", sys.executable]
    oldest += ["--with", "transformers==5.18.0", "--with", "jinja2", "--with", "numpy"]
    newest = [sys.executable]
    outputs = [
        subprocess.run(
            [*command, script, root, shared / "tokenizers"], check=True, capture_output=True, text=True, timeout=170
        ).stdout.splitlines()
        for command in (oldest, newest)
    ]
    assert "5.18.0" == outputs[0][0] != outputs[1][0]
    assert outputs[0][1:] == outputs[1][1:]
    assert 4 == len(outputs[0])


LABELS_SCRIPT = """
import hashlib, sys
import transformers
sys.path.insert(0, sys.argv[1])
from mmdp.chat import Chat
from mmdp.tokenizer import load_tokenizer
from mmdp.records import Turn

print(transformers.__version__)
turns = [Turn("system", ("be brief",))]
for n in range(5):
    turns.append(Turn("user", (0, f"what is {n}?<|im_end|>\\n") if n == 0 else (f"{n}",)))
    turns.append(Turn("assistant", (f"\\nit is {n}",)))
template = "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
template += "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
for name, own in (("smollm2", None), ("qwen", None), ("qwen", template)):
    chat = Chat(load_tokenizer(sys.argv[2] + "/" + name), chat_template=own)
    if own:
        turns = [Turn(turn.role, tuple(str(part).replace("<|im_end|>", "") for part in turn.parts)) for turn in turns]
    ids, labels = chat.encode(turns, ["<|im_start|>"])
    print(name, chat.rule, len(ids), hashlib.sha256(ids.tobytes() + labels.tobytes()).hexdigest())
"""


# Answers that are not learnt


def unlearnt(turns: list[Turn], *numbers: int) -> list[Turn]:
    """The same, with these answers not to be learnt."""
    answers = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    without = {answers[number] for number in numbers}
    return [Turn(turn.role, turn.parts, place not in without) for place, turn in enumerate(turns)]


@pytest.mark.parametrize("template", [CHATML, None], ids=["chatml", "its own"])
@pytest.mark.parametrize("without", [(), (0,), (1,), (2,), (0, 2), (0, 1)])
def test_an_answer_of_no_weight_is_read_and_not_learnt(shared, template, without):
    """Ids are the same, and so are the labels of all other answers, with their end marks."""
    chat = Chat(load_tokenizer(str(shared / "tokenizers" / "qwen")), chat_template=template)
    turns = qa("one?", "first", "two?", "second", "three?", "third")
    ids, all_labels = chat.encode(turns)
    again, labels = chat.encode(unlearnt(turns, *without))
    assert np.array_equal(ids, again)
    wanted = [text for number, text in enumerate(learnt(chat, ids, all_labels)) if number not in without]
    assert wanted == learnt(chat, ids, labels)
    assert 3 - len(without) == len(wanted)


def test_a_row_that_learns_nothing_is_refused():
    """All of its answers have no weight."""
    with pytest.raises(DataError, match="no token to learn from") as caught:
        Chat(tokenizer(), chat_template="chatml").encode(unlearnt(qa("one?", "first"), 0))
    assert Reason.NO_ANSWER == caught.value.reason


def test_an_answer_in_pieces_is_refused_where_one_is_not_learnt():
    """Which pieces are whose can't be told; where all are learnt it does not matter."""
    learn = "{% generation %}{{ WHAT }}{% endgeneration %}"
    answer = learn.replace("WHAT", "'a '") + "{{ 'b ' }}" + learn.replace("WHAT", "message['content']")
    pieces = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        + answer
        + "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    chat = Chat(tokenizer(), chat_template=pieces)
    turns = qa("one? ", "first", " two? ", "second")
    assert 4 == len(learnt(chat, *chat.encode(turns)))
    with pytest.raises(DataError, match="2 answers are learnt in 4 pieces") as caught:
        chat.encode(unlearnt(turns, 0))
    assert Reason.TEMPLATE == caught.value.reason
