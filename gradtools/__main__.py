"""Implements `python -m gradtools`, which runs the command `gradtools`."""

from __future__ import annotations

import sys

from gradtools.cli import main

if __name__ == "__main__":
    sys.exit(main())
