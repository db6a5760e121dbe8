"""Which heads context ranks can share when they exchange heads for tokens (models.layers.ulysses). No torch: config checks read it."""


def head_problem(heads: int, groups: int, size: int) -> str | None:
    """Why `size` context ranks cannot share the `heads` attention heads and `groups` key-value heads of a tensor rank, or None."""
    if heads % size == 0 and (groups % size == 0 or size % groups == 0):
        return None
    return (
        f"[trainer.parallel] context_parallel = {size} of kind 'ulysses' must divide a tensor rank's {heads} attention heads, and divide "
        f"or be a multiple of its {groups} key-value heads; change it, or context_parallel_kind to 'ring' or 'all_gather'"
    )
