"""The one exception a user is meant to read."""


class UserError(Exception):
    """A mistake the user can mend: one line saying what is wrong and what to do. The CLI prints it and exits 2."""
