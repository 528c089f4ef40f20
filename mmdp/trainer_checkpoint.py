"""What a checkpoint of transformers.Trainer says of the loader, and its weights where their names have changed.

Adds: `LoaderProgress`, the callback by which the loader's state gets into it; `loader_state`, which reads it;
`last_whole`, the last checkpoint of a folder that was written to its end; `load_misnamed`, for its weights.
Leaves out: the training (`trainer.py`).

The state is that of the last batch trained on. It stands in `trainer_state.json`, the last file that Trainer writes
into a checkpoint. So no checkpoint has half of it, and one that a kill has cut short is known by its lack of that file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

_log = logging.getLogger(__name__)


class LoaderProgress(TrainerCallback, ExportableState):
    """Keeps the loader's state of the last batch trained on, which Trainer writes into each checkpoint.

    Args:
        micro_steps: batches of an epoch; None where the loader has no length.
        accumulation: batches of a step.
    """

    def __init__(self, micro_steps: int | None = None, accumulation: int = 1) -> None:
        self.micro_steps = micro_steps
        self.accumulation = accumulation
        self.loader_state: dict[str, Any] | None = None

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Nothing is trained on yet."""
        self.loader_state = train_dataloader.dataset.state

    def on_step_end(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """All batches handed out have had their part in an optimiser step."""
        self.loader_state = train_dataloader.dataset.state

    def state(self) -> dict[str, Any]:
        """As Trainer wants it."""
        told = {"micro_steps": self.micro_steps, "accumulation": self.accumulation}
        return {"args": told, "attributes": {"loader_state": self.loader_state}}


def loader_state(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint of a packed trainer says of the loader: for `load_state_dict`, in a loop of your own.

    Raises:
        ValueError: another trainer wrote it.
    """
    return dict(loader_progress(checkpoint)["loader_state"])


def loader_progress(checkpoint: str | Path) -> dict[str, Any]:
    """All that a checkpoint of a packed trainer says of the loader: `loader_state`, `micro_steps`, `accumulation`.

    Raises:
        ValueError: another trainer wrote it.
    """
    saved = trainer_state(checkpoint).get("stateful_callbacks", {}).get(LoaderProgress.__name__)
    state = saved["attributes"]["loader_state"] if saved else None
    if state is None:
        raise ValueError(
            f"the checkpoint {checkpoint} tells no state of a loader: resume from one that a packed trainer wrote, or "
            "start anew from its weights"
        )
    return {**saved["args"], "loader_state": dict(state)}


def trainer_state(checkpoint: str | Path) -> dict[str, Any]:
    """All that Trainer notes of its own state.

    Raises:
        ValueError: a checkpoint that was not written to its end.
    """
    path = Path(checkpoint, "trainer_state.json")
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{checkpoint} is no whole checkpoint: {error}. Resume from another one") from error
    return state


def last_whole(folder: str | None) -> str:
    """The last checkpoint of a folder that Trainer has written to its end; says which ones it passes over.

    Raises:
        ValueError: there is none.
    """
    found = [path for path in Path(folder or ".").glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for path in sorted(found, key=lambda path: -int(path.name.split("-")[1])):
        try:
            trainer_state(path)
        except ValueError as error:
            _log.warning("passed over: %s", error)
        else:
            return str(path)
    raise ValueError(f"there is no whole checkpoint in {folder}: train without one first")


def load_misnamed(model: Any, folder: str, names: Sequence[str]) -> None:
    """The weights of a checkpoint, by the names that its model was saved with.

    Args:
        model: gets them.
        folder: the checkpoint.
        names: of weights that did not fit as they are called there.

    Raises:
        ValueError: they are those of another model.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"the checkpoint {folder} holds other weights than the model, {len(names)} such as {names[0]}: resume with "
            "the model that was saved"
        )
    loaded: Any = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    saved, told = loaded
    if lacking := [*told["missing_keys"], *told["mismatched_keys"]]:
        raise ValueError(
            f"the checkpoint {folder} lacks {len(lacking)} weights of the model, such as {lacking[0]}: resume with the "
            "model that was saved"
        )
    model.load_state_dict(saved.state_dict())
