"""The rig that a backend is held to."""
