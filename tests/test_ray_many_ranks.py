"""docs/many_ranks.md: its program as it stands there, run twice, gives each rank what a Loader would."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import mmdp

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parent.parent
WORLD, STEPS = 2, 4


@pytest.mark.long  # eight processes that import torch, two after two
@pytest.mark.timeout(400)
def test_the_program_of_the_guide_resumes_where_it_stopped(ray_cluster, tmp_path):
    """Two ranks, one of them the coordinator's maker: the first run's batches, then those after them, for each."""
    text = (ROOT / "docs" / "many_ranks.md").read_text()
    (tmp_path / "many_ranks.py").write_text(text.split("```python\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    env = os.environ | {"RAY_ADDRESS": ray_cluster.address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    seen: list[list] = [[] for _ in range(WORLD)]
    for run in range(2):
        done = subprocess.run(
            [*command, "many_ranks.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150
        )
        assert 0 == done.returncode, done.stderr
        for line in done.stdout.splitlines():
            rank, samples = json.loads(line)
            seen[rank].append(samples)
        assert [(run + 1) * STEPS] * WORLD == [len(batches) for batches in seen]
    source = mmdp.open_source("demo")
    encoder = mmdp.Encoder(tokenizer="demo", vision="fixed:64")
    plan = mmdp.plan(mmdp.measure(source, encoder), mmdp.Budget(tokens=1024, images=9), seed=0)
    for rank in range(WORLD):
        loader = mmdp.Loader(source, encoder, plan, batch_size=2, rank=rank, world_size=WORLD, executor="inline")
        wanted = [list(map(list, batch.samples)) for batch in islice(loader, 2 * STEPS)]
        assert wanted == seen[rank]
