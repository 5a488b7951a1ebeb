"""PVI's server and silo, one step at a time: the silos' optimisers are told what they find.

``Told`` adds a factor that the test chose to every cavity, so that all that the server and the silo
do with a factor can be computed by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from laid_open import laid_open
from pvi_problems import KEY, gamma_poisson

import numpyro_fed as nf
from numpyro_fed.local.problem import Local, Solution
from numpyro_fed.numerics.divergences import KL, WeightedKL
from numpyro_fed.pvi.server import KL_DRAWS, aggregation
from numpyro_fed.pvi.silo import Down, Status, Up
from numpyro_fed.rounds.exchange import Replies

pytestmark = pytest.mark.usefixtures("double")

SILOS = [dict(y=np.array([0.5, 1.5])), dict(y=np.array([-1.0, 0.0, 2.0]))]
# Of one number: its prior, a Gaussian of mean 1 and sd 2, and rows of sd 0.5.
PRIOR = np.array([1 / 4, 1 / 4])  # precision times mean, precision


def model(y):
    m = numpyro.sample("m", dist.Normal(1.0, 2.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 0.5), obs=y)


def eta(first: float, precision: float) -> Any:
    """Natural parameters of a Gaussian of one number."""
    return {"gaussian": {"first": jnp.array([first]), "second": jnp.array([[-precision / 2]])}}


def numbers(natural: Any) -> np.ndarray:
    """Precision times mean, and the precision."""
    part = natural["gaussian"]
    return np.array([part["first"][0], -2 * part["second"][0, 0]])


def with_prior(first: float, precision: float) -> np.ndarray:
    """The numbers of the posterior that factors of these make."""
    return PRIOR + np.array([first, precision])


def kl_to_prior(first: float, precision: float, sd: float = 2.0) -> float:
    """The KL from a Gaussian to one of mean 1."""
    mean, variance = first / precision, 1 / precision
    return np.log(sd) - np.log(variance) / 2 + (variance + (mean - 1) ** 2) / (2 * sd**2) - 0.5


@dataclass(frozen=True)
class Told(Local):
    """A local optimiser that adds its ``factor`` to the cavity, and keeps what it was given.

    ``seen`` has cavity and start, as natural parameters, and the log likelihood at two draws.
    """

    factor: Any
    converged: bool = True
    finite: bool = True
    suited: bool = True
    seen: list[Any] = field(default_factory=list)
    keep: Callable[[Any], object] = id

    def solve(self, problem, key):
        noise = problem.noise(key, 2, None)
        at_draws = problem.log_lik(problem.start, problem.silo_part, noise, False)
        self.keep(problem)
        self.seen.append((problem.cavity, problem.family.natural(problem.start), at_draws))
        found = jax.tree.map(jnp.add, problem.cavity, self.factor)
        ends = (jnp.array(x) for x in (self.converged, self.finite, self.suited))
        return Solution(found, problem.silo_part, *ends)


@cache
def built(text, schedule):
    """PVI's pure functions for ``SILOS``, and these as they are read."""
    opened = laid_open(nf.PVI(text, start=None, schedule=schedule), SILOS)
    return opened.built.factors, opened.data


def parts(text=model, schedule="synchronous", **changes):
    """PVI's pure functions, with fields changed."""
    return replace(built(text, schedule)[0], **{"start_scale": None, **changes})


@dataclass(frozen=True)
class Rounds:
    """Rounds of a server whose silos reply what the test says; ``who`` take part."""

    pvi: Any
    who: tuple[int, ...] = (0, 1)

    @cached_property
    def compiled(self):
        def run(state, up):
            def ask(name, down):
                sent.append(down)
                return Replies(up, jnp.array(True), jnp.array(float(len(self.who))))

            ask.who, sent = jnp.array(self.who), []
            after, info = self.pvi.round(state, KEY, ask)
            own = self.pvi.prior_local
            return after, info, sent[0], own.seen[-1] if isinstance(own, Told) else ()

        return jax.jit(run)

    def __call__(self, state, change, statuses=(2, 0, 0, 0, 0, 0), theta=None):
        """The next state, the report, the message, and where the server's own visit began."""
        return self.compiled(state, Up(change, jnp.array(-3.0), theta or {}, jnp.array(statuses)))


# The server.


