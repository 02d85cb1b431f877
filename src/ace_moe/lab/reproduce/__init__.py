"""The paper's tables as lists of commands and of cells that read what those commands wrote. Nothing is measured here."""

from .tables import TABLES, Cell, Setup, Step, Table, tables

__all__ = ["TABLES", "Cell", "Setup", "Step", "Table", "tables"]
