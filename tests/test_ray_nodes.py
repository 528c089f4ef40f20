"""Laws of placement and of a node that is lost, on two Ray nodes of this machine, in a program of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "ray_nodes.py"


@pytest.fixture(scope="module")
def found() -> dict:
    """What the script prints."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=170, env=environment)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_actors_are_where_they_are_wanted(found):
    """RAY-07: `spread` is within one of even, and what came of it is told."""
    assert [1, 1] == found["spread"]


def test_ranks_on_two_nodes_get_the_batches_of_a_loader_from_beside_them(found):
    """`near`: each rank's node has its workers, and each rank its own batches, in their order."""
    near = found["near"]
    assert near["nodes"]
    assert near["same"]
    assert 4 <= near["steps"]
    assert [1, 1] == near["workers"]
    assert ("near", "") == (near["placement"], near["reason"])


def test_auto_measures_and_says_why(found):
    """One machine has no slow link: the simplest has room, and the reason holds the numbers."""
    auto = found["auto"]
    assert auto["same"]
    assert "together" == auto["placement"]
    assert "2 ranks want 8 rows a second" in auto["reason"]
    assert "MB/s: together, since it is the simplest with room" in auto["reason"]


def test_a_node_that_is_lost_costs_no_result(found):
    """Law 11, RAY-08: actors and results that were on it are made again; all come, in order, each once."""
    assert list(range(40)) == found["results"]
