"""What tests share: the handed inputs, where they are present, and a cache of their own.

`MMDP_SHARED` names the folder with real data, tokenizers and cases; it defaults to `shared` beside the checkout.
A test that needs it skips with a clear reason where it is absent.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Tests never touch the user's cache; they share one of their own for the session."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("MMDP_CACHE")
    os.environ["MMDP_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["MMDP_CACHE"]
    else:
        os.environ["MMDP_CACHE"] = before
