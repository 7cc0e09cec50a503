"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A machine that stands still for a moment is no failure: how long an example takes, or making one, fails nothing.
settings.register_profile("no-clock", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
