"""What a command prints while it works."""

from typing import Any

from rich.console import Console


def show_progress(console: Console, status: Any, text: str) -> None:
    """Show `text` as the status of a terminal; print it as a line elsewhere."""
    if console.is_terminal:
        status.update(text)
    else:
        console.print(f"{text} …", markup=False)
