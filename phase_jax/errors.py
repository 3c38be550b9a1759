"""Errors that a user can cause."""


class UserError(Exception):
    """A mistake in the input: one line that names the input and the remedy; the command exits with code 2."""
