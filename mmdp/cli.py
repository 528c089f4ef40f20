"""The flags of a stage, its report, and its figures.

Adds: `parse_flags`, which gives a stage the few knobs of `Config` it lists; `report`, the one line every stage prints
and the JSON file it may write; `show`, which saves a figure and displays it in a notebook; `keep`, the same for a text;
`speak_plainly`, for errors that a user can mend.
Leaves out: what is counted (`metrics.py`) and drawn (`plots`).
"""

from __future__ import annotations

import atexit
import builtins
import inspect
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from operator import getitem
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from mmdp.config import Config
from mmdp.metrics import Tally, report_line
from mmdp.refusals import DataError, Reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READING = (
    *("max_row_bytes", "http_hosts"),
    *("max_fetches", "connect_seconds", "read_seconds", "fetch_seconds", "fetch_retries"),
)
"""Whatever a message about reading tells people to raise."""

COMMON = (
    *("data", "image_folder", "tokenizer", "vision", "chat_template"),
    *READING,
    *("seed", "samples", "strict", "figures", "report"),
)
"""Knobs that every stage has."""

_interrupted = threading.Event()

_SHORT = {"trainer": "train"}
"""A second flag for a knob, where the stage has no knob of that name: `--train tiny`."""


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    return "ipykernel" in sys.modules and hasattr(builtins, "__IPYTHON__")


def parse_flags(
    *names: str, stage: str, args: Sequence[str] | None = None, common: Sequence[str] = COMMON, **defaults: Any
) -> Config:
    """The `Config` of a stage from its command line.

    Args:
        names: fields of `Config` this stage offers besides the common ones.
        stage: what the help says the stage does.
        args: instead of the command line.
        common: what every stage offers.
        defaults: where the stage's default differs from the field's own.

    Returns:
        The knobs; in a notebook kernel the defaults.

    Raises:
        SystemExit: an unknown flag, or a value out of range; the reason is on standard error.
    """
    if args is None:
        if in_notebook():
            return Config(**defaults)
        speak_plainly()
    import tyro

    offered = [*common, *names]
    hints, documented = get_type_hints(Config), _attribute_docs()
    columns: list[tuple[str, Any, Any]] = []
    for column in fields(Config):
        if column.name in offered:
            short = [flag for knob, flag in _SHORT.items() if knob == column.name and flag not in offered]
            flag = tyro.conf.arg(help=documented[column.name], aliases=[f"--{name}" for name in short])
            hint = getitem(Annotated, (hints[column.name], flag))
            columns.append((column.name, hint, defaults.get(column.name, column.default)))
    flags: Any = make_dataclass("Flags", columns, frozen=True)
    given = tyro.cli(flags, args=args, description=stage)
    try:
        return Config(**{**defaults, **{name: getattr(given, name) for name, *_ in columns}})
    except ValueError as error:
        raise SystemExit(f"error: --{str(error).replace('_', '-', 1)}") from error


def speak_plainly() -> None:
    """From now on a warning, and an error that mmdp raises for what a user gave, is its message alone.

    With `MMDP_TRACEBACK=1` in the environment they are shown as Python does. Errors from elsewhere always are.
    """
    if os.environ.get("MMDP_TRACEBACK"):
        return
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.excepthook = _explain
    atexit.unregister(_end_as_interrupted)
    atexit.register(_end_as_interrupted)  # before all that a stage starts, so that it runs after the end of that


def _end_as_interrupted() -> None:
    """Ends a program that Ctrl-C ended as a shell expects it, by that signal: 130.

    Python does so itself, but forgets it where a library, such as Ray, runs code by its C interface meanwhile.
    """
    if _interrupted.is_set():
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _explain(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(where)][-1:]
    ours = raised_in and raised_in[0].partition(".")[0] == "mmdp"
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        _interrupted.set()
    elif issubclass(kind, BrokenPipeError):  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is flushed at the end goes nowhere
    elif ours and (kind is RuntimeError or issubclass(kind, (ValueError, OSError, ImportError, DataError))):
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}\n  (MMDP_TRACEBACK=1 shows where)", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, where)


def report(
    stage: str,
    figures: Tally | Mapping[str, Any],
    config: Config,
    say: str = "",
    messages: Mapping[int, str] | None = None,
    reasons: Mapping[int, Reason] | None = None,
    **more: Any,
) -> None:
    """Prints the line of a stage, and writes its figures to `config.report` where that is given.

    Args:
        stage: its number and name, such as "02 naive padding".
        figures: the keys every stage has.
        config: for the path of the report.
        say: the number that this stage moves, for the end of the line.
        messages: of samples that were left out; one for each reason is printed below the line, all are in the report.
        reasons: of these samples.
        more: what this stage adds to the report.
    """
    whole = {**(figures.as_dict() if isinstance(figures, Tally) else figures), **more}
    print(report_line(stage, whole, say))
    print_messages(messages or {}, reasons or {})
    if config.report is not None:
        config.report.parent.mkdir(parents=True, exist_ok=True)
        config.report.write_text(json.dumps({**whole, "messages": messages or {}}, indent=1) + "\n")


def print_messages(messages: Mapping[int, str], reasons: Mapping[int, Reason]) -> None:
    """Of the messages about samples that were left out the first for each reason, and how many more there are."""
    by_reason: dict[Reason, list[str]] = {}
    for index in sorted(messages):
        by_reason.setdefault(reasons[index], []).append(messages[index])
    for texts in sorted(by_reason.values(), key=len, reverse=True):
        more = f", the first of {len(texts):,} for this reason" if len(texts) > 1 else ""
        print(f"    left out{more}: {texts[0]}")


def show(figure: Figure, name: str, config: Config) -> None:
    """Saves a figure as `NAME.png` below `config.figures`, says where, and displays it in a notebook."""
    from mmdp.plots import save

    path = save(figure, config.figures / f"{name}.png")
    if in_notebook():
        from IPython import display

        display.display(display.Image(filename=str(path)))  # type: ignore[no-untyped-call]
    else:
        print(f"    figure: {path}")


def keep(text: str, name: str, config: Config) -> None:
    """Prints a text, and keeps it as `NAME.txt` below `config.figures`, to be sent to somebody."""
    path = config.figures / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(text if in_notebook() else f"\n{text}\n    text: {path}")


def _attribute_docs() -> dict[str, str]:
    """Field name to its text in the docstring of `Config`: one source of truth for code and `--help`."""
    section = inspect.cleandoc((Config.__doc__ or "").partition("Attributes:")[2].partition("\n\n")[0])
    found = re.findall(r"^(\w+): (.+(?:\n .+)*)$", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
