"""Version arithmetic. Version v = the weights after v optimizer steps; batch n (1-based) takes the weights from n - 1 to n."""


def newest_batch(version: int, lag: int) -> int:
    """The last batch that may be generated with weights `version`: batch n needs version >= n - 1 - lag."""
    return version + 1 + lag


def staleness(step: int, version: int) -> int:
    """Steps between the weights that sampled a token and those that batch `step` updates."""
    return step - 1 - version


def too_stale(step: int, version: int, max_off_policy_steps: int) -> bool:
    """Whether a group whose oldest token was sampled by `version` may no longer go into batch `step`."""
    return staleness(step, version) > max_off_policy_steps
