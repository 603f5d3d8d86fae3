"""Exceptions whose message is addressed to the user."""


class UserError(Exception):
    """A mistake that the user can fix. The message is one line: what is wrong and the remedy. The CLI exits with 2."""

    exit_status = 2


class RunFailed(UserError):  # noqa: N818
    """A valid request that failed. The CLI exits with 1."""

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is Python's MemoryError or XLA's `absl::StatusCode::kResourceExhausted`."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