def test_the_last_way_in_which_a_visit_ended_is_watched():
    watch = parts().algorithm().watch_reply
    for statuses, last in (
        ([2, 0, 0, 0, 0, 0], 0),
        ([1, 1, 0, 0, 0, 0], 1),
        ([0, 2, 0, 0, 1, 0], 4),
    ):
        assert watch(Up(eta(0.0, 0.0), jnp.zeros(()), {}, jnp.array(statuses))) == last


def test_the_server_adds_what_it_is_sent_times_the_damping():
    rounds = Rounds(parts(damping=0.5))
    state = rounds.pvi.init_server(KEY)
    np.testing.assert_allclose(numbers(state.params.guide), PRIOR)
    after, info, sent, _ = rounds(state, eta(8.0, 6.0), [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(numbers(sent.total), [0, 0])
    np.testing.assert_array_equal(sent.taken, [0, 0])
    np.testing.assert_allclose(numbers(after.total), [4, 3])
    np.testing.assert_allclose(numbers(after.params.guide), with_prior(4, 3))
    np.testing.assert_array_equal(after.taken, [0.5, 0.5])
    # At the prior the KL is zero: the loss is minus the silos' expected log likelihood.
    np.testing.assert_allclose(info.loss, 3.0)
    # From a mean of 1 and a precision of 1/4 to 17/13 and 13/4.
    np.testing.assert_allclose(after.progress.moved, np.log(13) / 2)
    assert after.progress.refused == 0
    again, info, sent, _ = rounds(after, eta(-4.0, 0.0), [1, 0, 1, 0, 0, 0])
    np.testing.assert_allclose(numbers(sent.total), [4, 3])
    np.testing.assert_array_equal(sent.taken, [0.5, 0.5])
    np.testing.assert_allclose(numbers(again.total), [2, 3])
    np.testing.assert_allclose(info.loss, 3 + kl_to_prior(17 / 4, 13 / 4))
    np.testing.assert_allclose(again.progress.moved, np.sqrt(13 / 4) * 8 / 13)
    assert again.progress.refused == 1


def test_a_round_of_single_visits_counts_each_silo_once():
    rounds = Rounds(parts(schedule="sequential", damping=1.0), who=(1,))
    after, info, _, _ = rounds(rounds.pvi.init_server(KEY), eta(1.0, 1.0))
    np.testing.assert_array_equal(after.taken, [0, 1])
    np.testing.assert_allclose(info.loss, 3.0)
    # The second step of a round measures from where the round began.
    assert not rounds.pvi.done(after._replace(progress=after.progress._replace(moved=0.0)))
    after, info, _, _ = rounds(after, eta(1.0, 1.0), [0, 0, 0, 1, 0, 0])
    # Half of the KL, once in each of the two steps of a round.
    np.testing.assert_allclose(info.loss, 3 + kl_to_prior(1.25, 1.25) / 2)
    np.testing.assert_allclose(numbers(after.params.guide), PRIOR + 2)
    np.testing.assert_allclose(after.progress.moved, np.log(9) / 2)
    assert after.progress.refused == 1
    after, _, _, _ = rounds(after, eta(0.0, 0.0))
    np.testing.assert_allclose(after.progress.moved, 0.0, atol=1e-12)  # rounding, in sds
    assert after.progress.refused == 0


def test_where_some_take_part_what_they_send_stands_for_all():
    rounds = Rounds(parts(visits=1, steps=1, damping=1.0), who=(1,))
    state = rounds.pvi.init_server(KEY)
    _, info, _, _ = rounds(state, eta(1.0, 1.0))
    np.testing.assert_allclose(info.loss, 2 * 3.0)
    # Two rounds go as far as one in which all take part.
    for moved, ends in ((0.0499, True), (0.0501, False)):
        there = state.progress._replace(steps=jnp.int32(1), moved=jnp.array(moved))
        assert rounds.pvi.done(state._replace(taken=jnp.ones(2), progress=there)) == ends


@pytest.mark.parametrize("damping", [1.0, 0.25])
def test_a_run_is_done_where_a_whole_round_moved_little(damping):
    pvi = parts(damping=damping)
    state = pvi.init_server(KEY)
    near, far = jnp.array(0.0999 * damping), jnp.array(0.1001 * damping)
    there = state.progress._replace(steps=jnp.int32(1), moved=near)
    state = state._replace(taken=jnp.full(2, damping), progress=there)
    assert pvi.done(state)
    assert not pvi.done(state._replace(progress=there._replace(moved=far)))
    assert not pvi.done(state._replace(progress=there._replace(refused=jnp.array(1.0))))
    assert not pvi.done(state._replace(progress=there._replace(own=jnp.array(False))))
    assert not pvi.done(state._replace(progress=there._replace(steps=jnp.int32(0))))
    assert not pvi.done(state._replace(taken=jnp.array([damping, 0.0])))


def test_an_update_that_leaves_nothing_proper_is_damped_or_not_taken():
    """A prior of precision 1/4, and a change of -1: an eighth of it is the first that is proper.

    Not a thousandth of a change of -1000 is, which says nothing about the next round.
    """
    cases = [(True, 1, 1 / 8, 1 / 4), (True, 1000, 0, 1), (False, 1, 0, 1)]
    for adaptive, change, taken, damping in cases:
        rounds = Rounds(parts(damping=1.0, adaptive=adaptive))
        after, info, _, _ = rounds(rounds.pvi.init_server(KEY), eta(0.0, -change))
        np.testing.assert_array_equal(numbers(after.total), [0, -taken])
        np.testing.assert_array_equal(after.taken, [taken, taken])
        assert after.damping == damping
        assert info.report["damping"] == taken


def heavy(y):
    m = numpyro.sample("m", dist.StudentT(3.0, 1.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 0.5), obs=y)


def log_heavy(m):
    """The log density of Student's t with 3 degrees of freedom around 1."""
    return np.log(2 / (np.pi * np.sqrt(3))) - 2 * np.log1p((m - 1) ** 2 / 3)


def test_the_server_treats_a_prior_outside_of_the_family_as_a_silo_treats_its_rows():
    first = parts(heavy, prior_local=Told(eta(0.2, 0.3)), damping=0.5)
    state = jax.jit(first.init_server)(KEY)
    np.testing.assert_allclose(numbers(state.params.guide), [0.2, 0.3])
    rounds = Rounds(replace(first, prior_local=Told(eta(0.4, 0.1), converged=False)))
    after, info, _, (cavity, start, (z, values)) = rounds(state, eta(2.0, 6.0))
    # The cavity has what silos sent, and the start the server's factor of before, too.
    np.testing.assert_allclose(numbers(cavity), [1, 3])
    np.testing.assert_allclose(numbers(start), [1.2, 3.3])
    np.testing.assert_allclose(values, log_heavy(z[:, 0]))
    np.testing.assert_allclose(numbers(after.server_factor), [0.4, 0.1])
    np.testing.assert_allclose(numbers(after.total), [1.4, 3.1])
    np.testing.assert_allclose(numbers(after.params.guide), [1.4, 3.1])
    assert not after.progress.own
    assert not info.report["own"]
    # One that leaves nothing proper is not taken.
    rounds = Rounds(replace(first, prior_local=Told(eta(0.0, -50.0))))
    kept, _, _, _ = rounds(after, eta(2.0, 2.0))
    np.testing.assert_allclose(numbers(kept.server_factor), [0.4, 0.1])
    np.testing.assert_allclose(numbers(kept.total), [2.4, 4.1])
    assert not kept.progress.own
    # The KL to such a prior is a mean over draws.
    z, sd = np.linspace(-8, 8, 4001), 3.1**-0.5
    log_q = -(((z - 1.4 / 3.1) / sd) ** 2) / 2 - np.log(sd * np.sqrt(2 * np.pi))
    log_ratio = log_q - log_heavy(z)
    exact = np.trapezoid(np.exp(log_q) * log_ratio, z)
    error = np.sqrt(np.trapezoid(np.exp(log_q) * (log_ratio - exact) ** 2, z) / KL_DRAWS)
    estimate = jax.jit(first.kl_to_prior)(KEY, {}, after.params.guide)
    assert abs(estimate - exact) < 4 * error


def learned(y):
    s = numpyro.param("s", 2.0, constraint=dist.constraints.positive)
    m = numpyro.sample("m", dist.Normal(1.0, s))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 0.5), obs=y)


