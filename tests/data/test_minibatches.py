"""Some of a silo's rows at a time, and some of the silos."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from problems import build, jitter

import numpyro_fed as nf
from numpyro_fed.data.minibatches import MinibatchNoise, draw_minibatch, rows_at
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.objectives import draws_by_plate
from numpyro_fed.guides.silo_bounds import SiloBound
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.rounds.exchange import Replies
from numpyro_fed.rounds.step import replayed_part
from numpyro_fed.sfvi.algorithm import SFVIAlgorithm
from numpyro_fed.text.layout import layout_and_buckets, minibatches_of_plates

KEY, QUIET = jax.random.key(0), dict(progress_bar=False)


plain = models.linear(1, 1.0)


def with_latents(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(x @ beta, 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def wards(x, y, ward, size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("ward", size.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3, 2.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(u[ward] + x @ beta, 1.0), obs=y)


def wards_and_rows(x, y, ward, size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("ward", size.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3, 2.0))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(u[ward], 1.0))
        numpyro.sample("y", dist.Normal(b + x @ beta, 1.0), obs=y)


def two_kinds(x, y, v):
    """Rows of two plates, of lengths that have nothing to do with each other."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)
    with nf.silo_plate("visit", v.shape[0]):
        w = numpyro.sample("w", dist.Normal(beta[0], 1.0))
        numpyro.sample("v", dist.Normal(w, 2.0), obs=v)


MODELS = {
    "plain": plain,
    **{f.__name__: f for f in (with_latents, wards, wards_and_rows, two_kinds)},
}


def silos_of(name, sizes=(7, 12, 3)):
    r, found = np.random.default_rng(3), []
    for j, n in enumerate(sizes):
        silo = dict(x=r.normal(size=(n, 2)), y=r.normal(size=n))
        if "wards" in name:
            groups = 2 + j
            silo |= dict(ward=r.integers(0, groups, n), size=np.zeros(groups))
        if name == "two_kinds":
            silo |= dict(v=r.normal(size=4 + 2 * j))
        found.append(silo)
    return found


class Split:
    """A silo's part of a step, of a padded stack of silos."""

    def __init__(self, name, size, objective=nf.ELBO()):  # noqa: B008
        held = read(silos_of(name))
        layout, (bucket,) = layout_and_buckets(MODELS[name], held)
        self.fm, self.data = layout.model, jax.tree.map(jnp.asarray, bucket.data)
        guide = build(nf.guides.Structured(locals="full"), self.fm, layout.sizes)
        bound = SiloBound(self.fm, guide, draws_by_plate(objective, guide))
        self.minibatches = minibatches_of_plates(self.fm, layout.possible_plates, size)
        settings = guide, bound, optax.sgd(1.0), 1, len(held)
        self.whole = SFVIAlgorithm(self.fm, *settings)
        self.some = SFVIAlgorithm(self.fm, *settings, minibatches=self.minibatches)

    def start(self):
        """What is sent, and the states of all silos, none of them special."""
        server = self.whole.init_server(KEY)
        server = server._replace(params=jitter(server.params))
        round_ = self.whole.algorithm().round
        down = replayed_part(round_, server, round_.noise(KEY), jnp.arange(1))
        states = jax.vmap(self.whole.init_silo, (None, 0))(KEY, self.data)
        return down, states._replace(params=jitter(states.params))


