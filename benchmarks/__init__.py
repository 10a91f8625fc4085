"""Programs that measure; a package, as others install one of this name."""
