from prometheus_client import CollectorRegistry

from sluice.telemetry.phases import Phases


def test_the_current_phase_counts_too() -> None:
    now = [0.0]
    registry = CollectorRegistry()
    phases = Phases("x_seconds", "x", first="starting", registry=registry, clock=lambda: now[0])
    for moment, phase in ((3.0, "idle"), (4.0, "busy"), (9.0, "idle")):
        now[0] = moment
        phases.enter(phase)
    now[0] = 11.0
    assert phases.seconds() == {"starting": 3.0, "idle": 3.0, "busy": 5.0}
    assert registry.get_sample_value("x_seconds_total", {"phase": "idle"}) == 3.0
