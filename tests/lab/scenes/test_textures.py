import numpy as np
import pytest

from cluster.lab.scenes.textures import MIXED, RANDOM, texture


@pytest.mark.parametrize("name", [RANDOM, MIXED, "brick"])
def test_a_surface_is_the_same_for_its_seed_and_another_for_another(name):
    one = texture(name, 90, 160, 3)
    assert one.shape == (90, 160, 3)
    assert (one == texture(name, 90, 160, 3)).all()
    assert (one != texture(name, 90, 160, 4)).any()


def test_mixed_surfaces_differ_from_each_other_more_than_drawn_ones():
    def spread(name):
        pictures = [texture(name, 45, 80, seed) for seed in range(60)]
        return np.std([picture.std() for picture in pictures])

    assert spread(MIXED) > spread(RANDOM)
