"""Laws of `track`: every item comes, and without a terminal a line says how many of what are done."""

from mmdp import progress


def test_a_line_says_how_many_of_what(monkeypatch, capsys):
    """With the unit, where there is one; never more than the job has."""
    monkeypatch.setattr(progress, "_EVERY", -1)
    assert [4, 5] == list(progress.track([4, 5], "serial", unit="steps"))
    assert [
        "serial: 0 of 2 steps",
        "serial: 1 of 2 steps",
        "serial: all 2 steps",
    ] == capsys.readouterr().err.splitlines()
    assert ["ab", "c"] == list(progress.track(["ab", "c"], "reading", size=len))
    assert ["reading: 0 of 3", "reading: 2 of 3", "reading: all 3"] == capsys.readouterr().err.splitlines()


def test_a_short_job_says_nothing(capsys):
    """Nobody waits long enough to wonder."""
    assert [1, 2] == list(progress.track([1, 2], "serial", unit="steps"))
    assert "" == capsys.readouterr().err
