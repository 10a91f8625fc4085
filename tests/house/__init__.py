"""The house itself: where what stands, what is imported, what is left behind."""
