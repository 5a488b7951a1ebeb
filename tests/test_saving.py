"""A saved fit is numbers and names; it is read back bit for bit, and only where it belongs."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf

KEY = jax.random.key(0)
quiet = {"progress_bar": False}


def model(x, y=None):
    tau = numpyro.param("tau", 0.5, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with nf.silo_plate("row", x.shape[0]):
        offset = numpyro.param("offset", jnp.zeros(x.shape[0]))
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b + offset * x, scale), obs=y)


def silos(sizes=(3, 2)):
    r = np.random.default_rng(0)
    return [{"x": r.normal(size=n), "y": r.normal(size=n)} for n in sizes]


def method(**kwargs):
    return nf.SFVI(kwargs.pop("model", model), **{"optim": optax.adam(1e-2), **kwargs}, start=None)


METHOD = method()


@pytest.fixture(scope="module")
def fit():
    return METHOD.run(KEY, 7, silos(), **quiet)


@pytest.fixture
def path(fit, tmp_path):
    fit.save(tmp_path / "fit")
    return tmp_path / "fit"


def identical(a, b):
    def same(x, y):
        return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())

    return jax.tree.all(jax.tree.map(same, a, b))


# --- there and back --------------------------------------------------------------------------


def test_a_fit_is_read_back_and_continued_bit_for_bit_in_a_fresh_process(fit, path):
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_saving import KEY, method, quiet, silos
        again = method().load({str(path)!r}, silos())
        again.save({str(path) + "-again"!r})
        method().run(KEY, 5, silos(), init_state=again.state, **quiet).save({str(path) + "-on"!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    again = METHOD.load(f"{path}-again", silos())
    assert identical(again.state, fit.state)
    np.testing.assert_array_equal(again.losses, fit.losses)
    draws = [r.sample_posterior(KEY, 4, silo=1) for r in (again, fit)]
    assert identical(*draws)
    whole, rest = METHOD.run(KEY, 12, silos(), **quiet), METHOD.load(f"{path}-on", silos())
    assert identical(rest.state, whole.state)
    np.testing.assert_array_equal(np.concatenate([fit.losses, rest.losses]), whole.losses)


def test_a_fit_of_the_host_runtime_is_read_back(tmp_path):
    fit = METHOD.run(KEY, 2, silos(), runtime="host", **quiet)
    fit.save(tmp_path / "fit")
    again = METHOD.load(tmp_path / "fit", silos(), runtime="host")
    assert identical(again.state, fit.state)
    with pytest.raises(nf.SavedStateError, match="runtime"):
        METHOD.load(tmp_path / "fit", silos())


def test_keys_in_the_state_of_an_optimiser_are_read_back(tmp_path):
    noisy = optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(3)), optax.sgd(1e-2))
    noisy = method(optim=noisy, guide=nf.guides.MeanField())
    fit, held = noisy._prepare(silos(), "simulation")
    first = nf.Result(np.zeros(0), fit.initial_state(held), fit, held)
    first.save(tmp_path / "fit")
    again = noisy.load(tmp_path / "fit", silos())
    assert jax.tree.structure(again.state) == jax.tree.structure(first.state)
    assert identical(again.state, first.state)


def test_files_hold_numbers_and_names_only(fit, path):
    with np.load(f"{path}.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays}
    assert all(a.dtype.kind in "fiub" for a in found.values())
    assert len(found) == 1 + len(jax.tree.leaves(fit.state))
    np.testing.assert_array_equal(found["losses"], fit.losses)
    text = json.loads(Path(f"{path}.json").read_text())
    assert text["version"] == 1
    assert text["settings"]["method"] == "SFVI"
    assert text["sizes"] == [{"row": 3}, {"row": 2}]
    assert set(text["sites"]) == {"tau", "mu", "scale", "offset", "b", "y"}


def test_data_are_not_saved(path):
    secret = silos()[0]["x"].astype(np.float32)
    with np.load(f"{path}.npz") as arrays:
        for name in arrays:
            assert not np.isin(secret, arrays[name]).any()


# --- what does not belong --------------------------------------------------------------------


def renamed(x, y=None):
    numpyro.param("tau", 0.5, constraint=dist.constraints.positive)
    nu = numpyro.sample("nu", dist.Normal(0, 5))
    numpyro.sample("scale", dist.HalfNormal(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.param("offset", jnp.zeros(x.shape[0]))
        b = numpyro.sample("b", dist.Normal(nu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def supported(x, y=None):
    numpyro.param("tau", 0.5, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    numpyro.sample("scale", dist.Uniform(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.param("offset", jnp.zeros(x.shape[0]))
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


Structured = nf.guides.Structured


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": renamed}, r"its sites have 'nu' as None, but here it is \['latent'"),
        ({"model": supported}, r"'scale'.*[Pp]ositive.*here it is.*[Ii]nterval"),
        ({"num_particles": 2}, r"'num_particles' as 1, but here it is 2"),
        (
            {"objective": nf.LocallyEnhanced(draws=3)},
            r"'objective' as ELBO.*here it is .*draws=3",
        ),
        ({"guide": Structured(globals="diagonal")}, r"'guide' as .*full.*here it is .*diagonal"),
        (
            {"guide": Structured(couple_scale=False)},
            r"'guide' as .*True, True.*here it is .*True, False",
        ),
        (
            {"guide": Structured(globals="low_rank")},
            r"'guide' as .*full.*here it is .*low_rank",
        ),
        ({"optim": optax.sgd(1e-2)}, r"expected nothing for .*opt_state.*optimiser"),
        ({"optim": optax.sgd(1e-2, momentum=0.9)}, r"opt_state.*trace.*found nothing"),
    ],
)
def test_a_fit_of_other_settings_is_refused_and_says_what_differs(path, settings, message):
    with pytest.raises(nf.SavedStateError, match=message):
        method(**settings).load(path, silos())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (3, 4),
            r"sizes are \[{'row': 3}, {'row': 2}\], but here they are \[{'row': 3}, {'row': 4}\]",
        ),
        ((2, 3), r"but here they are \[{'row': 2}, {'row': 3}\].*silos it was made with"),
        ((3,), r"but here they are \[{'row': 3}\]"),
    ],
)
def test_a_fit_of_other_silos_is_refused_and_says_what_differs(path, sizes, message):
    with pytest.raises(nf.SavedStateError, match=message):
        METHOD.load(path, silos(sizes))


def test_a_fit_of_another_precision_is_refused(path):
    with (
        jax.enable_x64(True),
        pytest.raises(nf.SavedStateError, match=r"float64.*float32.*precision"),
    ):
        METHOD.load(path, silos())


def test_a_fit_of_another_version_is_refused(path):
    text = Path(f"{path}.json")
    text.write_text(json.dumps({**json.loads(text.read_text()), "version": 2}))
    with pytest.raises(nf.SavedStateError, match=r"version 2, this package reads version 1"):
        METHOD.load(path, silos())


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_a_missing_file_is_named(path, suffix):
    Path(f"{path}{suffix}").unlink()
    with pytest.raises(nf.SavedStateError, match=rf"no file .*fit\{suffix}.*save"):
        METHOD.load(path, silos())


@pytest.mark.parametrize("suffix", [".npz", ".json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_file_is_named(path, suffix, share):
    file = Path(f"{path}{suffix}")
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(nf.SavedStateError, match=rf"fit\{suffix} cannot be read"):
        METHOD.load(path, silos())


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_another_kind_of_file_is_named(path, suffix):
    Path(f"{path}{suffix}").write_text("[1, 2]")
    with pytest.raises(nf.SavedStateError, match=rf"fit\{suffix} cannot be read"):
        METHOD.load(path, silos())


def test_half_precision_states_are_read_back(tmp_path):
    adam = method(optim=optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    fit = adam.run(KEY, 3, silos(), **quiet)
    fit.save(tmp_path / "fit")
    assert identical(adam.load(tmp_path / "fit", silos()).state, fit.state)
