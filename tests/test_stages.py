"""Every stage, run as a person runs it: the line it prints, the report it writes, the figures it draws."""

import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import nbformat
import numpy as np
import pytest
from PIL import Image
from small import write_data

import mmdp

REAL = "data/real-vqa/train"
ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    "samples",
    "rows",
    "tokens",
    "images",
    "padded_tokens",
    "filler_rows",
    "padding_share",
    "skipped",
    "seconds",
    "samples_per_second",
}
FIGURES_05 = ["05_two_budgets", "05_padding_strip", "05_sight", "05_row_map"]
LINE = re.compile(r"^\[\d\d \w+( \w+)*\] [\d,]+ samples?( \| .+)+$", re.MULTILINE)


def run(stage: str, folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """Runs a stage in a folder and a process of its own; the session's cache is in the environment."""
    command = [sys.executable, str(ROOT / stage), "--figures", str(folder), *map(str, flags)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, env=dict(os.environ))
    assert 0 == done.returncode, done.stderr
    return done


def run_here(stage: str, folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch loaded already."""
    out, error = io.StringIO(), io.StringIO()
    arguments = [stage, "--figures", str(folder), *map(str, flags)]
    with mock.patch.object(sys, "argv", arguments), redirect_stdout(out), redirect_stderr(error):
        runpy.run_path(str(ROOT / stage), run_name="__main__")
    return subprocess.CompletedProcess(arguments, 0, out.getvalue(), error.getvalue())


def judged(stage: str, folder: Path, figures: list[str], *flags: object, runs=run_here) -> dict:
    """Runs a stage and checks what holds for all of them; gives back its report, and under `printed` what it said."""
    report = folder / "report.json"
    done = runs(stage, folder, "--report", report, *flags)
    assert 1 == len(LINE.findall(done.stdout)), done.stdout
    assert "Warning" not in done.stderr, done.stderr
    drawn = [folder / f"{name}.png" for name in figures]
    assert sorted(drawn) == sorted(folder.glob("*.png"))
    for path in drawn:
        assert str(path) in done.stdout
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert min(pixels.shape[:2]) >= 200
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5
    found = json.loads(report.read_text())
    assert found.keys() >= KEYS
    if found["padding_share"] is not None:
        assert found["padded_tokens"] / (found["padded_tokens"] + found["tokens"]) == pytest.approx(
            found["padding_share"]
        )
        emptied = len(found["messages"])  # at most: rows of one sample that failed while it was built
        assert found["samples"] + emptied >= found["rows"] > 0
    if found["seconds"] is not None:
        assert found["samples"] / found["seconds"] == pytest.approx(found["samples_per_second"])
    return found | {"printed": done.stdout}


@pytest.fixture(scope="module")
def demo_reports(tmp_path_factory) -> dict[str, dict]:
    """The report of each stage on the demo set, at its defaults (05 trains 2 steps), run as a person runs it."""
    figures = {
        "01_check_dataset.py": ["01_card", "01_histograms", "01_lengths"],
        "02_naive_pad_dataloader.py": ["02_row_map"],
        "03_constrained_pad.py": ["03_lost_sample", "03_row_map"],
        "04_knapsack.py": ["04_toy_greedy", "04_toy_ffd", "04_fill", "04_row_map"],
        "05_multimodal_knapsack.py": FIGURES_05,
    }
    reports = {}
    for stage, names in figures.items():
        flags, runs = (("--train", 2), run) if stage.startswith("05") else ((), run_here)
        reports[stage] = judged(stage, tmp_path_factory.mktemp(stage[:2]), names, *flags, runs=runs)
    return reports


def test_stages_report_the_same_data(demo_reports):
    """Law 1: all stages see the same samples; what one leaves out it counts."""
    look, naive, constrained, planned, packed = demo_reports.values()
    assert 500 == look["samples"] == naive["samples"] == constrained["samples"] + constrained["skipped"]["too_long"]
    assert (look["tokens"], look["images"]) == (naive["tokens"], naive["images"])
    assert {} == look["skipped"] == naive["skipped"]
    assert constrained["skipped"]["too_long"] == constrained["dropped"]
    assert constrained["tokens"] < naive["tokens"]
    assert look["median_tokens"] < look["longest_tokens"]
    assert 700 < look["longest_tokens"]
    for report in (planned, packed):
        assert {key: look[key] for key in ("samples", "tokens", "images", "skipped")}.items() <= report.items()
    assert (500, 399) == (naive["rows"], constrained["rows"])


def test_padding_shrinks_from_stage_to_stage(demo_reports):
    """On the demo set at the defaults 02 > 03 > 05, and 03 at 1024 tokens would waste more than 02."""
    _, naive, constrained, planned, packed = demo_reports.values()
    assert constrained["padding_share"] > packed["padding_share"]
    assert 0.02 > packed["padding_share"]
    assert 0.02 > planned["padding_share"]
    assert {"02 naive": naive["padding_share"], "03 constrained": constrained["padding_share"]}.items() <= (
        packed["padding_shares"].items()
    )
    assert constrained["padding_share_at_1024"] > naive["padding_share"] > constrained["padding_share"]
    assert constrained["rows"] * constrained["length"] == constrained["tokens"] + constrained["padded_tokens"]


def test_the_readme_has_these_numbers(demo_reports):
    """The shares in the table of stages are the ones just measured."""
    look, naive, constrained, planned, packed = demo_reports.values()
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| [`0")]
    wanted = {
        "01_check": [f"median {look['median_tokens']}, longest {look['longest_tokens']}"],
        "02_naive": [f"{naive['padding_share']:.1%}"],
        "03_constrained": [f"{constrained['padding_share']:.1%}", f"{constrained['dropped'] / 500:.1%}"],
        "04_knapsack": [f"{planned['rows_by_strategy'][name]} rows" for name in ("greedy", "ffd", "knapsack")]
        + [f"bound of {planned['lower_bound']}"],
        "05_multimodal": [f"{packed['padding_share']:.1%}", f"{packed['images_per_row']:.1f} images a row"],
    }
    for stage, numbers in wanted.items():
        (line,) = (line for line in table if stage in line)
        assert all(number in line for number in numbers), (line, numbers)


def test_the_readme_has_the_numbers_of_one_run_of_stage_06():
    """Those of the committed notebook: in the table of stages, and in that of the rungs."""
    notebook = nbformat.read(ROOT / "notebooks" / "06_ray_pipeline.ipynb", as_version=4)
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    said = re.findall(r"^(\w+): waits ([\d.]+)%, ([\d.]+) samples/s$", printed, re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert ["serial", "concurrent", "prefetch", "references", "spread", "near"] == [name for name, *_ in said]
    waits, rates = ([one[at] for one in said] for at in (1, 2))
    assert f"waits for {float(waits[0]):.0f} %, then {float(waits[1]):.0f} %, then {waits[2]} % of the time" in readme
    assert f"from the second step on | {' % | '.join(waits)} % |" in readme
    rates_line = next(line for line in readme.splitlines() if line.startswith("| samples/s, of at most"))
    assert rates_line.endswith(f"| {' | '.join(rates)} |")
    predicted = re.findall(r"predicted by \w+: ([\d.]+) samples/s", printed)
    assert f"as a rung below predicted | | {' | '.join(predicted)} |" in readme
    coordinators = next(line for line in readme.splitlines() if line.startswith("| processor time of the coordinator"))
    a_row = [int(each) / 8 for each in re.findall(r"(\d+) ms", coordinators)]  # a step is 8 rows
    said_too = f"stage 06 shows {min(a_row):.1f} to {max(a_row):.1f} ms"
    assert said_too in (ROOT / "docs" / "measured.md").read_text()


def test_the_toy_of_the_blog_has_its_numbers(demo_reports, tmp_path):
    """04a: 1 to 24 into 100 takes greedy 4 rows and bin packing 3; 04b: each sample once, no thread left."""
    printed = run_here("04_knapsack.py", tmp_path, "--samples", 50).stdout
    assert "greedy: 4 rows (lower bound 3)" in printed
    assert "bin packing: 3 rows (lower bound 3)" in printed
    assert "each of 24 samples once: True; stopped after one row: 0 threads left" in printed


def test_the_packers_keep_their_order(demo_reports):
    """04c: next-fit is the worst, the knapsack the best, and nobody goes below the bound."""
    planned = demo_reports["04_knapsack.py"]
    rows = planned["rows_by_strategy"]
    assert rows["greedy"] > rows["ffd"] >= rows["knapsack"] >= planned["lower_bound"]


def test_packed_rows_of_real_data(shared, tmp_path):
    """Stage 05 on 565 real rows: under 2 % padding at 1024 tokens, every sample delivered or counted."""
    flags = ("--data", shared / f"{REAL}.jsonl", "--tokenizer", shared / "tokenizers" / "smollm2", "--train", 0)
    with pytest.warns(UserWarning, match="fit no row"):
        report = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, *flags)
    assert 565 == report["samples"] + sum(report["skipped"].values())
    assert {"too_long"} == set(report["skipped"])
    assert 0.02 > report["padding_share"]
    assert report["rows"] <= 1.01 * report["lower_bound"]
    assert {} == report["training"]


def test_packed_rows_train(demo_reports):
    """05c: a fresh model starts at a blind guess, ln(vocabulary), and learns; its samples do not see each other."""
    packed = demo_reports["05_multimodal_knapsack.py"]
    training = packed["training"]
    vocabulary = len(mmdp.Encoder().tokenizer)
    assert 2 == len(training["losses"]) == training["steps"]
    assert math.log(vocabulary) == pytest.approx(training["losses"][0], abs=0.3)
    assert training["losses"][1] < training["losses"][0]
    assert 0 <= training["wait_ratio"] <= 1
    assert 0 < training["trained_samples_per_second"]
    assert 1e-4 > training["isolation_error"]
    assert 0.01 < training["mistaken_error"]
    assert not training["perfect"]
    printed = packed["printed"]
    assert ["1", "2"] == re.findall(
        r"^    step +(\d+) \| loss \d+\.\d{3} \| [\d,]+ label tokens$", printed, re.MULTILINE
    )
    assert f"wait ratio {training['wait_ratio']:.1%} on {training['device']}, fed by the loader" in printed
    assert "packed samples are the same as alone" in printed
    assert f"with positions that restart below a mask of ones it would be {training['mistaken_error']:.2g}" in printed


@pytest.mark.usefixtures("one_thread")
def test_training_on_a_perfect_loader(tmp_path):
    """`--perfect` replays a few batches, and says so."""
    flags = ("--samples", 24, "--train", 6, "--batch-size", 2, "--perfect")
    report = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, *flags)
    losses, printed = report["training"]["losses"], report["printed"]
    assert 6 == len(losses)
    assert losses[-1] < losses[0]
    assert report["training"]["perfect"]
    assert "fed by the same batches over and over" in printed


def test_damaged_images_cost_no_report(tmp_path):
    """05c: of the first row one sample is left when it is built; samples are kept apart in another row."""
    path = write_data(tmp_path / "data", (1,), repeat=12)
    sizes = mmdp.measure(mmdp.open_source(path), mmdp.Encoder())
    rows = [row.tolist() for row in mmdp.plan(sizes, mmdp.Budget(300, 3)).epoch(0)]
    first = next(row for row in rows if len(row) > 1)
    for sample in first[1:]:
        image = path.parent / f"{sample}-0.png"
        image.write_bytes(image.read_bytes()[:-40])
    flags = ("--data", path, "--max-tokens", 300, "--max-images", 3, "--train", 1)
    report = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, *flags)
    assert {"damaged_image": len(first) - 1} == report["skipped"]
    assert all("damaged_image" in text for text in report["messages"].values())
    assert sorted(map(int, report["messages"])) == sorted(first[1:])
    assert 1e-4 > report["training"]["isolation_error"]


@pytest.mark.parametrize(
    ("stage", "figures"),
    [("02_naive_pad_dataloader.py", ["02_row_map"]), ("03_constrained_pad.py", ["03_row_map"])],
)
def test_a_sample_that_fails_while_its_row_is_built_is_named(stage, figures, tmp_path):
    """Law 4: a file that is cut behind its header, and one that went away since it was measured: with file and line."""
    path = write_data(tmp_path / "data", (1,), repeat=12)
    source = mmdp.open_source(path)
    mmdp.measure(source, mmdp.Encoder())
    cut = path.parent / "3-0.png"
    cut.write_bytes(cut.read_bytes()[:-40])
    (path.parent / "5-0.png").unlink()
    report = judged(stage, tmp_path, figures, "--data", path)
    assert {"damaged_image": 1, "missing_image": 1} == report["skipped"]
    assert {"3", "5"} == report["messages"].keys()
    for line, reason in ((4, "damaged_image"), (6, "missing_image")):
        assert re.search(rf"left out: \S*rows.jsonl:{line} .*field images\[0\] .*{reason}", report["printed"])


def test_stages_are_compared_over_the_same_samples(tmp_path):
    """05: what fails while rows are built is in no stage's share, though the others there read no pixel."""
    path = write_data(tmp_path / "data", (1,), repeat=12)
    cut = path.parent / "3-0.png"
    cut.write_bytes(cut.read_bytes()[:-40])
    printed = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, "--data", path, "--train", 1)["printed"]
    assert ["11", "11", "11"] == re.findall(r"0[235] \w+: padding +[\d.]+%, (\d+) samples", printed)


def test_no_model_takes_these_images(tmp_path):
    """50 tokens make no square: the stage says that it leaves training out, and why, and goes on."""
    flags = ("--samples", 12, "--train", 1, "--vision", "fixed:50")
    report = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, *flags)
    assert {} == report["training"]
    assert "no training: fixed: 50 tokens for 256 x 256 pixels make no square grid" in report["printed"]


