"""From raw logs to training rows that know nothing later than their impression."""

from gem_data.prepare.definition import Definition, read_definition
from gem_data.prepare.run import prepare

__all__ = ["Definition", "prepare", "read_definition"]
