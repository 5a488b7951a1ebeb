"""A saved fit is numbers and names; it is read back bit for bit, and only where it belongs."""

import json
import os
import stat
import subprocess
import sys
import textwrap
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from laid_open import laid_open
from scripts import details

import numpyro_fed as nf
from numpyro_fed.basics.files import read_npz, write_atomically, write_npz
from numpyro_fed.posterior import saving

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


simple = models.level(10, 2)


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


@pytest.mark.slow
def test_a_fit_is_read_back_and_continued_bit_for_bit_in_a_fresh_process(fit, path):
    script = f"""
        import sys
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
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


@pytest.mark.slow
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
    first = laid_open(noisy, silos()).result()
    first.save(tmp_path / "fit")
    again = noisy.load(tmp_path / "fit", silos())
    assert jax.tree.structure(again.state) == jax.tree.structure(first.state)
    assert identical(again.state, first.state)


@pytest.mark.slow
def test_files_hold_numbers_and_names_only(fit, path):
    with np.load(f"{path}.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays}
    text = json.loads(found.pop("description.json"))
    assert all(a.dtype.kind in "fiub" for a in found.values())
    assert len(found) == 1 + len(jax.tree.leaves(fit.state))
    np.testing.assert_array_equal(found["losses"], fit.losses)
    assert [file.name for file in path.parent.iterdir()] == ["fit.npz"]
    assert text["version"] == saving.VERSION
    assert text["settings"]["method"] == "SFVI"
    assert text["sizes"] == [{"row": 3}, {"row": 2}]
    assert set(text["sites"]) == {"tau", "mu", "scale", "offset", "b", "y"}


@pytest.mark.slow
def test_data_are_not_saved(path):
    secret = silos()[0]["x"].astype(np.float32)
    with np.load(f"{path}.npz") as arrays:
        for name in set(arrays) - {"description.json"}:
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
    slow_but(
        [
            ({"model": renamed}, r"'nu' .*\['latent'"),
            ({"model": supported}, r"'scale'.*[Pp]ositive.*[Ii]nterval"),
            ({"num_particles": 2}, r"'num_particles' as 1, but here it is 2"),
            (
                {"objective": nf.LocallyEnhanced(draws=3)},
                r"'objective' as ELBO.*here it is .*draws=3",
            ),
            (
                {"guide": Structured(globals="diagonal")},
                r"'guide' as .*full.*here it is .*diagonal",
            ),
            (
                {"guide": Structured(couple_scale=False)},
                r"'guide' .*True, True.*True, False",
            ),
            (
                {"guide": Structured(globals="low_rank")},
                r"'guide' as .*full.*here it is .*low_rank",
            ),
            ({"optim": optax.sgd(1e-2)}, r"expected nothing for .*opt_state.*optimiser"),
            ({"optim": optax.sgd(1e-2, momentum=0.9)}, r"opt_state.*trace.*found nothing"),
        ],
        0,
        4,
        7,
    ),
)
def test_a_fit_of_other_settings_is_refused_and_says_what_differs(path, settings, message):
    with pytest.raises(nf.SavedStateError, match=message):
        method(**settings).load(path, silos())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (3, 4),
            r"\[{'row': 3}, {'row': 2}\], .*\[{'row': 3}, {'row': 4}\]",
        ),
        ((2, 3), r"\[{'row': 2}, {'row': 3}\].*silos"),
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


def rewritten(path, change):
    """The file with its arrays and its description as ``change(arrays, description)`` left them."""
    arrays, description = read_npz(path)
    change(arrays, description)
    write_npz(path, arrays, description)


def test_a_fit_of_another_version_is_refused(path):
    rewritten(path, lambda arrays, description: description.update(version=99))
    with pytest.raises(nf.SavedStateError, match=rf"version 99, .*version {saving.VERSION}"):
        METHOD.load(path, silos())


def test_a_missing_file_is_named(path):
    with pytest.raises(nf.SavedStateError, match=r"no file .*another\.npz.*save"):
        METHOD.load(path.with_name("another"), silos())


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_file_is_named(path, share):
    file = Path(f"{path}.npz")
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(nf.SavedStateError, match=r"fit\.npz cannot be read"):
        METHOD.load(path, silos())


def test_another_kind_of_file_is_named(path):
    Path(f"{path}.npz").write_text("[1, 2]")
    with pytest.raises(nf.SavedStateError, match=r"fit\.npz cannot be read"):
        METHOD.load(path, silos())
    with open(f"{path}.npz", "wb") as stream:
        np.save(stream, np.arange(3))
    with pytest.raises(nf.SavedStateError, match=r"fit\.npz cannot be read"):
        METHOD.load(path, silos())


@pytest.mark.parametrize("bit", [1, 128])
def test_no_damaged_byte_changes_what_is_loaded(tmp_path, bit):
    """It is refused, or nothing depends on it (a date, say)."""
    arrays = {"losses": np.arange(3.0), "state.x": np.ones((2, 2), np.float32)}
    write_npz(tmp_path / "fit", arrays, {"version": 2})
    file = tmp_path / "fit.npz"
    content = file.read_bytes()
    refused = 0
    for i in range(len(content)):
        file.write_bytes(content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :])
        try:
            found, said = read_npz(tmp_path / "fit")
        except nf.SavedStateError:
            refused += 1
            continue
        assert said == {"version": 2}
        assert found.keys() == arrays.keys()
        assert all(identical(found[name], arrays[name]) for name in arrays)
    assert refused > len(content) / 2


@pytest.mark.slow
def test_half_precision_states_are_read_back(tmp_path):
    adam = method(optim=optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    fit = adam.run(KEY, 3, silos(), **quiet)
    fit.save(tmp_path / "fit")
    assert identical(adam.load(tmp_path / "fit", silos()).state, fit.state)


# --- a save that is cut short ----------------------------------------------------------------


def test_a_save_that_fails_leaves_the_one_before(fit, path, monkeypatch):
    """Wherever it fails: while arrays are written, before they are on the disk, at the name."""

    def fails(*args, **kwargs):
        raise KeyboardInterrupt

    for module, name in ((zipfile.ZipFile, "writestr"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            with pytest.raises(KeyboardInterrupt):
                replace(fit, losses=fit.losses + 1).save(path)
        np.testing.assert_array_equal(METHOD.load(path, silos()).losses, fit.losses)
        assert [file.name for file in path.parent.iterdir()] == ["fit.npz"]


def test_what_killed_saves_left_behind_goes_after_an_hour(tmp_path):
    for age, name in ((4_000, ".a.old.part"), (10, ".a.new.part"), (4_000, ".b.old.part")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_atomically(tmp_path / "a", lambda stream: stream.write(b"1"))
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"a", ".a.new.part", ".b.old.part"}


def test_a_link_stays_one_and_a_file_is_for_its_owner(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    write_atomically(tmp_path / "link", lambda stream: stream.write(b"1"))
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "there" / "file").stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child is forked")
def test_after_a_kill_the_last_save_or_the_one_before_is_there(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "kill_during_save.py"
    report = tmp_path / "report.json"
    command = [sys.executable, script, "--kills", "20", "--json", report]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    found = details(report)
    assert found["kills"] == 20
    assert found["lost"] == 0
    assert found["last"] + found["next"] == 20
    assert found["cut_short"] > 0  # kills that came while a file was written


# --- another text, other data, damaged numbers -----------------------------------------------


def wider(x, y=None):
    """As ``model``, but for the scale of a prior, which changes no shape and no support."""
    tau = numpyro.param("tau", 0.5, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 6))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with nf.silo_plate("row", x.shape[0]):
        offset = numpyro.param("offset", jnp.zeros(x.shape[0]))
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b + offset * x, scale), obs=y)


def test_another_text_of_the_same_sites_is_refused(path):
    with pytest.raises(nf.SavedStateError, match="text is another"):
        method(model=wider).load(path, silos())


def test_under_other_versions_a_text_is_known_by_its_source(path):
    """Of which programs are not the same: here that is feigned by another hash."""

    def older(arrays, description):
        description["made"].update(text="another", versions={"jax": "0.1", "numpyro": "0.1"})

    rewritten(path, older)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHOD.load(path, silos())
    with pytest.warns(UserWarning, match=r"jax 0.1 and numpyro 0.1.*source"):
        method(model=wider).load(path, silos())


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process(fit):
    here = fit.provenance().text()
    script = f"""
        import sys
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
        from laid_open import laid_open
        from test_saving import method, silos
        print(laid_open(method(), silos()).result().provenance().text())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [here]


