"""What tests share, and the programs that write generated pages and tables."""