def gradients(parts, noise, down, states, data):
    """A reply and a step under sgd(1.0), which is the gradient, of every silo."""
    reply, after = jax.vmap(parts.answer, (0, None, 0, 0))(noise, down, states, data)
    step = jax.tree.map(jnp.subtract, after.params, states.params)
    return reply.up, step


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_unbiased(double, name):
    """Of ragged silos padded to one shape, each row with the noise that it has in all."""
    split, times = Split(name, 4), 4_000
    down, states = split.start()
    silos = len(split.data.masks["row"])
    each = jax.vmap(split.whole.step_noise)(jax.random.split(KEY, silos), states.params)
    whole = gradients(split.whole, each, down, states, split.data)

    def cut(key):
        which = jax.vmap(split.minibatches.noise)(jax.random.split(key, silos))

        def of_silo(which, data, noise):
            _, places = split.minibatches.draw(which, data)
            return MinibatchNoise(rows_at(noise.rows, places), which)

        noise = jax.vmap(of_silo)(which, split.data, each)
        return gradients(split.some, noise, down, states, split.data)

    found = jax.jit(lambda keys: jax.lax.map(cut, keys, batch_size=100))(
        jax.random.split(jax.random.key(1), times)
    )

    def check(some, expected):
        sd = some.std(0) / times**0.5
        off = jnp.abs(some.mean(0) - expected)
        assert (off <= 4 * sd + 1e-9 * (1 + jnp.abs(expected))).all(), (off / sd).max()
        return sd.max()

    errors = jax.tree.leaves(jax.tree.map(check, found, whole))
    assert max(errors) > 1e-3  # minibatches differ


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_latents", "wards_and_rows"])
def test_a_silo_with_few_rows_takes_all_of_them(double, name):
    """The third has three rows, and the stack has twelve."""
    split = Split(name, 4)
    down, states = split.start()
    keys = jax.random.split(KEY, 3)
    noise = jax.vmap(split.some.step_noise)(keys, states.params)
    few = jax.tree.map(lambda a: a[2], (noise, states, split.data))
    _, places = split.minibatches.draw(few[0].which, few[2])
    rows = {
        p: jnp.zeros((len(few[2].masks["row"]), *e.shape[1:])).at[places[p]].set(e)
        if p in places
        else e
        for p, e in few[0].rows.items()
    }
    some = split.some.answer(few[0], down, *few[1:])
    whole = split.whole.answer(MinibatchNoise(rows), down, *few[1:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), some, whole)


@pytest.mark.slow
def test_batches_larger_than_every_silo_change_nothing(double):
    split = Split("wards_and_rows", 50)
    down, states = split.start()
    keys = jax.random.split(KEY, 3)
    noise = jax.vmap(split.some.step_noise)(keys, states.params)
    assert noise.rows["row"].shape[1] == 12
    some = gradients(split.some, noise, down, states, split.data)
    whole = gradients(split.whole, MinibatchNoise(noise.rows), down, states, split.data)
    jax.tree.map(np.testing.assert_array_equal, some, whole)


@pytest.mark.slow
def test_plates_above_others_stay_whole_and_rows_count_for_those_left_out():
    split = Split("wards_and_rows", 4)
    assert split.minibatches.plates == ("row",)
    assert split.minibatches.cut[0].arrays == ("ward", "x", "y")
    one = jax.tree.map(lambda a: a[1], split.data)
    some, places = draw_minibatch(split.minibatches, split.minibatches.noise(KEY), one)
    assert some.arrays["size"].shape == one.arrays["size"].shape
    assert float(some.weights["row"]) == 3.0
    np.testing.assert_array_equal(some.arrays["y"], one.arrays["y"][places["row"]])
    both = Split("two_kinds", 4).minibatches
    assert [rows.plates for rows in both.cut] == [("row",), ("visit",)]


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.SFVI, nf.SFVIAvg])
def test_runs_by_minibatches_reach_the_posterior(method):
    """Of a conjugate regression: 400 rows, 20 at a time."""
    r = np.random.default_rng(0)
    x = r.normal(size=(400, 2))
    y = x @ np.array([0.5, -1.0]) + r.normal(size=400)
    # Averages of few steps want silos that are not far from each other.
    ends = (250, 390) if method is nf.SFVI else (140, 270)
    silos = [dict(x=a, y=b) for a, b in zip(np.split(x, ends), np.split(y, ends), strict=True)]
    settings = {} if method is nf.SFVI else dict(aggregate="reverse_kl", local_steps=400)
    rounds = 3_000 if method is nf.SFVI else 12
    fit = method(plain, batch_size=20, num_particles=2, **settings)
    result = fit.run(KEY, rounds, silos, **QUIET)
    draws = result.sample_posterior(jax.random.key(1), 4_000)["beta"]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    sd, mean = np.sqrt(np.diag(covariance)), covariance @ x.T @ y
    assert (abs(draws.mean(0) - mean) < 0.2 * sd).all()
    assert (abs(draws.std(0) / sd - 1) < 0.15).all()


