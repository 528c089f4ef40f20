"""Laws of `cli.py`, `config.py` and `metrics.py`: one line, one report, no flag misunderstood."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import mmdp
from mmdp.batching import batch, join
from mmdp.cli import COMMON, parse_flags, print_messages, report
from mmdp.config import Config
from mmdp.metrics import Tally, report_line
from mmdp.records import IGNORE, Encoded
from mmdp.refusals import Reason

KEYS = ["samples", "rows", "tokens", "images", "padded_tokens", "filler_rows", "padding_share", "skipped", "seconds"]


def row(tokens: int, index: int, **more):
    ids = np.arange(tokens, dtype=np.int32)
    return join([Encoded(ids, ids, ())], [[]], [index], **more)


def test_flags_are_kebab_case_names_of_config_fields():
    """A flag sets the field of its name; what is not given has the stage's default, else the field's."""
    config = parse_flags("max_tokens", "batch_size", stage="x", args=["--max-tokens", "99"], batch_size=3)
    assert Config(max_tokens=99, batch_size=3) == config


def test_train_names_the_trainer_where_it_counts_no_steps():
    """`--train tiny` is short for `--trainer tiny` in stage 06, and a number of steps in stage 05."""
    assert "tiny" == parse_flags("trainer", "train_ms", stage="x", args=["--train", "tiny"]).trainer
    assert 20 == parse_flags("train", "trainer", stage="x", args=["--train", "20"]).train


@pytest.mark.parametrize("args", [["--nope"], ["--max-tokens", "many"], ["--max-images", "3"], ["positional"]])
def test_an_unknown_flag_is_an_error(args, capsys):
    """Also one that is a knob, but not of this stage."""
    with pytest.raises(SystemExit) as caught:
        parse_flags("max_tokens", stage="x", args=args)
    assert caught.value.code not in (0, None)


def test_a_value_out_of_range_names_flag_value_and_limit():
    """`ValueError` for what a user gave: the value, the limit."""
    with pytest.raises(SystemExit, match=r"--max-tokens is 0: it must be at least 1"):
        parse_flags("max_tokens", stage="x", args=["--max-tokens", "0"])
    with pytest.raises(ValueError, match="batch_size is -1"):
        Config(batch_size=-1)


@pytest.mark.parametrize("environment", [{}, {"MMDP_TRACEBACK": "1"}])
def test_an_error_that_a_user_can_mend_is_its_message_alone(environment):
    """No traceback above it, unless asked for; of any other error there is one."""
    ours = "from mmdp.cli import parse_flags; parse_flags(stage='x'); import mmdp; mmdp.open_source('nowhere.jsonl')"
    done = run_python(ours, environment)
    assert 1 == done.returncode
    assert "nowhere.jsonl" in done.stderr
    assert bool(environment) == ("Traceback" in done.stderr)
    other = run_python("from mmdp.cli import parse_flags; parse_flags(stage='x'); int('seven')", environment)
    assert "Traceback" in other.stderr
    assert "invalid literal" in other.stderr


@pytest.mark.parametrize("kind", ["RuntimeError", "ImportError"])
def test_what_cannot_be_started_is_its_message_alone(kind):
    """Such as Ray on a busy machine, or a program that is missing: one line, exit code 1."""
    raised = f"raise {kind}('Ray can not be started')"
    ours = f"exec(compile({raised!r}, 'x', 'exec'), {{'__name__': 'mmdp.ray_start'}})"
    done = run_python(f"from mmdp.cli import parse_flags; parse_flags(stage='x'); {ours}", {})
    assert 1 == done.returncode
    assert "error: Ray can not be started\n  (MMDP_TRACEBACK=1 shows where)\n" == done.stderr
    assert "Traceback" in run_python(f"from mmdp.cli import parse_flags; parse_flags(stage='x'); {raised}", {}).stderr


def test_a_name_that_is_no_choice_is_refused_at_the_flag(capsys):
    """Before anything runs, with the choices."""
    with pytest.raises(SystemExit):
        parse_flags("executor", stage="x", args=["--executor", "thread"])
    said = capsys.readouterr()
    assert "threads" in said.out + said.err
    assert "threads" == parse_flags("executor", stage="x", args=["--executor", "threads"]).executor


def test_ctrl_c_ends_a_stage_with_130_and_no_traceback():
    """As a shell expects of a program that SIGINT ended."""
    done = run_python("from mmdp.cli import parse_flags; parse_flags(stage='x'); raise KeyboardInterrupt", {})
    assert -signal.SIGINT == done.returncode  # 130 in a shell
    assert "stopped\n" == done.stderr


def test_a_reader_that_has_read_enough_ends_a_stage_without_a_word():
    """`uv run 05_multimodal_knapsack.py | head -1`: no error, no traceback."""
    code = "from mmdp.cli import parse_flags; parse_flags(stage='x')\nwhile True: print('a line of text' * 100)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert "" == child.stderr.read()
    assert 0 < child.wait(60) < 128


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    whole = {name: value for name, value in os.environ.items() if name != "MMDP_TRACEBACK"} | environment
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=120, check=False)


def test_help_explains_every_flag(capsys):
    """The help of a flag is the line of its field in the docstring of `Config`."""
    with pytest.raises(SystemExit):
        parse_flags("index", stage="what the stage does", args=["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "what the stage does" in text
    for name in (*COMMON, "index"):
        assert f"--{name.replace('_', '-')}" in text
    assert "show this sample; None for one by seed." in text
    assert "between them double, from 0.1 s to at most 15 s, so that the default outlasts an outage of 50 s." in text


def test_what_a_message_of_reading_names_is_a_flag_of_every_stage():
    """Law 4: a remedy that the stages do not take would be none."""
    code = "".join(path.read_text() for path in Path(mmdp.__file__).parent.glob("*.py"))
    named = {*re.findall(r"\bConfig\.([a-z_]+)\b", code)} & {field.name for field in fields(Config)}
    assert {"fetch_retries", "read_seconds", "http_hosts"} <= named
    assert named - {"max_pixels"} <= {*COMMON}  # that one is of an encoder


def test_a_line_of_one_is_in_the_singular():
    """One sample is no samples."""
    assert report_line("x", Tally(samples=1, rows=1, tokens=2000, images=1).as_dict()).startswith(
        "[x] 1 sample | 1 row | 2,000 tokens | 1 image | padding 0.0%"
    )


def test_a_tally_keeps_the_first_thousand_that_failed():
    """With their reasons, for messages; all are counted."""
    tally = Tally()
    for start in range(0, 1500, 500):
        failed = dict.fromkeys(range(start, start + 500), Reason.DAMAGED_IMAGE)
        tally.add(batch([row(3, 0, skipped=failed)], pad_id=0))
    assert [*range(1000)] == [*tally.failed]
    assert {"damaged_image": 1500} == tally.as_dict()["skipped"]


def test_a_tally_adds_up_batches():
    """Samples, rows, tokens and padding add up; what was skipped is counted by reason."""
    tally = Tally()
    made = [
        batch([row(3, 0), row(5, 1)], pad_id=0),
        batch([row(4, 2, skipped={9: Reason.DAMAGED_IMAGE}), row(9, 3)], pad_id=0, length=8),
    ]
    assert made == list(tally.over(made))
    figures = tally.as_dict()
    assert {"samples": 3, "rows": 3, "tokens": 12, "padded_tokens": 6, "images": 0}.items() <= figures.items()
    assert 6 / 18 == figures["padding_share"]
    assert {"damaged_image": 1, "too_long": 1} == figures["skipped"]
    assert 0 <= figures["seconds"]
    assert made[0].label_tokens == int((made[0].labels != IGNORE).sum())


def test_a_report_has_the_same_keys_in_every_stage(tmp_path, capsys):
    """The line is printed, the file holds the keys of all stages, and what this one adds."""
    config = Config(report=tmp_path / "deep" / "r.json")
    report("07 test", Tally(samples=2, rows=2, tokens=30, padded_tokens=10, seconds=0.5), config, "so it is", extra=7)
    assert (
        "[07 test] 2 samples | 2 rows | 30 tokens | 0 images | padding 25.0% | skipped 0 | 4 samples/s | so it is\n"
        == (capsys.readouterr().out)
    )
    saved = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert {*KEYS, "samples_per_second", "extra", "messages"} == set(saved)
    assert (7, 4.0) == (saved["extra"], saved["samples_per_second"])


def test_the_line_leaves_out_what_a_stage_has_not():
    """None is left out; skipped samples stand with their reasons."""
    figures = {**Tally(samples=5, tokens=9).as_dict(), "rows": None, "padding_share": None}
    figures["skipped"] = {"too_long": 3}
    assert "[01] 5 samples | 9 tokens | 0 images | skipped 3 (too_long 3)" == report_line("01", figures)


def test_one_message_for_each_reason(capsys):
    """The first of each kind by index, and how many more there are, the most frequent kind first."""
    reasons = {3: Reason.MISSING_IMAGE, 1: Reason.TOO_LONG, 2: Reason.MISSING_IMAGE}
    print_messages({3: "c", 1: "a", 2: "b"}, reasons)
    assert "    left out, the first of 2 for this reason: b\n    left out: a\n" == capsys.readouterr().out
