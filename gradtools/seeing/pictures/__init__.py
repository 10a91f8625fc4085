"""Pictures of graphs: the layout, SVG, Mermaid, Graphviz and the page in a browser."""
