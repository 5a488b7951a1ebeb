"""Textbook data sets, cut into three silos by their groups, fitted by formula; beside them R.

The data are those of R's packages lme4, nlme, MASS, survival and ordinal, which R writes here and
fits as well (Debian: r-cran-lme4 r-cran-nlme r-cran-survival r-cran-ordinal). R's estimates are
maximum likelihood or REML on pooled rows, and ours posterior means under the default priors of
``nf.formula``: a parameter agrees if they are closer than one posterior sd, an sd of a group, whose
posterior is skewed, if R's estimate is within the central 90 %.

    python benchmarks/textbook.py --json textbook.json
    python benchmarks/textbook.py --only Pastes,epil
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
from record import table_row, write

import numpyro_fed as nf

R = r"""
suppressMessages({library(lme4); library(nlme); library(MASS); library(survival)})
args <- commandArgs(TRUE); place <- args[1]; found <- list()
keep <- function(name, d) write.csv(d, file.path(place, paste0(name, ".csv")), row.names=FALSE)
add <- function(name, beta, sds=NULL) found[[name]] <<- as.list(c(beta, sds))
sd_of <- function(m) { v <- as.data.frame(VarCorr(m)); v <- v[is.na(v$var2),]
  setNames(v$sdcor, paste("sd", v$grp, ifelse(is.na(v$var1), "", v$var1))) }
mixed <- function(name, m) add(name, fixef(m), sd_of(m))
epil <- transform(epil, lbase=log(base/4), lage=log(age))
bacteria <- transform(bacteria, y=as.integer(y == "y"), late=as.integer(week > 2))
ticks <- transform(grouseticks, H=as.numeric(scale(HEIGHT)))
lung <- na.omit(lung[, c("inst", "time", "status", "age", "sex", "ph.ecog")])
lung <- transform(lung, ecog=ph.ecog, cens=as.integer(status == 1))
cake <- transform(cake, temp=as.numeric(as.character(temperature)))
Oats <- as.data.frame(Oats); Orthodont <- as.data.frame(Orthodont)
totals <- max(esoph$ncases / esoph$ncontrols, na.rm=TRUE) <= 1  # as R 4.0.3 and older have them
esoph <- transform(esoph, n=ncontrols + if (totals) 0 else ncases, age=unclass(agegp),
  alcohol=unclass(alcgp), tobacco=unclass(tobgp))
esoph <- esoph[esoph$n > 0, c("ncases", "n", "age", "alcohol", "tobacco")]
names <- c("sleepstudy", "cbpp", "Dyestuff", "Pastes", "Penicillin", "epil", "bacteria", "ticks",
  "lung", "cake", "Oats", "Orthodont", "quine", "warpbreaks", "esoph")
for (name in names) keep(name, get(name))
keep("wine", ordinal::wine)
mixed("sleepstudy", lmer(Reaction ~ Days + (1 + Days | Subject), sleepstudy))
mixed("cbpp", glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), cbpp, binomial,
  nAGQ=9))
mixed("Dyestuff", lmer(Yield ~ 1 + (1 | Batch), Dyestuff))
mixed("Pastes", lmer(strength ~ 1 + (1 | batch/cask), Pastes))
mixed("Penicillin", lmer(diameter ~ 1 + (1 | plate) + (1 | sample), Penicillin))
mixed("epil", glmer(y ~ lbase * trt + lage + V4 + (1 | subject), epil, poisson))
mixed("bacteria", glmer(y ~ trt + late + (1 | ID), transform(bacteria, trt=relevel(trt, "drug")),
  binomial, nAGQ=15))
mixed("ticks", glmer(TICKS ~ YEAR + H + (1 | BROOD) + (1 | LOCATION), ticks, poisson))
mixed("cake", lmer(angle ~ temp + recipe + (1 | replicate/recipe), cake))
mixed("Oats", lmer(yield ~ nitro + (1 | Block/Variety), Oats))
mixed("Orthodont", lmer(distance ~ age * Sex + (1 + age | Subject),
  transform(Orthodont, Sex=relevel(Sex, "Female"))))
add("quine", coef(glm.nb(Days ~ Eth + Sex + Age + Lrn, quine)))
add("warpbreaks", coef(glm.nb(breaks ~ wool * tension,
  transform(warpbreaks, tension=factor(tension, c("H", "L", "M"))))))
