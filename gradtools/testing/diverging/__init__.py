"""Where two ports first differ, layer by layer, and how their parameters are laid out."""