@pytest.mark.slow
def test_rounds_of_pvi_below_plates_that_stay_whole_reach_the_posterior():
    """Of a regression with effects of wards: 60 rows at each silo, 20 at a time."""
    r, silos, terms = np.random.default_rng(0), [], []
    for groups in (3, 4):
        x, ward = r.normal(size=(60, 2)), r.permutation(np.arange(60) % groups)
        y = 0.3 + 2 * r.normal(size=groups)[ward] + x @ np.array([0.5, -1]) + r.normal(size=60)
        silos.append(dict(x=x, y=y, ward=ward, size=np.zeros(groups)))
        precision = np.linalg.inv(np.eye(60) + 4.0 * (ward[:, None] == ward))
        terms.append((x.T @ precision @ x, x.T @ precision @ (y - 0.3)))
    covariance = np.linalg.inv(np.eye(2) + sum(a for a, _ in terms))
    sd, mean = np.sqrt(np.diag(covariance)), covariance @ sum(b for _, b in terms)
    local = nf.local.Optax(steps=1_500, batch_size=20, num_particles=2)
    result = nf.PVI(wards, local=local, evidence_draws=1).run(KEY, 2, silos, **QUIET)
    q = result.posterior()["beta"]
    assert (abs(q.mean - mean) < 0.2 * sd).all()
    assert (abs(np.sqrt(q.variance) / sd - 1) < 0.15).all()


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused():
    def nested(y):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        outer = nf.silo_plate("ward", y.shape[0], dim=-2)
        with outer, nf.silo_plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(beta, 1), obs=y)

    def sized(n, total):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with nf.silo_plate("row", n):
            numpyro.sample("y", dist.Normal(beta, 1), obs=jnp.full(n, total / n))

    def summing(y):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(beta + b.mean(), 1), obs=y)

    def joint(y, of):
        with nf.silo_plate("ward", of.shape[0]):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample(
                "y", dist.Normal(u.sum() + numpyro.sample("b", dist.Normal(0, 1)), 1), obs=y
            )

    rows = [dict(y=np.arange(6.0))]
    for model, silos, words in (
        (nested, [dict(y=np.zeros((3, 4)))], "two silo plates at once"),
        (sized, [dict(n=4, total=2.0)], "no array has as many rows as a silo_plate"),
        (summing, rows, "a minibatch is another model"),
    ):
        with pytest.raises(nf.GuideError, match=words):
            nf.SFVI(model, batch_size=2, start=None).run(KEY, 1, silos, **QUIET)
    with pytest.raises(ValueError, match=r"batch_size .*positive"):
        nf.SFVI(plain, batch_size=0)
    silos = [dict(y=np.zeros(5), of=np.zeros(3))]
    weighed = nf.LocallyEnhanced(draws={"ward": 3})
    with pytest.raises(nf.GuideError, match="3 draws at silo_plate 'ward'"):
        nf.SFVI(joint, batch_size=2, objective=weighed, start=None).run(KEY, 1, silos, **QUIET)
    guide = nf.guides.Structured(locals="joint")
    with pytest.raises(nf.GuideError, match="locals='joint' for silo_plate 'row'"):
        nf.SFVI(joint, batch_size=2, guide=guide, start=None).run(KEY, 1, silos, **QUIET)


# --- some of the silos ---------------------------------------------------------------------------


