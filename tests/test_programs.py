"""How programs are compiled."""

from dataclasses import dataclass

import jax.numpy as jnp

from numpyro_fed.programs import compiled_method, jit_once

TRACED = []


@dataclass(frozen=True, eq=False)
class Scale:
    factor: float

    @compiled_method(static_argnums=1)
    def times(self, x, power=1):
        """Return ``x`` times a power of the factor."""
        TRACED.append(self.factor)
        return x * self.factor**power

    @compiled_method(jit_once)
    def once(self, x):
        TRACED.append(self.factor)
        return x + self.factor


def test_a_method_is_compiled_once_for_each_object():
    TRACED.clear()
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(3):
        assert float(two.times(jnp.ones(()))) == 2.0
        assert float(three.times(jnp.ones(()))) == 3.0
        assert float(two.times(jnp.ones(()), 2)) == 4.0
        assert float(three.once(jnp.ones(()))) == 4.0
    assert sorted(TRACED) == [2.0, 2.0, 3.0, 3.0]
    assert two.times.__doc__ == "Return ``x`` times a power of the factor."
