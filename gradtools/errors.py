"""What gradtools raises and warns.

Every error says what was asked, what was found (argument, leaf path, shape, dtype)
and what to do instead. Its text is part of the API.
"""


class GradtoolsError(Exception):
    """What was asked cannot be done, or would give a number that may be wrong."""


class DisconnectedInputError(GradtoolsError):
    """A differentiated argument does not reach the output by a differentiable path."""


class GradtoolsWarning(UserWarning):
    """Something the user should know, said once, in plain words."""


class MissingRuleError(GradtoolsError):
    """A host function without a rule was differentiated."""