def test_parameters_step_down_the_free_energy_and_only_to_a_proper_posterior():
    """One step of gradient descent, of the KL to the prior and of what silos send."""
    rounds = Rounds(parts(learned, optim=optax.sgd(0.1), damping=1.0))
    state = rounds.pvi.init_server(KEY)
    before, _, _, _ = rounds(state, eta(8.0, 6.0), theta={"s": jnp.array(0.0)})
    np.testing.assert_allclose(before.params.theta["s"], np.log(2))  # at the prior the KL is zero
    after, _, _, _ = rounds(before, eta(0.0, 0.0), theta={"s": jnp.array(-0.7)})
    mean, variance = 8.25 / 6.25, 1 / 6.25
    slope = 1 - (variance + (mean - 1) ** 2) / 4  # of the KL in log s, at s = 2
    log_s = np.log(2) - 0.1 * (slope + 0.7)
    np.testing.assert_allclose(after.params.theta["s"], log_s)
    weak = np.exp(-2 * log_s)
    np.testing.assert_allclose(numbers(after.params.guide), [weak + 8, weak + 6])
    # A step to a prior so weak that what silos have sent makes it improper.
    near = after._replace(total=eta(8.0, -weak / 2))
    stays, _, _, _ = rounds(near, eta(0.0, 0.0), theta={"s": jnp.array(30.0)})
    np.testing.assert_allclose(stays.params.theta["s"], log_s)
    np.testing.assert_allclose(numbers(stays.params.guide), [weak + 8, weak / 2])


