"""A trained model as a folder of its own, for scoring in one process: no run, no data source, no optimiser."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.config.schema import ManagedTable
from gem_core.ops.dispatch import cuda_arch, device_name
from gem_core.ops.slot import bind_kernels
from gem_core.plugins import host
from gem_core.spec import DataSchema, Precision, RequestError, SparseOptimizer, Task
from gem_core.train.checkpoint.saved import Saved
from gem_core.train.checkpoint.store import write_safetensors
from gem_core.train.ids.layout import with_rows
from gem_core.train.ids.managed import ManagedIds
from gem_core.train.step import forward
from gem_core.train.world import World

MODEL, WEIGHTS = "model.json", "weights.safetensors"
FORMAT = 1
_SCHEMA = TypeAdapter(DataSchema)


def schema_as_json(schema: DataSchema) -> dict[str, Any]:
    """A schema as plain values."""
    plain: dict[str, Any] = _SCHEMA.dump_python(schema, mode="json")
    return plain


def export_scorer(saved: Saved, folder: Path) -> None:
    """Write ``model.json`` and ``weights.safetensors``: averaged weights where the run kept them, and the tables without optimiser state.

    Raises:
        RequestError: the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"export to {folder}", "it exists and is not empty", "Choose another folder with --out DIR.")
    averaged = saved.names("dense/average/")
    names = {f"model/{name}": f"dense/{'average' if name in averaged else 'model'}/{name}" for name in saved.names("dense/model/")}
    names |= {name.removesuffix("/weight"): name for name in saved.index if name.startswith("tables/") and name.endswith("/weight")}
    shapes = {name: (saved.dtype(stored), saved.shape(stored)) for name, stored in names.items()}
    about = saved.about
    rules = about.get("ids", {})
    owned = {name: tensor for table in rules for name, tensor in _owned_ids(table, saved).items()}
    shapes |= {name: (tensor.dtype, tensor.shape) for name, tensor in owned.items()}
    shapes = dict(sorted(shapes.items(), key=lambda entry: -entry[1][0].itemsize))
    described = {"format": FORMAT, "step": about["step"], "schema": about["schema"], **{key: about["config"][key] for key in ("model", "precision")}}
    if rules:
        described["ids"] = rules
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, shapes, lambda name: owned[name] if name in owned else saved.tensor(names[name]))
    (folder / MODEL).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _owned_ids(table: str, saved: Saved) -> dict[str, Tensor]:
    """The ids of a managed table that own a row, and their rows."""
    if f"tables/{table}/id" not in saved.index:  # no id was ever seen
        return {f"ids/{table}/{name}": torch.zeros(0, dtype=torch.int64) for name in ("id", "row")}
    ids, rows = saved.tensor(f"tables/{table}/id"), saved.tensor(f"tables/{table}/id_row")
    return {f"ids/{table}/id": ids[rows > 0], f"ids/{table}/row": rows[rows > 0]}


class Scorer(nn.Module):
    """A model with its tables.

    Args:
        model: the dense part.
        embeddings: the tables.
        precision: the recipe it was trained with.
        schema: what batches must hold, and the tasks.
        ids: which ids of managed tables own a row; the others share one.
    """

    def __init__(self, model: nn.Module, embeddings: TorchEmbeddings, precision: Precision, schema: DataSchema, ids: ManagedIds) -> None:
        super().__init__()
        self._ids = ids
        self.model, self.embeddings, self.schema = model, embeddings, schema
        self._precision = precision

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.schema.tasks

    @torch.no_grad()
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """``{task: probability [rows]}``, float32; of a conditional task given that its condition is met.

        Raises:
            RequestError: an id has no row in its table.
        """
        device = next(self.embeddings.parameters()).device
        if self._ids.maps:
            batch = self._ids.rows_of(batch.to("cpu"))
        with self._precision.forward_context(device.type):
            logits = forward(self.model, self.embeddings, batch.to(device), self.tasks)
        return {name: torch.sigmoid(value) for name, value in logits.items()}


def load_scorer(folder: Path | str, device: torch.device | str = "cpu") -> Scorer:
    """The model that ``gem checkpoint export`` wrote, in evaluation mode.

    Raises:
        RequestError: the folder is no export, or the installed model has other weights.
        PluginError: the model's or the recipe's plugin is not installed.
    """
    folder, device = Path(folder), torch.empty(0, device=device).device
    described = _described(folder)
    schema = _SCHEMA.validate_python(described["schema"])
    name, options = described["model"]["name"], described["model"]["options"]
    model: nn.Module = host().build("models", name, options, schema)
    precision: Precision = host().build("precision_recipes", described["precision"]["recipe"], described["precision"]["options"])
    precision.prepare(model, device.type)
    cls: Any = host().load("models", name)
    tables = cls.tables(schema, host().options("models", name, options))
    rules = {table: ManagedTable.model_validate(rule) for table, rule in described.get("ids", {}).items()}
    ids = ManagedIds(tables, rules, World(), seed=0)
    embeddings = TorchEmbeddings(with_rows(tables, rules), SparseOptimizer(name="sgd"), device=device, seed=0)
    weights = load_file(folder / WEIGHTS)
    _fill(model, {name.removeprefix("model/"): tensor for name, tensor in weights.items() if name.startswith("model/")}, folder)
    for piece in embeddings.table_slices():
        with torch.no_grad():
            piece.tensor.copy_(weights[f"tables/{piece.table}"])
    for table, held in ids.maps.items():
        own = torch.stack([weights[f"ids/{table}/{column}"] for column in ("id", "row")]).numpy()
        held.load(np.concatenate([own, np.zeros_like(own)]))  # counts and last use matter in training only
    arch = cuda_arch(device.index or 0) if device.type == "cuda" else None
    bind_kernels(model, device=device_name(device), dtype=precision.compute_dtype(), arch=arch, backward=False)
    return Scorer(model.to(device), embeddings, precision, schema, ids).eval()


def _described(folder: Path) -> dict[str, Any]:
    path = folder / MODEL
    if not path.is_file():
        raise RequestError(f"scorer {folder}", f"it holds no {MODEL}", "Make one: gem checkpoint export RUN --out DIR.")
    described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if described["format"] != FORMAT:
        raise RequestError(f"scorer {folder}", f"its format is {described['format']}, this version reads {FORMAT}", "Export it again.")
    return described


def _fill(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    own = model.state_dict()
    differ = sorted(set(own) ^ set(weights)) or [name for name in own if own[name].shape != weights[name].shape]
    if differ:
        so = f"{len(differ)} weights have other names or shapes in the installed model, the first is {differ[0]!r}"
        raise RequestError(f"scorer {folder}", so, "Install the version of the model that was trained.")
    model.load_state_dict(weights)
