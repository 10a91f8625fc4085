"""Programs from public reports, rewritten with gradtools and compared with correct results."""
