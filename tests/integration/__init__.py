"""With other packages, in their own loops."""
