"""``plsc doctor``: the checks of a machine and of the kernels on it, with a report for people and for JSON."""
