"""PromQL expressions over the selected jobs."""

from __future__ import annotations

from observability.panels import JOB, RATE

OF_JOB = ("namespace", "job")


def newest(metric: str) -> str:
    """Return a job's value.

    The scrape of an earlier attempt may linger, so the larger one counts.
    """
    return f"max by ({', '.join(OF_JOB)}) ({metric}{{{JOB}}})"


def rate(metric: str, *labels: str, selector: str = JOB) -> str:
    """Return a counter's growth per second, grouped by `labels`, or by job without labels."""
    return f"sum by ({', '.join(labels or OF_JOB)}) (rate({metric}{{{selector}}}[{RATE}]))"


def quantile(share: float, histogram: str, *labels: str, selector: str = JOB) -> str:
    """Return a quantile in [0, 1] of a histogram, grouped by `labels`."""
    buckets = rate(f"{histogram}_bucket", "le", *labels, selector=selector)
    return f"histogram_quantile({share}, {buckets})"


def spread(histogram: str, *, selector: str = JOB) -> dict[str, str]:
    """Return median and 95th percentile by legend."""
    return {
        "median": quantile(0.5, histogram, selector=selector),
        "95th percentile": quantile(0.95, histogram, selector=selector),
    }


def mean(histogram: str, *labels: str, selector: str = JOB) -> str:
    """Return the mean of a histogram, grouped by `labels`, or by job without labels."""
    seconds = rate(f"{histogram}_sum", *labels, selector=selector)
    return f"{seconds} / ({rate(f'{histogram}_count', *labels, selector=selector)} > 0)"
