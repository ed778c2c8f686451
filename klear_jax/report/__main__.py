# SPDX-License-Identifier: Apache-2.0
"""Remake reports from run files: `python -m klear_jax.report RUN_DIR [RUN_DIR...]`.

Prints the path of each page. Exit status 0 when every page was written, 2 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from klear_jax.report.page import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one report per folder named; a folder without metrics costs one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m klear_jax.report",
        description="Write report.html and figures/ of a run again, from the files in its folder.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of one run")
    parser.add_argument("--title", help="heading of the page (default: made from config.json)")
    options = parser.parse_args(arguments)
    status = 0
    for run_dir in options.runs:
        try:
            print(write_report(run_dir, title=options.title))
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    raise SystemExit(main())