def test_figures_have_the_same_bytes_on_a_rerun(demo_reports, tmp_path):
    """Figures of one seed can be compared by eye and by `cmp`; another seed draws another batch."""
    flags = ("--samples", 60)
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        run_here("02_naive_pad_dataloader.py", tmp_path / folder, *flags, "--seed", seed)
    a, b, c = ((tmp_path / folder / "02_row_map.png").read_bytes() for folder in "abc")
    assert a == b != c


def test_filler_rows_are_said(tmp_path):
    """A batch that few samples fill says how many of its rows only complete it."""
    report = judged("05_multimodal_knapsack.py", tmp_path, FIGURES_05, "--samples", 16, "--train", 0)
    assert report["filler_rows"] == 8 - report["rows"] > 0
    assert f"{report['filler_rows']} of 8 rows of this batch are filler" in report["printed"]


def test_a_ray_that_does_not_start_costs_no_rung_that_was_climbed(tmp_path, capsys):
    """Stage 06: the table and the figures of the serial rung are there, and then comes the reason."""
    flags = ("--steps", 5, "--train-ms", 1, "--latency-ms", 0, "--samples", 40, "--batch-size", 2)
    arguments = ["06", "--figures", str(tmp_path), *map(str, flags)]
    failing = mock.Mock(side_effect=RuntimeError("Ray can't be started"))
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch("mmdp.ray_start.Session", failing),
        pytest.raises(RuntimeError, match="Ray can't be started"),
    ):
        runpy.run_path(str(ROOT / "06_ray_pipeline.py"), run_name="__main__")
    said = capsys.readouterr()
    assert 1 == failing.call_count
    assert "concurrent: failed, and so the ladder ends here" in said.err
    assert "ignores ranges" not in said.err
    assert "Ray's shared memory" in said.out
    assert 1 == len(LINE.findall(said.out)), said.out
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert {"06_saw_tooth", "06_serial", "06_flame", "06_row_map"} == names


