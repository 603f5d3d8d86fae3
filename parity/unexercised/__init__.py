"""What a check did not exercise, and so does not prove."""
