"""The schema of a data set as a user writes it: ``schema.toml``, one description for training, evaluation and export."""

from gem_data.schema.convert import to_data_schema
from gem_data.schema.declare import Embedding, Id, MultiId, Number, Schema, Sequence, Task
from gem_data.schema.files import read_schema, write_schema

__all__ = ["Embedding", "Id", "MultiId", "Number", "Schema", "Sequence", "Task", "read_schema", "to_data_schema", "write_schema"]
