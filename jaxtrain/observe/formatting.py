"""Format counts, durations and long texts for people."""

import math

_LABELS = {"rouge_l": "ROUGE-L", "f1": "F1", "bleu": "BLEU", "auc": "AUC"}


def format_count(value: float) -> str:
    """Format a count with a metric suffix.

    >>> format_count(12345.0), format_count(640.0), format_count(7.25)
    ('12.3k', '640', '7.2')
    """
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def significant(value: float) -> str:
    """Format a number with four significant digits, zeros at the end included.

    >>> significant(1.59), significant(1.6584), significant(0.5), significant(12345.6)
    ('1.590', '1.658', '0.5000', '1.235e+04')
    """
    return f"{value:#.4g}".removesuffix(".")


def metric_label(name: str) -> str:
    """Return how a text names a metric.

    >>> metric_label("rouge_l"), metric_label("exact_match")
    ('ROUGE-L', 'exact match')
    """
    return _LABELS.get(name, name.replace("_", " "))


def abbreviated(text: str, width: int) -> str:
    """Return a text without its middle if it is longer than `width` characters.

    >>> abbreviated("What is a lambda?", 11), abbreviated("Why?", 11)
    ('What …mbda?', 'Why?')
    """
    if len(text) <= width:
        return text
    tail = max(width - 1, 0) // 2
    return f"{text[: max(width - 1 - tail, 0)]}…{text[len(text) - tail :]}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds as [days] [hours:]minutes:seconds.

    >>> format_duration(59.6), format_duration(3725), format_duration(90061)
    ('1:00', '1:02:05', '1 d 1:01:01')
    """
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days} d {clock}" if days else clock