add("esoph", coef(glm(cbind(ncases, n - ncases) ~ age + alcohol + tobacco, binomial, esoph)))
m <- survreg(Surv(time, status) ~ age + sex + ecog, lung, dist="weibull")
add("lung", coef(m), c(shape=1 / m$scale))
m <- ordinal::clmm(rating ~ temp + contact + (1 | judge), data=transform(ordinal::wine,
  temp=relevel(temp, "cold")), nAGQ=10)
add("wine", coef(m), setNames(sqrt(unlist(VarCorr(m))), "sd judge (Intercept)"))
words <- function(x) {
  paste0("{", paste(sprintf('"%s": %.8g', names(x), unlist(x)), collapse=", "), "}") }
cat("{", paste(sprintf('"%s": %s', names(found), sapply(found, words)), collapse=", "), "}")
"""


class TextbookSet(NamedTuple):
    """A data set: its formula, the column by which rows are cut into silos, and R's names."""

    formula: str
    family: str
    cut: str | None
    names: dict[str, str]  # ours to R's
    shared: tuple[str, ...] = ()


SETS = {
    "sleepstudy": TextbookSet(
        "Reaction ~ Days + (1 + Days | Subject)",
        "gaussian",
        "Subject",
        {
            "b[Days]": "Days",
            "sd_Subject[Intercept]": "sd Subject (Intercept)",
            "sd_Subject[Days]": "sd Subject Days",
            "sigma": "sd Residual ",
        },
    ),
    "cbpp": TextbookSet(
        "incidence | trials(size) ~ C(period) + (1 | herd)",
        "binomial",
        "herd",
        {"b[C_period[4]]": "period4", "sd_herd": "sd herd (Intercept)"},
    ),
    "Dyestuff": TextbookSet(
        "Yield ~ 1 + (1 | Batch)",
        "gaussian",
        "Batch",
        {"Intercept": "(Intercept)", "sd_Batch": "sd Batch (Intercept)", "sigma": "sd Residual "},
    ),
    "Pastes": TextbookSet(
        "strength ~ 1 + (1 | batch/cask)",
        "gaussian",
        "batch",
        {
            "Intercept": "(Intercept)",
            "sd_batch": "sd batch (Intercept)",
            "sd_batch_cask": "sd cask:batch (Intercept)",
        },
    ),
    "Penicillin": TextbookSet(
        "diameter ~ 1 + (1 | plate) + (1 | sample)",
        "gaussian",
        "plate",
        {"sd_plate": "sd plate (Intercept)", "sd_sample": "sd sample (Intercept)"},
        ("sample",),
    ),
    "epil": TextbookSet(
        "y ~ lbase * trt + lage + V4 + (1 | subject)",
        "poisson",
        "subject",
        {
            "b[trt[progabide]]": "trtprogabide",
            "b[lbase]": "lbase",
            "sd_subject": "sd subject (Intercept)",
        },
    ),
    "bacteria": TextbookSet(
        "y ~ trt + late + (1 | ID)",
        "bernoulli",
        "ID",
        {"b[trt[placebo]]": "trtplacebo", "b[late]": "late", "sd_ID": "sd ID (Intercept)"},
    ),
    "ticks": TextbookSet(
        "TICKS ~ C(YEAR) + H + (1 | BROOD) + (1 | LOCATION)",
        "poisson",
        "LOCATION",
        {
            "b[C_YEAR[96]]": "YEAR96",
            "b[H]": "H",
            "sd_BROOD": "sd BROOD (Intercept)",
            "sd_LOCATION": "sd LOCATION (Intercept)",
        },
    ),
    "cake": TextbookSet(
        "angle ~ temp + recipe + (1 | replicate/recipe)",
        "gaussian",
        "replicate",
        {"b[temp]": "temp", "sd_replicate": "sd replicate (Intercept)", "sigma": "sd Residual "},
    ),
    "Oats": TextbookSet(
        "yield_ ~ nitro + (1 | Block/Variety)",
        "gaussian",
        "Block",
        {
            "b[nitro]": "nitro",
            "sd_Block_Variety": "sd Variety:Block (Intercept)",
            "sigma": "sd Residual ",
        },
    ),
    "Orthodont": TextbookSet(
        "distance ~ age * Sex + (1 + age | Subject)",
        "gaussian",
        "Subject",
        {"b[age]": "age", "b[age:Sex[Male]]": "age:SexMale", "sigma": "sd Residual "},
    ),
    "quine": TextbookSet(
        "Days ~ Eth + Sex + Age + Lrn",
        "negbinomial",
        None,
        {"b[Eth[N]]": "EthN", "b[Age[F3]]": "AgeF3", "b[Lrn[SL]]": "LrnSL"},
    ),
    "warpbreaks": TextbookSet(
        "breaks ~ wool * tension",
        "negbinomial",
        None,
        {"b[wool[B]]": "woolB", "b[tension[L]]": "tensionL"},
    ),
    "esoph": TextbookSet(
        "ncases | trials(n) ~ age + alcohol + tobacco",
        "binomial",
        None,
        {"b[age]": "age", "b[alcohol]": "alcohol", "b[tobacco]": "tobacco"},
    ),
    "lung": TextbookSet(
        "time | cens(cens) ~ age + sex + ecog",
        "weibull",
        "inst",
        {"b[sex]": "sex", "b[ecog]": "ecog", "shape": "shape"},
    ),
    "wine": TextbookSet(
        "rating ~ temp + contact + (1 | judge)",
        "cumulative",
        "judge",
        {"b[temp[warm]]": "tempwarm", "b[contact[yes]]": "contactyes"},
    ),
}


