"""What pytest loads of an installed gradtools, by the name `gradtools`: the plugin beside it.

Under this name ``-p no:gradtools`` switches the plugin off; ``-p gradtools.testing.plugin`` loads it
where gradtools is not installed.
"""

pytest_plugins = ["gradtools.testing.plugin"]
