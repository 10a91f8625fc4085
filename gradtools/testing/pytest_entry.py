"""What pytest loads of an installed gradtools, by the name `gradtools`: the plugin beside it.

Under this name ``-p no:gradtools`` switches the plugin off; where gradtools is not installed,
``-p gradtools.testing.plugin`` loads it.
"""

pytest_plugins = ["gradtools.testing.plugin"]
