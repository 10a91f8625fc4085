"""Everything that the frameworks can differentiate."""
