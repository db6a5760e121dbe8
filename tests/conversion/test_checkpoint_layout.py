"""How rows are cut into chunks and chunks into files."""

from megatron_rl.conversion.checkpoint_layout import cut


def test_lists_respect_the_limit_and_keep_the_order():
    # A limit of 12: the third would make 16; 40 is over the limit and stands alone.
    assert cut([4, 4, 8, 40, 4], lambda size: size, 12) == [[4, 4], [8], [40], [4]]
    assert cut([], lambda size: size, 12) == []
