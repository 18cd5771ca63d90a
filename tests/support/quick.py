"""Which tests and how many examples `make quick` runs."""

import os

QUICK = "QDSL_TEST_QUICK" in os.environ
MOST_EXAMPLES = 50


def examples(count: int) -> int:
    """How many examples a property is tried with: `count`, and 50 at most in `make quick`."""
    return min(count, MOST_EXAMPLES) if QUICK else count
