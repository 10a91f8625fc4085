"""Pictures of graphs: layout, SVG, Mermaid, Graphviz and an interactive HTML page."""
