"""What gradtools raises and warns.

Every error says what was asked, what was found (argument, leaf path, shape, dtype)
and what to do instead. Its text is part of the API.
"""

import os
import traceback

_NOT_THE_USERS = ("<", *(os.path.dirname(path) + os.sep for path in (__file__, os.__file__)))


class GradtoolsError(Exception):
    """What was asked cannot be done, or would give a number that may be wrong."""


class DisconnectedInputError(GradtoolsError):
    """A differentiated argument does not reach the output by a differentiable path."""


class GradtoolsWarning(UserWarning):
    """Something the user should know, said once, in plain words."""


class MissingRuleError(GradtoolsError):
    """A host function without a rule was differentiated."""


def place_of(error: BaseException) -> str:
    """The innermost line of the user's that an error went through, in brackets."""
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "-packages" not in frame.filename and not frame.filename.startswith(_NOT_THE_USERS)
    ]
    return f" ({os.path.basename(users[-1].filename)}:{users[-1].lineno})" if users else ""
