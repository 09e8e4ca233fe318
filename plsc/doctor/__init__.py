"""``plsc doctor``: the checks of a machine and of the kernels on it, with a report for people and for JSON."""

SECTIONS = ("versions", "machine", "choices", "kernels", "rates", "collectives", "training", "plan")
LIMIT_SECONDS = 45.0  # without progress, after which a rank is reported as hanging
