"""The exceptions a user is meant to read."""


class UserError(Exception):
    """A mistake the user can mend: one line saying what is wrong and what to do. The CLI prints it and exits 2."""

    exit_status = 2


class RunFailed(UserError):  # noqa: N818
    """A run that went wrong although it was asked for rightly. The CLI exits 1."""

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is Python's, or XLA's status (absl::StatusCode::kResourceExhausted)."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
