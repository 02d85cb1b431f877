"""The paper's tables as lists of commands and of cells that read what those commands wrote. Nothing is measured here."""

from .tables import TABLES, CommandStep, PaperCell, PaperTable, Setup, tables

__all__ = ["TABLES", "CommandStep", "PaperCell", "PaperTable", "Setup", "tables"]