@pytest.mark.slow
def test_participants_count_for_all():
    """Under sgd the server's step at given noise is unbiased over who takes part."""
    with jax.enable_x64(True):
        split = Split("with_latents", 4)
        parts = SFVIAlgorithm(*[getattr(split.whole, f) for f in FIELDS], in_part=True)
        down, states = split.start()
        server = parts.init_server(KEY)
        noise = jax.vmap(parts.step_noise)(jax.random.split(KEY, 3), states.params)
        states = states._replace(centre=jnp.tile(down.coordinates.centre, (3, 1)))
        eps = parts.algorithm().round.noise(KEY)

        def step(who):
            down = replayed_part(parts.algorithm().round, server, eps, who)
            some = jax.tree.map(lambda a: a[who], (noise, states, split.data))
            reply, _ = jax.vmap(parts.answer, (0, None, 0, 0))(some[0], down, *some[1:])
            total = jax.tree.map(lambda a: a.sum(0), reply.up)
            replies = Replies(total, jnp.array(True), jnp.ones(()))
            return replayed_part(parts.algorithm().round, server, eps, who, None, [replies])[
                0
            ].params

        pairs = [step(jnp.array(who)) for who in ((0, 1), (0, 2), (1, 2))]
        mean = jax.tree.map(lambda *a: sum(a) / 3, *pairs)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
            mean,
            step(jnp.arange(3)),
        )


FIELDS = ("model", "guide", "bound", "optim", "num_particles", "num_silos")


def test_silos_keep_the_servers_centre_where_they_may_be_left_out():
    split = Split("with_latents", 4)
    data = jax.tree.map(lambda a: a[0], split.data)
    parts = SFVIAlgorithm(*[getattr(split.whole, f) for f in FIELDS], in_part=True)
    assert split.whole.init_silo(KEY, data).centre is None
    assert parts.init_silo(KEY, data).centre.shape == (split.whole.model.dim,)


@pytest.mark.slow
@pytest.mark.parametrize("framed", [False, True])
def test_a_silo_that_was_away_has_the_guide_that_it_had(double, framed):
    """As a function of the globals, wherever their centre is by now."""
    split = Split("wards_and_rows", 4)
    guide, data = split.whole.guide, jax.tree.map(lambda a: a[0], split.data)
    state = split.whole.init_silo(KEY, data)
    r = np.random.default_rng(0)
    here, there, u = (jnp.asarray(r.normal(size=2)) for _ in range(3))
    state = state._replace(params=jitter(state.params), centre=here)
    if framed:
        frames, _ = guide.to_frame(jitter(state.params.guide, seed=1))
        state = state._replace(frames=frames)
    moved = split.whole.recentred(state.params, state.frames, there - here, data)
    after = state._replace(params=moved, centre=there)

    def draws(state):
        own = split.whole.algorithm().private(state)
        eta, seen = own.guide, Coordinates(u, own.centre)
        outer = {}
        for p in (*guide.outer_plates, *guide.row_plates):
            above = guide.offset_of_plate(p, eta, seen.offset, outer, data)
            eps = jnp.asarray(np.random.default_rng(1).normal(size=eta[p]["loc"].shape))
            outer[p] = guide.locals[p].draw(eta[p], above, eps)
        return outer

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), draws(after), draws(state)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(nf.schedules.Random(2), marks=pytest.mark.slow),
        pytest.param(nf.schedules.Given([[0, 1], [2, 3]]), marks=pytest.mark.slow),
        "sequential",
    ],
)
def test_runs_with_some_of_the_silos_reach_the_posterior(schedule):
    r = np.random.default_rng(0)
    x = r.normal(size=(400, 2))
    y = x @ np.array([0.5, -1.0]) + r.normal(size=400)
    silos = [dict(x=x[j::4], y=y[j::4]) for j in range(4)]
    result = nf.SFVI(plain, schedule=schedule).run(KEY, 4_000, silos, **QUIET)
    draws = result.sample_posterior(jax.random.key(1), 4_000)["beta"]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    sd, mean = np.sqrt(np.diag(covariance)), covariance @ x.T @ y
    assert (abs(draws.mean(0) - mean) < 0.3 * sd).all()
    assert (abs(draws.std(0) / sd - 1) < 0.15).all()


