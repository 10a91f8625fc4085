"""Programs that people wrote in public, retold, each with the number that is right."""