# A silo.


def visited(pvi, down, state=None, silo=1):
    """The reply and the draft of a visit; the optimiser's cavity and start, if it is ``Told``."""
    data = built(model, "synchronous")[1][silo]
    state = pvi.init_silo(KEY, data) if state is None else state

    def run(down, state):
        reply, draft = pvi.visit(KEY, down, state, data)
        return reply.up, draft, pvi.local.seen[-1]

    return jax.jit(run)(down, state)


def expected_log_lik(mean, variance):
    misses = (SILOS[1]["y"] - mean) ** 2 + variance
    return -0.5 * (misses / 0.25 + np.log(2 * np.pi * 0.25)).sum()


def down(total, taken=0.5):
    return Down({}, total, jnp.array(taken))


@pytest.mark.parametrize(
    ("deletion", "removed", "kept"),
    # A silo of two, that has a factor of (2, 1) after half of (2, 4) was added, of (6, 5) in all.
    [
        ("own", [2, 3], [2, 3]),
        ("none", [0, 0], [0, 0]),
        ("average", [3, 2.5], [3, 2.5]),
        ("prior", [6, 5], [2, 3]),
    ],
)
def test_a_visit_takes_its_factor_out_and_sends_the_change(deletion, removed, kept):
    pvi = parts(deletion=deletion, local=Told(eta(5.0, 7.0)))
    state = pvi.init_silo(KEY, built(model, "synchronous")[1][1])
    state = state._replace(factor=eta(1.0, 1.0), pending=eta(2.0, 4.0))
    up, draft, (cavity, start, (z, values)) = visited(pvi, down(eta(6.0, 5.0)), state)
    np.testing.assert_allclose(numbers(cavity), with_prior(6, 5) - np.array(removed))
    np.testing.assert_allclose(numbers(start), with_prior(6, 5))
    np.testing.assert_allclose(values, [expected_log_lik(m, 0.0) for m in z[:, 0]])
    np.testing.assert_allclose(numbers(up.change), [5, 7] - np.array(kept))
    np.testing.assert_allclose(numbers(draft.factor), [2, 3])
    np.testing.assert_allclose(numbers(draft.pending), numbers(up.change))
    np.testing.assert_array_equal(up.statuses, [1, 0, 0, 0, 0, 0])
    assert draft.visits == 1
    assert draft.status == Status.CONVERGED
    found = with_prior(11, 12) - np.array(removed)
    np.testing.assert_allclose(draft.centre, found[0] / found[1])
    # The expected log likelihood is that of the posterior as it was sent.
    np.testing.assert_allclose(up.log_lik, expected_log_lik(6.25 / 5.25, 1 / 5.25))


def test_a_silo_that_holds_a_share_of_the_prior_takes_the_rest_out():
    pvi = parts(prior_share=0.5, local=Told(eta(5.0, 7.0)))
    _, _, (cavity, start, _) = visited(pvi, down(eta(6.0, 5.0)))
    np.testing.assert_allclose(numbers(cavity), PRIOR / 2 + [6, 5])
    np.testing.assert_allclose(numbers(start), with_prior(6, 5))


