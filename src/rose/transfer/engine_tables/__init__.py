"""Layouts of engines from the table of a checkpoint alone, for engines that cannot say what they hold."""

from rose.transfer.engine_tables.model_table import ModelTable, load_model_table
from rose.transfer.engine_tables.table import table_layout

__all__ = ["ModelTable", "load_model_table", "table_layout"]
