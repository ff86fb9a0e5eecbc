"""The one error that a user is meant to read."""


class UserError(ValueError):
    """Bad input from the user: one line that says what is wrong and how to mend it.

    The command line prints it without a traceback and exits with code 2. Library users can catch
    it as a `ValueError`.
    """
