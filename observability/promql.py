"""The few forms of PromQL that panels ask for, over the chosen jobs."""

from __future__ import annotations

from observability.panels import JOB, RATE

OF_JOB = ("namespace", "job")


def newest(metric: str) -> str:
    """A job's value. A scrape of an attempt before may still be there: the larger one counts."""
    return f"max by ({', '.join(OF_JOB)}) ({metric}{{{JOB}}})"


def rate(metric: str, *labels: str, selector: str = JOB) -> str:
    """A counter's growth in a second, by these labels; without any by job."""
    return f"sum by ({', '.join(labels or OF_JOB)}) (rate({metric}{{{selector}}}[{RATE}]))"


def quantile(share: float, histogram: str, *labels: str, selector: str = JOB) -> str:
    """A quantile of a histogram, by these labels. share: of 1."""
    buckets = rate(f"{histogram}_bucket", "le", *labels, selector=selector)
    return f"histogram_quantile({share}, {buckets})"


def spread(histogram: str, *, selector: str = JOB) -> dict[str, str]:
    """Median and 95th percentile."""
    return {
        "median": quantile(0.5, histogram, selector=selector),
        "95th percentile": quantile(0.95, histogram, selector=selector),
    }


def mean(histogram: str, *labels: str, selector: str = JOB) -> str:
    """The mean of what a histogram has counted, by these labels; without any by job."""
    seconds = rate(f"{histogram}_sum", *labels, selector=selector)
    return f"{seconds} / ({rate(f'{histogram}_count', *labels, selector=selector)} > 0)"
