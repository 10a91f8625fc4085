"""Two frameworks held against each other: both sides, their precision, what the causes may be."""
