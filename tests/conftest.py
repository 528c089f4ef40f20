"""What tests share: the handed inputs, where they are present, and a cache of their own.

`MMDP_SHARED` names the folder with real data, tokenizers and cases; it defaults to `shared` beside the checkout.
A test that needs it skips with a clear reason where it is absent.
"""

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

pytest.register_assert_rewrite("executor_laws")

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of handed inputs; skips where it is absent."""
    if not (SHARED / "cases").is_dir():
        pytest.skip(
            f"no handed inputs at {SHARED}: set MMDP_SHARED to the folder that holds data/, tokenizers/, cases/"
        )
    return SHARED


@pytest.fixture(scope="session")
def case_script(shared: Path):
    """Imports a script of `shared/cases` by name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"cases_{name}", shared / "cases" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


def pytest_xdist_auto_num_workers() -> int:
    """As many processes as this one may use processors, and no more than there are long files."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 6)


LONGEST = ("ray", "test_loader_resume", "test_stages", "test_executors", "test_stream_loader", "train")
"""What runs longest starts first, so that no process is left alone with it at the end."""


def group(nodeid: str) -> str:
    """What goes to one process: a file, since its tests share what their module made, and all that share one Ray.

    So do those that train: their fork server takes long to start.
    """
    stem = Path(nodeid.partition("::")[0]).stem
    return next((word for word in ("ray", "train") if word in stem), stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first; else in the order in which they were found."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(group(item.nodeid), len(rank)))


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Group by group. `--dist loadgroup` would do, but has no effect in xdist 3.8 with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str):
    """Tests never touch the user's cache; they share one of their own for the session, over all processes of xdist."""
    if worker_id == "master":
        folder = tmp_path_factory.mktemp("cache")
    else:
        folder = tmp_path_factory.getbasetemp().parent / "cache"
        folder.mkdir(exist_ok=True)
    before = os.environ.get("MMDP_CACHE")
    os.environ["MMDP_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["MMDP_CACHE"]
    else:
        os.environ["MMDP_CACHE"] = before


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes in one thread: tiny models and images gain nothing from more, and on busy cores threads wait."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray for all tests: eight CPUs in name, 256 MB of object store. `RAY_ADDRESS` names another one to use."""
    from mmdp.ray_start import Session

    session = Session(num_cpus=8, store_bytes=256 * 2**20)
    yield session
    session.close()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A small data set, its encoder and its plan: what a loader is made of."""
    from runs import make_parts

    return make_parts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def kept():
    """Two processes for many tests of a loader."""
    from runs import forkserver

    from mmdp.executors import Processes

    forkserver()
    with Processes(2, "forkserver") as processes:
        yield processes


@pytest.fixture(params=["inline", "threads", "processes"])
def any_executor(request, kept):
    """Each executor that needs nothing but this machine."""
    from mmdp.executors import Inline, Threads

    return {"inline": Inline(), "threads": Threads(2), "processes": kept}[request.param]


@pytest.fixture
def heard(tmp_path, monkeypatch) -> tuple[Path, list[str]]:
    """A file that is there once this process warns of something that waits; and what it warned of."""
    file, texts = tmp_path / "heard", []

    def show(message, category, *where, **more):
        texts.append(f"{category.__name__}: {message}")
        if "waits" in str(message):
            file.touch()

    monkeypatch.setattr(warnings, "showwarning", show)
    warnings.simplefilter("always")
    return file, texts