@pytest.mark.slow
def test_averages_are_of_those_that_take_part(double):
    """All silos hold the same rows: then whoever takes part, the average is the same."""
    (silo,) = silos_of("plain", (8,))
    settings = dict(local_steps=5, aggregate="forward_kl", start=None, optim=optax.sgd(1e-3))
    settings |= dict(num_particles=2_000)
    found = []
    for who in ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[3, 1], [2, 0]]):
        avg = nf.SFVIAvg(plain, schedule=nf.schedules.Given(who), weights="even", **settings)
        avg = avg.run(KEY, 1, [silo] * 4, **QUIET)
        found.append(avg.state.server.params.guide["loc"])
    assert (abs(found[0] - found[1]) < 0.1 * abs(found[1])).all()  # up to the silos' own noise
    assert (abs(found[2] - found[1]) < 0.2 * abs(found[1])).all()


def test_a_silo_that_does_not_take_part_keeps_its_state_and_the_count_of_its_optimiser():
    silos = silos_of("with_latents", (5, 5, 5, 5))
    sfvi = nf.SFVI(
        with_latents,
        optim=optax.adam(0.01),
        schedule=nf.schedules.Given([[0, 1], [0, 2], [1, 3], [2, 3]]),
        start=None,
    )
    result = sfvi.run(KEY, 3, silos, **QUIET)
    (stack,) = result.state.silos
    np.testing.assert_array_equal(stack.opt_state[0].count, [2, 2, 1, 1])
    before = sfvi.run(KEY, 2, silos, **QUIET).state
    fewer = before.silos[0]
    for a, b in zip(jax.tree.leaves(stack.params), jax.tree.leaves(fewer.params), strict=True):
        np.testing.assert_array_equal(a[np.array([0, 2])], b[np.array([0, 2])])
        assert (a[np.array([1, 3])] != b[np.array([1, 3])]).any()
    again = sfvi.run(KEY, 1, silos, init_state=before, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, again.state.silos, result.state.silos)


@pytest.mark.slow
def test_losses_are_minus_the_bound_of_all_silos_whatever_the_schedule():
    """Steps of nothing: each round looks at the same guide, by other draws."""
    silos = silos_of("plain", (5, 5, 5, 5))
    schedules = "synchronous", "sequential", nf.schedules.Sequential([0, 1, 2, 3] * 2)
    means = [
        nf.SFVI(plain, optim=optax.sgd(0.0), num_particles=50, schedule=schedule, start=None)
        .run(KEY, 20, silos, **QUIET)
        .losses.mean()
        for schedule in schedules
    ]
    np.testing.assert_allclose(means, means[0], rtol=0.02)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (nf.schedules.Random(5), "size=5 silos cannot take part"),
        (nf.schedules.Given([[0, 4], [1, 2]]), "who holds 4"),
        (nf.schedules.Given([[0, 0], [1, 2]]), "who never visits silo 3|twice in round 0"),
        (nf.schedules.Given([[0, 1], [2, 3], [0, 1]]), "silo 0 2 times and silo 2 1 times"),
        (nf.schedules.Given([0, 1, 2, 3]), "who must hold as many silo numbers"),
        (nf.schedules.Sequential([0, 1, 1, 2, 3]), "silo 1 2 times and silo 0 1 times"),
        ("asynchronous", "gradients must be of where the step is taken"),
    ],
)
def test_schedules_that_cannot_work_are_refused(schedule, words):
    silos = silos_of("plain", (5, 5, 5, 5))
    with pytest.raises(ValueError, match=words):
        nf.SFVI(plain, schedule=schedule, start=None).run(KEY, 1, silos, **QUIET)
