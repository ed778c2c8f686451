# SPDX-License-Identifier: Apache-2.0
"""One self-contained web page about a finished run, made from the files the run left behind.

This package reads `config.json`, `metrics.jsonl` and `completions.jsonl`; it never imports jax and
holds no state of a run, so a report can be remade anywhere, at any time: `python -m
klear_jax.report RUN_DIR`. Read `page.write_report` first. matplotlib is imported only when a figure
is drawn, to keep `import klear_jax.report` quick.
"""

from klear_jax.report.page import write_report
from klear_jax.report.records import Card, Picture, Section, Table

__all__ = ["Card", "Picture", "Section", "Table", "write_report"]