def test_a_delayed_silo_works_from_the_message_of_its_visit_before():
    pvi = parts(delayed=True, local=Told(eta(5.0, 7.0)))
    _, draft, (cavity, start, _) = visited(pvi, down(eta(6.0, 5.0)))
    np.testing.assert_allclose([numbers(cavity), numbers(start)], [PRIOR, PRIOR])
    up, _, (cavity, start, _) = visited(pvi, down(eta(9.0, 9.0), 0.0), draft)
    np.testing.assert_allclose([numbers(cavity), numbers(start)], [with_prior(6, 5)] * 2)
    np.testing.assert_allclose(numbers(up.change), [5, 7])


def test_a_first_visit_starts_no_wider_than_asked_for():
    pvi = parts(start_scale=0.1, local=Told(eta(5.0, 7.0)))
    _, draft, (_, start, _) = visited(pvi, down(eta(6.0, 5.0)))
    np.testing.assert_allclose(numbers(start), [100 * 6.25 / 5.25, 100])
    _, _, (_, start, _) = visited(pvi, down(eta(6.0, 5.0)), draft)
    np.testing.assert_allclose(numbers(start), with_prior(6, 5))
    _, _, (_, start, _) = visited(pvi, down(eta(600.0, 500.0)))
    np.testing.assert_allclose(numbers(start), with_prior(600, 500))


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (Told(eta(5.0, 7.0), converged=False), Status.NOT_CONVERGED),
        (Told(eta(5.0, 7.0), suited=False), Status.NOT_CONJUGATE),
        (Told(eta(5.0, -99.0)), Status.IMPROPER),
        (Told(eta(5.0, -99.0), suited=False), Status.IMPROPER),
        (Told(eta(5.0, -99.0), finite=False), Status.NON_FINITE),
        (Told(eta(jnp.nan, 7.0)), Status.NON_FINITE),
    ],
)
def test_a_visit_says_how_it_ended_and_sends_what_can_be_used(told, status):
    up, draft, _ = visited(parts(local=told), down(eta(6.0, 5.0)))
    np.testing.assert_array_equal(up.statuses, np.eye(len(Status))[status])
    assert draft.status == status
    used = [5, 7] if status == Status.NOT_CONVERGED else [0, 0]
    np.testing.assert_allclose(numbers(up.change), used)
    np.testing.assert_allclose(numbers(draft.pending), used)
    if status != Status.NOT_CONVERGED:
        np.testing.assert_array_equal(draft.centre, 0.0)


def test_guides_of_rows_go_into_frames_of_their_own_and_back():
    def text(y):
        m = numpyro.sample("m", dist.Normal(1.0, 2.0))
        with nf.silo_plate("row", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(m, 1.0))
            numpyro.sample("y", dist.Poisson(jnp.exp(z)), obs=y)

    opened = laid_open(nf.PVI(text, start=None), [dict(y=np.array([0.0, 2.0, 5.0]))] * 2)
    told, problems = Told(eta(5.0, 7.0)), []
    pvi = replace(opened.built.factors, local=replace(told, keep=problems.append))
    state = pvi.init_silo(KEY, opened.data[0])
    loc, log_scale = jnp.array([[0.1], [1.0], [2.0]]), jnp.array([[-1.0], [-0.5], [0.3]])
    rows = {**state.params.guide["row"], "loc": loc, "log_scale": log_scale}
    own = state.params._replace(guide={"row": rows})
    pvi.visit(KEY, down(eta(6.0, 5.0)), state._replace(params=own), opened.data[0])
    inside, back = problems[0].to_frame(problems[0].silo_part)
    np.testing.assert_allclose(inside.guide["row"]["loc"], 0.0)
    np.testing.assert_allclose(inside.guide["row"]["log_scale"], 0.0)
    there = back(inside._replace(guide={"row": {**inside.guide["row"], "loc": jnp.ones((3, 1))}}))
    np.testing.assert_allclose(there.guide["row"]["loc"], loc + jnp.exp(log_scale))


