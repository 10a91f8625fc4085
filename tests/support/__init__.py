"""Contains helpers that tests share, and programs that generate pages and tables of the docs."""
