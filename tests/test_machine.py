"""What is said of the machine."""

import os

from mmdp.machine import num_processors, tell_load


def test_a_busy_machine_is_told_and_a_free_one_is_not(monkeypatch, capsys):
    """What a stage times depends on it."""
    monkeypatch.setattr(os, "getloadavg", lambda: (num_processors(), 0.0, 0.0))
    tell_load()
    assert "" == capsys.readouterr().out
    monkeypatch.setattr(os, "getloadavg", lambda: (3 * num_processors(), 0.0, 0.0))
    tell_load()
    assert f"{3 * num_processors()} programs want its {num_processors()} processors" in capsys.readouterr().out