def from_r() -> tuple[dict[str, pd.DataFrame], dict[str, dict[str, float]]]:
    """Return the data sets, and R's estimates."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "textbook.R"
        script.write_text(R)
        ran = subprocess.run(
            ["Rscript", str(script), folder], check=True, capture_output=True, text=True
        )
        tables = {name: pd.read_csv(Path(folder) / f"{name}.csv") for name in SETS}
    # The name of a column that a sentence of Python has.
    tables["Oats"] = tables["Oats"].rename(columns={"yield": "yield_"})
    return tables, json.loads(ran.stdout)


def silos_of(table: pd.DataFrame, cut: str | None) -> dict[str, pd.DataFrame]:
    """Return three silos: members of the column ``cut`` in turn, or rows in turn."""
    members = np.arange(len(table)) if cut is None else pd.factorize(table[cut])[0]
    return {f"silo {j}": table[members % 3 == j].reset_index(drop=True) for j in range(3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="names of data sets, with commas between")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [name for name in args.only.split(",") if name] or list(SETS)
    (tables, references), rows, details = from_r(), [], {}
    warnings.simplefilter("ignore")
    for name in chosen:
        one, began = SETS[name], time.process_time()
        f = nf.formula(one.formula, family=one.family, shared=one.shared)
        silos = f.silos(silos_of(tables[name], one.cut))
        fitted = nf.fit(jax.random.key(0), f.model, silos, progress_bar=False)
        seconds, table = time.process_time() - began, fitted.summary()
        cells, apart = [], []
        for own, theirs in one.names.items():
            line, reference = table.loc[own], references[name][theirs]
            cells.append(f"{own} {line['mean']:.3g} ± {line['sd']:.2g} / {reference:.3g}")
            inside = line["5%"] <= reference <= line["95%"]
            if not (inside or abs(line["mean"] - reference) < line["sd"]):
                apart.append(own)
        details[name] = dict(
            trusted=fitted.trusted,
            exchanges=fitted.num_exchanges,
            seconds=round(seconds, 1),
            apart=apart,
            verdict=fitted.verdict,
        )
        verdict = "trusted" if fitted.trusted else "**not trusted**"
        ours = f"{verdict}, {fitted.num_exchanges} exchanges, {seconds:.0f} CPU s"
        rows.append(table_row(f"{name}: `{one.formula}`, {one.family}", ours, "; ".join(cells)))
        print(rows[-1]["what"], "|", ours, "|", rows[-1]["reference"], "|", apart, flush=True)
        if not fitted.trusted:
            print("   ", fitted.verdict[:400], flush=True)
    trusted = sum(d["trusted"] for d in details.values())
    wrong = [n for n, d in details.items() if d["trusted"] and d["apart"]]
    median = statistics.median(d["exchanges"] for d in details.values())
    ours = (
        f"{trusted} of {len(details)}, {len(wrong)} trusted and apart, median {median:g} exchanges"
    )
    rows.append(table_row("right and trusted", ours, "", "all but one in twenty, none, 8"))
    print(ours)
    if args.json:
        write(args.json, rows, details=details)


if __name__ == "__main__":
    main()
