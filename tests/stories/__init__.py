"""Programs from public reports, rewritten with gradtools and their correct results."""
