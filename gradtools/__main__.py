"""Runs the command `gradtools` as `python -m gradtools`, in case it is not on the path."""

from __future__ import annotations

import sys

from gradtools.cli import main

if __name__ == "__main__":
    sys.exit(main())
