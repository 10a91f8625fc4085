"""The examples, the notebooks, the pages and the site run as they stand."""