def test_a_card_by_index_or_by_chance(demo_reports, tmp_path):
    """`--index` shows that sample, `--seed` always the same one, and neither another one in each run."""
    flags = ("--samples", 40, "--report", tmp_path / "r.json")

    def shown(*more: object) -> int:
        run_here("01_check_dataset.py", tmp_path, *flags, *more)
        return json.loads((tmp_path / "r.json").read_text())["index"]

    assert 7 == shown("--index", 7)
    assert shown("--seed", 5) == shown("--seed", 5)


def test_unknown_flags_and_data_are_named(tmp_path, capsys):
    """What a user gave and can not be used is in the message."""
    with pytest.raises(SystemExit):
        run_here("02_naive_pad_dataloader.py", tmp_path, "--data", "demo", "--nope", 1)
    with pytest.raises(SystemExit):
        run_here("04_knapsack.py", tmp_path, "--max-images", 2)  # there it would change nothing
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        run_here("02_naive_pad_dataloader.py", tmp_path, "--data", "nowhere.jsonl")


@pytest.mark.parametrize(
    ("data", "tokenizer", "vision", "samples", "images"),
    [
        (f"{REAL}.jsonl", "smollm2", "fixed:64", 565, 720),
        (f"{REAL}.parquet", "smollm2", "fixed:64", 203, None),
        (f"{REAL}.jsonl", "qwen", "qwen3_vl", 565, 720),
    ],
)
def test_real_data_and_tokenizers(shared, tmp_path, data, tokenizer, vision, samples, images):
    """565 real rows: every one is delivered, with all its images, whatever the reader and the vision family."""
    flags = ("--data", shared / data, "--tokenizer", shared / "tokenizers" / tokenizer, "--vision", vision)
    report = judged("02_naive_pad_dataloader.py", tmp_path, ["02_row_map"], *flags)
    assert (samples, {}) == (report["samples"], report["skipped"])
    if images is not None:
        assert images == report["images"]
    assert 0.5 < report["padding_share"] < 0.9  # naive padding of these rows is known to waste 65 to 72 %
