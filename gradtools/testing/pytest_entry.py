"""Defines the pytest entry point `gradtools`, which loads `gradtools.testing.plugin`.

``-p no:gradtools`` disables the plugin. If gradtools is not installed, load the plugin with
``-p gradtools.testing.plugin``.
"""

pytest_plugins = ["gradtools.testing.plugin"]
