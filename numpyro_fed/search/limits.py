"""How many globals a search takes Hessians of, and how near a mode is near enough."""

from __future__ import annotations

# Shared parameters and globals, up to which silos send Hessians, of 300 x 300 numbers at most. The
# same limit holds for full covariances of the globals.
SEARCHED_UP_TO = 300
MANY_EFFECTS = (
    f"above {SEARCHED_UP_TO} globals effects are not integrated out, and together with a scale "
    "that is a global, too, they have no mode"
)
# Nats for each coordinate that another Newton step may promise where a climb or a search has ended.
# A place half a nat off is one sd off, from where a run finds its way; farther off the curvature
# may be that of another region: a silo's parabola there says nothing about the sum's.
MAX_PROMISE_PER_DIM = 0.5
