"""What two runs of one configuration must have in common, step by step."""

CLOCK = ("timing/", "perf/")
FLEET = ("rollout/engines", "rollout/reissued")
"""How many engines there were, were lost, and were asked again."""


def lasting(record: dict, *fleeting: str) -> dict:
    """A step's metrics without what depends on the clock, and without what begins otherwise."""
    return {
        name: value for name, value in record.items() if not name.startswith((*CLOCK, *fleeting))
    }
