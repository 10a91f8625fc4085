"""Tests programs from public reports, rewritten with gradtools, against correct results."""