def test_other_data_are_refused_by_silo_and_array(path):
    other = silos()
    other[1]["y"] = other[1]["y"] + 1e-3
    with pytest.raises(nf.SavedStateError, match=r"^silo 1, 'y'"):
        METHOD.load(path, other)


def test_rows_in_another_order_are_refused(path):
    other = silos()
    other[0] = {k: v[::-1] for k, v in other[0].items()}
    with pytest.raises(nf.SavedStateError, match=r"^silo 0, 'x', 'y'.*same order"):
        METHOD.load(path, other)


@pytest.mark.slow
def test_swapped_silos_are_refused_by_number(tmp_path):
    held = silos((2, 2, 2))
    METHOD.run(KEY, 2, held, **quiet).save(tmp_path / "fit")
    with pytest.raises(nf.SavedStateError, match=r"^silos 0 and 2 .*swapped"):
        METHOD.load(tmp_path / "fit", held[::-1])
    with pytest.raises(nf.SavedStateError, match=r"silo 0 .* silo 2 .*, silo 1 "):
        METHOD.load(tmp_path / "fit", [held[2], held[0], held[1]])


def test_swapped_silos_of_unequal_sizes_are_refused_by_number(path):
    with pytest.raises(nf.SavedStateError, match=r"^silos 0 and 1 .*swapped"):
        METHOD.load(path, silos()[::-1])


def test_what_reading_makes_equal_is_equal(fit, path):
    """Order of keys, and casts to the precision of the fit."""
    same = [{"y": s["y"].astype(np.float32), "x": list(map(float, s["x"]))} for s in silos()]
    assert identical(METHOD.load(path, same).state, fit.state)


def test_digests_of_two_files_cannot_be_compared(fit, path):
    fit.save(path.with_name("again"))
    one, two = (read_npz(p)[1]["made"] for p in (path, path.with_name("again")))
    assert one["text"] == two["text"]
    assert one["digests"].keys() == two["digests"].keys() == {"silo 0", "silo 1"}
    pairs = [(one["digests"][s][a], two["digests"][s][a]) for s in one["digests"] for a in "xy"]
    assert all(a != b for a, b in pairs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_refused_by_its_leaf(path, value):
    def spoil(arrays, description):
        name = next(name for name in arrays if "loc" in name)
        arrays[name] = arrays[name].copy()
        arrays[name].ravel()[0] = value

    rewritten(path, spoil)
    with pytest.raises(nf.SavedStateError, match=r"state\..*loc.*: 1 of 2 .*NaN"):
        METHOD.load(path, silos())