def test_the_expected_log_likelihood_is_a_mean_over_draws_where_it_is_not_conjugate():
    pvi = parts(conjugate=False, evidence_draws=20, local=Told(eta(5.0, 7.0)))
    data = built(model, "synchronous")[1][1]
    state = pvi.init_silo(KEY, data)
    posterior = eta(*(with_prior(6, 5)))
    keys = jax.random.split(KEY, 4000)
    each = jax.jit(jax.vmap(lambda key: pvi.expected_log_lik(key, {}, posterior, state, data)[0]))
    values = each(keys)
    mean, variance = 6.25 / 5.25, 1 / 5.25
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - expected_log_lik(mean, variance)) < 4 * error
    # Its variance over draws is that of a quadratic in one normal, over 20.
    bend, slope = -len(SILOS[1]["y"]) / 0.25, ((SILOS[1]["y"] - mean) / 0.25).sum()
    of_one = slope**2 * variance + bend**2 * variance**2 / 2
    np.testing.assert_allclose(values.var() * 20, of_one, rtol=4 * np.sqrt(2 / 4000) * 1.5)


def test_an_expected_log_likelihood_that_is_not_a_number_is_minus_infinity():
    """At a posterior so vague that its mean overflows, which is no reason to refuse a visit."""
    pvi, data = parts(), built(model, "synchronous")[1][1]
    assert pvi.conjugate
    vague, state = eta(1.0, 1e-310), pvi.init_silo(KEY, data)
    assert jax.jit(pvi.expected_log_lik)(KEY, {}, vague, state, data)[0] == -np.inf


# What both need.


def test_a_posterior_is_the_minimum_over_the_family_for_any_divergence():
    """With a KL that is not known as one L-BFGS finds the sum; with a weighted one it is scaled."""
    family, kl = parts().family, KL()
    prior, total = eta(*PRIOR), eta(3.0, 2.0)

    def divergence(family, q, p):
        """None at all from a prior whose first number is above ten."""
        return jnp.where(p["gaussian"]["first"][0] > 10, 0.0, kl(family, q, p))

    by_search = jax.jit(aggregation(family, divergence))
    np.testing.assert_allclose(numbers(by_search(prior, total)), with_prior(3, 2), rtol=1e-4)
    # Where the mean gains without end there is no minimum, and what is found is no number.
    assert np.isnan(numbers(by_search(eta(20.0, 1.0), eta(3.0, 0.0)))).all()
    weighted = aggregation(family, WeightedKL(4.0))
    np.testing.assert_allclose(numbers(weighted(prior, total)), PRIOR + np.array([0.75, 0.5]))
    pvi = parts(aggregate=weighted, local=Told(eta(5.0, 7.0)))
    up, _, (cavity, start, _) = visited(pvi, down(eta(3.0, 2.0)))
    for found in (cavity, start):
        np.testing.assert_allclose(numbers(found), PRIOR + np.array([0.75, 0.5]))
    mean, variance = 1 / 0.75, 1 / 0.75
    np.testing.assert_allclose(up.log_lik, expected_log_lik(mean, variance))


def test_messages_have_the_shapes_of_what_is_sent():
    pvi = parts(learned, optim=optax.sgd(0.1))
    sent, _ = pvi.evaluation.messages()
    assert {name: a.shape for name, a in sent.theta.items()} == {"s": ()}
    assert sent.total["gaussian"]["second"].shape == (1, 1)


def test_a_run_from_the_mode_has_a_full_frame():
    np.testing.assert_array_equal(parts(from_mode=True).first_frame().unit, np.eye(1))
    assert parts().first_frame().unit is None


def test_draws_that_are_not_normal_have_the_same_expected_log_likelihood():
    problem = gamma_poisson()
    opened = laid_open(nf.PVI(problem.model, start=None), [problem.rows])
    pvi = opened.built.factors
    state, posterior = pvi.init_silo(KEY, opened.data[0]), pvi.globals.prior({})
    exact = pvi.expected_log_lik(KEY, {}, posterior, state, opened.data[0])[0]
    drawn = replace(pvi, conjugate=False, evidence_draws=4000)
    estimate = jax.jit(drawn.expected_log_lik)(KEY, {}, posterior, state, opened.data[0])[0]
    # Of a rate with shape 3 and rate 1/2 under 12 counts: sd of sum(y) log(rate) - 12 rate.
    rate = np.random.default_rng(0).gamma(3.0, 2.0, 100_000)
    sd = np.std(problem.rows["y"].sum() * np.log(rate) - 12 * rate)
    assert abs(estimate - exact) < 4 * sd / np.sqrt(4000)
